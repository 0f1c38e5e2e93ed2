"""Plans beside the practitioner's recipe, for twelve models and clusters: a table.

python benchmarks/recipe.py --into FILE [--only-recipe] [--limit-s S] [pair …]   # plans pairs
python benchmarks/recipe.py --from FILE                          # the table of docs/recipe.md

A pair is a model, or a model on a cluster ("llama3-8B@h100:64"); those that are named are planned
again, without names those that FILE lacks. Weights, gradients and optimizer state are 16 bits wide
(float16 on V100, else bfloat16). Each pair runs in a process of its own. The search ends after S
seconds with the best plan so far and its gap. Both are predictions of the same cost models; the
time is planning's alone, without imports, building and capturing the model.
"""

import argparse
import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import plan_cases
from full_size import job_of
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from autopar.text import seconds, size

SPARE_S = 300.0
"""For capture and the last solve, on top of five times the limit: on a loaded machine."""
PAIRS = (
    ("bert-large", "v100:8", 256),
    ("resnet-50", "v100:8", 512),
    ("vit-large", "a100:16", 1024),
    ("gpt2-xl", "a100:8", 128),
    ("t5-11B", "a100:64", 512),
    ("llama3-8B", "h100:8", 64),
    ("llama3-8B", "h100:64", 256),
    ("llama3-70B", "h100:128", 512),
    ("llama3-405B", "h100:1024", 1024),
    ("mixtral-8x7B", "h100:64", 512),
    ("qwen3-235B-A22B", "h100:512", 2048),
    ("deepseek-v3-671B", "h800:2048", 8192),
)
"""Model (of tests/families.py), cluster, samples of the global batch."""


def measure(
    name: str, cluster: str, samples: int, only_recipe: bool, limit_s: float
) -> dict[str, Any]:
    """One pair, in this process; what goes wrong is said in `recipe` or `plan`."""
    import warnings

    import autopar

    warnings.simplefilter("ignore")
    job = job_of(name, cluster, samples)
    batch = job.batch
    out: dict[str, Any] = {}
    limited = functools.partial(autopar.compile, time_limit_s=limit_s)
    for what, make in (("recipe", autopar.recipe), ("plan", limited)):
        if what == "plan" and only_recipe:
            continue
        start = time.perf_counter()
        try:
            found = make(job.model, cluster, batch, loss=job.loss, progress=False)
        except autopar.AutoparError as error:
            out[what] = {"fault": str(error)[:200], "took_s": time.perf_counter() - start}
        else:
            plan = found.plan
            mesh = " · ".join(f"{axis} {n}" for axis, n in plan.axes.items() if n > 1)
            named = {n for choice in plan.regions for n in choice.strategies}
            used = sorted(named - {"data", "expert", "pipeline"})  # which the mesh says
            by = f" by {plan.schedule.name}" if plan.schedule else ""
            certificate = plan.certificate
            out[what] = {
                "step_s": plan.predicted.step_s,
                "memory": plan.predicted.memory_bytes,
                "text": "; ".join([f"{mesh}{by}, {plan.microbatches} microbatches", *used]),
                "took_s": found.report["plan_s"],
                "gap": None if what == "recipe" else certificate.gap,
            }
        print(json.dumps(out), flush=True)  # the last line counts, should the process end here
    return out


def run(pair: tuple[str, str, int], only_recipe: bool, limit_s: float) -> dict[str, Any]:
    """One pair in a process of its own."""
    given = [sys.executable, __file__, "--one", *map(str, pair)]
    given += ["--limit-s", str(limit_s), *(["--only-recipe"] if only_recipe else [])]
    process = subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        stdout, stderr = process.communicate(timeout=5 * limit_s + SPARE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        stderr = f"ended after {5 * limit_s + SPARE_S:.0f} s"
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if process.returncode:
        found["ended"] = stderr.strip().splitlines()[-1] if stderr.strip() else "no reason given"
    return found


def row(pair: tuple[str, str, int], found: dict[str, Any]) -> tuple[str, ...]:
    """A pair's cells."""
    name, cluster, samples = pair
    cells = [f"{name}, {cluster}, {samples:,}"]
    for what in ("recipe", "plan"):
        one = found.get(what)
        if one is None:
            cells.append(found.get("ended", "not asked"))
        elif "fault" in one:
            cells.append(f"none in {one['took_s']:.0f} s: {one['fault']}")
        else:
            cells.append(f"{seconds(one['step_s'])}, {size(one['memory'])}: {one['text']}")
    steps = [found.get(what, {}).get("step_s") for what in ("recipe", "plan")]
    if all(steps):
        cells.append(f"{steps[0] / steps[1]:.3f}")
        cells.append(f"{found['plan']['gap']:.2%}")
        cells.append(f"{found['plan']['took_s']:.0f} s")
    return tuple(cells)


def show(path: Path) -> None:
    """The table of what a file has."""
    lines = plan_cases.known(path)
    table = Table(box=MARKDOWN)
    heads = ("model, cluster, batch", "recipe", "plan", "speed-up", "gap", "planned in")
    for name in heads:
        table.add_column(name)
    for pair in PAIRS:
        if found := lines.get(id_of(pair)):
            table.add_row(*row(pair, found))
    Console(width=10_000, highlight=False, color_system=None).print(table)


def id_of(pair: tuple[str, str, int]) -> str:
    """Of its line, and its name among arguments."""
    return f"{pair[0]}@{pair[1]}"


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all where left out")
    parser.add_argument("--only-recipe", action="store_true")
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--from", dest="source_file", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, cluster, samples = options.one
        measure(name, cluster, int(samples), options.only_recipe, options.limit_s)
        return
    if options.source_file:
        show(options.source_file)
        return
    if options.into is None:
        parser.error("--into or --from is needed")
    there = plan_cases.known(options.into)
    for pair in PAIRS:
        is_named = {pair[0], id_of(pair)} & set(options.names)
        if is_named or not (options.names or id_of(pair) in there):
            found = run(pair, options.only_recipe, options.limit_s)
            plan_cases.keep([{"id": id_of(pair), **found}], options.into)
            print(*row(pair, found), sep=" | ", flush=True)


if __name__ == "__main__":
    main()

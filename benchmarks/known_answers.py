"""How well-known models were trained, and what this planner would do on the same devices.

python benchmarks/known_answers.py --into FILE [case …] [--limit-s S]   # plans what FILE lacks
python benchmarks/known_answers.py --from FILE                # the text of docs/known-answers.md

Each case is planned freely, for S seconds at most, and with the known answer pinned; the best of
other meshes is planned for comparison, in --beside-s at most. Optimizer state is what those who
trained the model kept (18 bytes an element with its value and gradient: moments, a master copy and
gradients in float32).
"""

import argparse
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import plan_cases
from full_size import job_of
from known_cases import CASES, KEPT, RIVALS
from known_table import show
from plan_cases import Asked, Found, kept, rival, tried
from step_parts import parts_of

from autopar.capture import capture
from autopar.cluster import resolve_cluster
from autopar.graph.analyse import analyse
from autopar.plan import Plan


def solve(task: tuple[str, float, float], wanted: Sequence[str]) -> Iterator[Found]:
    """A case's plans, each by its name."""
    case_name, limit_s, beside_s = task
    case = next(one for one in CASES if one.name == case_name)
    warnings.simplefilter("ignore")
    job = job_of(case.model, case.cluster, case.samples)
    graph = analyse(capture(job.model, job.batch, job.loss))
    cluster = resolve_cluster(case.cluster)
    if case.kernels is not None:
        cluster = replace(cluster, device=replace(cluster.device, kernels=case.kernels))
    asked = Asked(graph, cluster, case.state)
    plan: Plan | None = None
    for name in wanted:
        what = name.rpartition("/")[2]
        if what in case.pins:
            found, made = tried(asked, case.pins[what], limit_s)
            if made is not None:
                found = {**found, "parts": parts_of(asked, made)}
            plan = made if what == "free" else plan
        elif plan is None:
            found = {"fault": "there is no plan"}
        elif what == KEPT:
            again = any("recompute" in choice.strategies for choice in plan.regions)
            found = kept(asked, plan, beside_s) if again else {"fault": "nothing is recomputed"}
        else:
            found = rival(asked, plan, RIVALS.index(what), beside_s)
        yield {"id": name, **found}


def main() -> None:
    """Plans, or the text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases; all where left out")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--from", dest="source_file", type=Path)
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--beside-s", type=float, default=60.0)
    options = parser.parse_args()
    if options.source_file:
        show(plan_cases.known(options.source_file))
        return
    if options.into is None:
        parser.error("--into or --from is needed")
    for case in CASES:
        if options.names and case.name not in options.names:
            continue
        there = plan_cases.known(options.into)
        wanted = [name for name in case.ids if name not in there or "ended" in there[name]]
        pinned = {f"{case.name}/{what}" for what in case.pins}
        if set(wanted) - pinned and f"{case.name}/free" not in wanted:
            free = f"{case.name}/free"  # what the rest is compared with
            wanted = [free, *(name for name in wanted if name != free)]
        task = (case.name, options.limit_s, options.beside_s)
        lines = plan_cases.run_alone(solve, task, wanted, 12 * options.limit_s)
        plan_cases.keep(lines, options.into)
        print(case.name, wanted, flush=True)


if __name__ == "__main__":
    main()

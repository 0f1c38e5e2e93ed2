"""Published configurations, pinned, beside the plan that is free: by the same model.

python benchmarks/published_plans.py --into FILE [--sources narayanan_table1 …] [--no-free]
    [--limit-s S] [--again]      # plans what FILE lacks; --again: also what came to no end
    [--above GAP]                # and what is proven to no less than this gap
    [--slower]                   # only free plans that are slower than a row, again
    [--why]                      # for the largest differences: what each pin costs
python benchmarks/published_plans.py --from FILE            # docs/published-plans.md's tables
python benchmarks/published_plans.py --from FILE --every    # docs/published-rows.md's

A case is a model, a cluster and a global batch; its rows are pinned one by one, then it is planned
without pins, for S seconds at most (where no plan was found by then, until there is one). All with
the presets' figures, the installed cost models and what the published run kept of an optimizer.
What a row's source doesn't state (recompute, the micro batch, chunks of stages) isn't pinned.
"""

import argparse
import json
import math
import subprocess
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plan_cases
from fidelity_predict import facts, graph_of, preset_of, state_of
from plan_cases import Asked, Found, tried
from published_beside import WHY, by_case, remarkable
from published_models import Shape
from published_plans_table import GAP, show
from published_plans_why import ladder
from published_runs import SITES, Run, read_runs
from step_parts import parts_of

from autopar.cluster import ClusterSpec

ORDER = (
    *("narayanan_table1", "korthikanti_table5", "korthikanti_fig1", "korthikanti_layer"),
    *("bloom", "vtrain_multi", "torchtitan", "foundry_h100", "foundry_a100"),
    *("dense_nvidia_hopper", "dense_maxtext_hopper", "moe_nvidia_hopper"),
    *("dense_nvidia_blackwell", "moe_nvidia_blackwell", "vtrain_single"),
)
FREE = "free"
ROW_S = 60.0
"""For which a row may plan, before its case is ended."""


@dataclass(frozen=True)
class Case:
    """What has one free plan. `rows`: names of the runs, by what they pin."""

    name: str
    source: str
    run: Run
    shape: Shape
    rows: Mapping[str, Run]

    @property
    def ids(self) -> tuple[str, ...]:
        """Of its lines."""
        return (*(f"{self.name}/{name}" for name in self.rows), f"{self.name}/{FREE}")


def shape_of(run: Run) -> Shape:
    """The run's model without what hangs on its plan: which kernel its software took for softmax
    and loss."""
    compiled = bool(facts(run.software).get("compiled_loss"))
    return replace(run.shape, fused_softmax=True, compiled_loss=compiled)


def cluster_of(run: Run) -> ClusterSpec:
    """The preset with the run's network cards, and eight bits where its products have them."""
    cluster, cards = preset_of(run), SITES.get(run.site, {}).get("nic", 1.0)
    kernels = cluster.device.kernels
    assert kernels is not None
    kernels = replace(kernels, weight_products=run.weight_products)
    links = [
        link if link.name == "nvlink" else replace(link, bytes_per_s=link.bytes_per_s * cards)
        for link in cluster.links
    ]
    return replace(cluster, device=replace(cluster.device, kernels=kernels), links=tuple(links))


def pins_of(run: Run) -> Mapping[str, Any]:
    """What the source states; strategies as this project has them (`selective_op` is "full")."""
    unsaid = {"parallel.recompute": "recompute", "micro_batch": "microbatches"}
    unsaid["parallel.vp"] = "pipeline"
    left = {unsaid.get(text.removesuffix(" isn't stated"), "") for text in run.assumed}
    return {name: value for name, value in run.pins.items() if name not in left}


def cases(sources: Sequence[str]) -> tuple[Case, ...]:
    """Those of the sources, in ORDER; rows that pin the same count once."""
    found: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in sorted((r for r in read_runs() if not r.unsupported), key=_place):
        if not sources or run.source in sources:
            state = tuple(facts(run.software)["state"].items())
            cluster = run.preset, run.devices, run.site, run.power_w, run.weight_products
            found[shape_of(run), run.batch, cluster, state].append(run)
    out = []
    for (shape, *_), runs in found.items():
        rows: dict[str, Run] = {}
        pinned = set()
        for run in runs:
            text = json.dumps(pins_of(run), sort_keys=True)
            if text not in pinned:
                pinned.add(text)
                rows[run.name] = run
        first = runs[0]
        out.append(Case(f"{first.source}/{first.name}", first.source, first, shape, rows))
    return tuple(out)


def _place(run: Run) -> int:
    return ORDER.index(run.source)


def solve(task: tuple[Case, float], wanted: Sequence[str]) -> Iterator[Found]:
    """A case's plans."""
    case, limit_s = task
    warnings.simplefilter("ignore")
    asked = Asked(
        graph_of(case.shape, case.run.batch), cluster_of(case.run), state_of(case.run.software)
    )
    about = {"source": case.source, "group": case.run.group, "cluster": case.run.preset}
    for name in wanted:
        what = name.rpartition("/")[2]
        if what.startswith(WHY):
            rungs = ladder(asked, pins_of(case.rows[what.removeprefix(WHY)]), limit_s)
            yield {"id": name, "rungs": rungs}
            continue
        row = case.rows.get(what)
        found, plan = tried(asked, {}, limit_s) if row is None else tried(asked, pins_of(row))
        if row is not None:
            found |= {"measured_s": row.step_s, "assumed": row.assumed}
        if plan is not None:
            found["parts"] = parts_of(asked, plan)
        yield {"id": name, **about, **found}


def main() -> None:
    """Plans, or the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--from", dest="source_file", type=Path)
    parser.add_argument("--sources", nargs="*", default=[])
    parser.add_argument("--no-free", action="store_true")
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--above", type=float, default=math.inf)
    parser.add_argument("--slower", action="store_true")
    parser.add_argument("--why", action="store_true")
    parser.add_argument("--every", action="store_true")
    options = parser.parse_args()
    if options.source_file:
        found = list(plan_cases.known(options.source_file).values())
        show(found, list(read_runs()), options.every)
        return
    chosen = cases(options.sources)
    if options.into is None:
        parser.error("--into or --from is needed")
    commit = _commit()
    for case in _in_order(chosen):
        wanted = list(_wanted(case, plan_cases.known(options.into), options))
        if not wanted:
            continue
        whole_s = ROW_S * len(wanted) + 4 * options.limit_s
        lines = plan_cases.run_alone(solve, (case, options.limit_s), wanted, whole_s)
        plan_cases.keep(({**line, "commit": commit} for line in lines), options.into)
        print(case.name, len(wanted), flush=True)


def _in_order(chosen: Sequence[Case]) -> Sequence[Case]:
    """Each model's smallest cluster first, then each's next: a run that was cut short has all
    models."""
    seen: Counter[tuple[str, Shape, str]] = Counter()
    rounds: list[tuple[int, int, int, Case]] = []
    for case in sorted(chosen, key=lambda case: (case.run.devices, case.shape.layers)):
        model = case.source, case.shape, case.run.preset
        rounds.append((seen[model], case.run.devices, len(rounds), case))
        seen[model] += 1
    return [case for *_, case in sorted(rounds, key=lambda one: one[:3])]


def _commit() -> str:
    """The last that changed what plans."""
    asked = ("git", "log", "-1", "--format=%h", "--", "autopar", "strategies", "cost_models")
    root = Path(__file__).parent.parent
    said = subprocess.run(asked, cwd=root, check=True, capture_output=True, text=True)
    return said.stdout.strip()


def _wanted(case: Case, there: Mapping[str, Any], options: argparse.Namespace) -> Iterator[str]:
    if options.slower:
        found = by_case([there[name] for name in case.ids if name in there])
        slow = any(one.ratio is not None and one.ratio < 1 - GAP for one in found)
        yield from case.ids[-1:] if slow else ()
        return
    if options.why:
        lines = [line for line in there.values() if "parts" in line]
        for one in remarkable(by_case(lines)):
            assert one.best is not None
            name = f"{one.name}/{WHY}{one.best['id'].rpartition('/')[2]}"
            if one.name == case.name and name not in there:
                yield name
        return
    for name in case.ids:
        if options.no_free and name.endswith(f"/{FREE}"):
            continue
        line = there.get(name, {"ended": "", "gap": math.inf})
        again = options.again and "ended" in line
        if name not in there or again or line.get("gap", 0.0) > options.above:
            yield name


if __name__ == "__main__":
    main()

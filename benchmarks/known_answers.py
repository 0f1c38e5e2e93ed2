"""How well-known models were trained, and what this planner would do on the same devices.

python benchmarks/known_answers.py --into FILE [case …] [--limit-s S]   # plans what FILE lacks
python benchmarks/known_answers.py --from FILE                # the text of docs/known-answers.md

Each case is planned freely, for S seconds at most, and with the known answer pinned; the best of
other meshes is planned for comparison. Optimizer state is what those who trained the model kept
(18 bytes an element with its value and gradient: moments, a master copy and gradients in float32).
"""

import argparse
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import plan_cases
from full_size import job_of
from known_cases import CASES
from known_table import show
from plan_cases import Asked, Found, planned

from autopar.capture import capture
from autopar.cluster import resolve_cluster
from autopar.graph.analyse import analyse

MESHES = 2
"""Others, beside the plan's own, on which the best is planned."""


def solve(task: tuple[str, float], wanted: Sequence[str]) -> Iterator[Found]:
    """A case's plans, each by its name."""
    case_name, limit_s = task
    case = next(one for one in CASES if one.name == case_name)
    warnings.simplefilter("ignore")
    job = job_of(case.model, case.cluster, case.samples)
    graph = analyse(capture(job.model, job.batch, job.loss))
    asked = Asked(graph, resolve_cluster(case.cluster), case.state)
    for name in wanted:
        what = name.rpartition("/")[2]
        meshes = MESHES if what == "free" else 0
        yield {"id": name, **planned(asked, case.pins[what], limit_s, meshes)}


def main() -> None:
    """Plans, or the text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases; all where left out")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--from", dest="source_file", type=Path)
    parser.add_argument("--limit-s", type=float, default=120.0)
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
        lines = plan_cases.run_alone(
            solve, (case.name, options.limit_s), wanted, 8 * options.limit_s
        )
        plan_cases.keep(lines, options.into)
        print(case.name, wanted, flush=True)


if __name__ == "__main__":
    main()

"""Predicts published runs with the code that plans, and compares: step time, memory, order.

    python benchmarks/fidelity.py                    # every source, one line each
    python benchmarks/fidelity.py --source bloom -v  # one source, run by run

A run becomes a model on the meta device, a cluster and pins that leave nothing open; capture,
candidates, typing and account are planning's own. Sources: benchmarks/data/README.md.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from published_models import Shape, build
from published_runs import DATA, SITES, Run, read_runs
from rich.console import Console
from rich.table import Table

import autopar
from autopar.capture import capture
from autopar.cluster import resolve_cluster
from autopar.graph.analyse import analyse
from autopar.graph.model_graph import ModelGraph
from autopar.plan import Predicted
from autopar.planning.account import account
from autopar.planning.decide import tokens_of
from autopar.planning.pinned import pinned_program
from autopar.planning.pins import read_pins
from autopar.planning.prices import Prices
from autopar.plugin import Candidate, ClusterSpec, Mesh, Region, Schedule, Strategy
from autopar.registry import select_cost_models, select_strategies
from autopar.strategies.recompute import Recompute

ADAM = 2.0
"""State elements for each of a parameter."""


@dataclass(frozen=True)
class RecomputeInStages(Recompute):
    """Recompute under any schedule: others' programs do what this one's runtime can't yet."""

    def conflict(
        self, candidate: Candidate, region: Region, mesh: Mesh, schedule: Schedule | None = None
    ) -> str | None:
        """As without stages."""
        return super().conflict(candidate, region, mesh, None)


@dataclass(frozen=True)
class Outcome:
    """A run with what was predicted for it, or why nothing was."""

    run: Run
    predicted: Predicted | None
    fault: str = ""

    @property
    def error(self) -> float | None:
        """Of the step's time, relative."""
        if self.predicted is None or self.run.step_s is None:
            return None
        return self.predicted.step_s / self.run.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """Of a device's memory, relative."""
        if self.predicted is None or self.run.memory_bytes is None:
            return None
        return self.predicted.memory_bytes / self.run.memory_bytes - 1


# ---------------------------------------------------------------- prediction


@functools.lru_cache(maxsize=8)
def graph_of(shape: Shape, batch: int) -> ModelGraph:
    """The captured model; runs that differ in the plan alone share it."""
    model, given = build(shape, batch)
    return analyse(capture(model, given, None))


@functools.cache
def strategies() -> tuple[Strategy, ...]:
    """Those that are installed, with recompute under schedules."""
    found = select_strategies()
    return select_strategies([RecomputeInStages() if s.name == "recompute" else s for s in found])


@functools.cache
def cluster_of(preset: str, devices: int, site: str, software: str) -> ClusterSpec:
    """The preset with the run's network and the software that it used."""
    cluster = resolve_cluster(f"{preset}:{devices}")
    table = json.loads((DATA / "software.json").read_text(encoding="utf-8"))[software]
    assert cluster.device.kernels is not None
    kernels = replace(cluster.device.kernels, **table["kernels"])
    where = SITES.get(site, {})
    links = tuple(
        replace(link, bytes_per_s=link.bytes_per_s * where.get("nic", 1.0))
        if link.name == "network"
        else link
        for link in cluster.links
    )
    return replace(cluster, device=replace(cluster.device, kernels=kernels), links=links)


def predict(run: Run) -> Outcome:
    """What planning's own account says of the run's pinned plan."""
    if run.unsupported:
        return Outcome(run, None, run.unsupported)
    try:
        graph = graph_of(run.shape, run.batch)
        cluster = cluster_of(run.preset, run.devices, run.site, run.software)
        pins = read_pins(run.pins, (), strategies())
        program = pinned_program(graph, cluster, strategies(), pins)
        prices = Prices(select_cost_models(), program.setting.mesh, cluster)
        return Outcome(run, account(program, prices, ADAM, tokens_of(graph)).predicted)
    except autopar.AutoparError as error:
        return Outcome(run, None, str(error))


# ---------------------------------------------------------------- scores


def mean_error(outcomes: Iterable[Outcome]) -> float:
    """Mean absolute error of the step's time, relative."""
    return statistics.fmean(abs(o.error) for o in outcomes if o.error is not None)


def ordered(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Of all pairs that differ by more than 5 %, how many are in the right order."""
    known = [(o.run.step_s, o.predicted.step_s) for o in outcomes if o.run.step_s and o.predicted]
    right = pairs = 0
    for i, (true, guess) in enumerate(known):
        for other, its in known[i + 1 :]:
            if max(true, other) > 1.05 * min(true, other):
                pairs += 1
                right += (true > other) == (guess > its)
    return right, pairs


def regret(outcomes: Sequence[Outcome], top: int = 3) -> float:
    """How much slower the best of the predicted `top` is than the best of all, as measured."""
    known = [(o.predicted.step_s, o.run.step_s) for o in outcomes if o.run.step_s and o.predicted]
    return min(true for _, true in sorted(known)[:top]) / min(true for _, true in known) - 1


def percent(values: Sequence[float]) -> str:
    """The mean, for reading."""
    return f"{100 * statistics.fmean(values):.1f} %" if values else "–"


def report(outcomes: Sequence[Outcome], console: Console) -> None:
    """The tables."""
    table = Table(title="error of the step's time")
    for heading in ("source", "runs", "all", "fitted", "other half", "bias", "not predicted"):
        table.add_column(heading)
    for source in dict.fromkeys(o.run.source for o in outcomes):
        mine = [o for o in outcomes if o.run.source == source]
        known = [o for o in mine if o.error is not None]
        halves = [
            [abs(o.error or 0) for o in known if o.run.fitted == half] for half in (True, False)
        ]
        errors = [o.error or 0.0 for o in known]
        table.add_row(
            source,
            str(len(known)),
            percent([abs(e) for e in errors]),
            *map(percent, halves),
            percent(errors),
            str(len([o for o in mine if o.predicted is None])),
        )
    console.print(table)
    memory = Table(title="error of memory")
    for heading in ("source", "runs", "error", "bias"):
        memory.add_column(heading)
    for source in dict.fromkeys(o.run.source for o in outcomes if o.memory_error is not None):
        found = [
            o.memory_error or 0.0
            for o in outcomes
            if o.run.source == source and o.memory_error is not None
        ]
        memory.add_row(source, str(len(found)), percent([abs(e) for e in found]), percent(found))
    console.print(memory)
    order = Table(title="order within a group of plans")
    for heading in ("group", "plans", "pairs in order", "best of the top three is off by"):
        order.add_column(heading)
    for source in ("vtrain_multi", "bloom"):
        for group in dict.fromkeys(o.run.group for o in outcomes if o.run.source == source):
            mine = [
                o
                for o in outcomes
                if o.run.group == group and o.error is not None and o.run.source == source
            ]
            if len(mine) >= 6:
                right, pairs = ordered(mine)
                order.add_row(
                    group, str(len(mine)), f"{right} / {pairs}", f"{100 * regret(mine):.2f} %"
                )
    console.print(order)


def line(one: Outcome) -> str:
    """One run, for reading."""
    run, p = one.run, one.predicted
    pins = " ".join(f"{key} {value}" for key, value in run.pins.items() if value not in (1, False))
    if p is None:
        return f"{run.name}: {one.fault}"
    text = f"{run.name}, {pins}:"
    if one.error is not None:
        kinds = {
            "compute": p.compute_s,
            "communication": p.communication_s,
            "optimizer": p.optimizer_s,
            "waiting": p.waiting_s,
        }
        parts = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in kinds.items())
        text += f" {run.step_s:.3f} s, predicted {p.step_s:.3f} ({100 * one.error:+.1f} %): {parts}"
    if one.memory_error is not None and run.memory_bytes is not None:
        parts = ", ".join(f"{kind} {size / 2**30:.1f}" for kind, size in p.memory.items())
        text += f"; {run.memory_bytes / 2**30:.1f} GiB, predicted {p.memory_bytes / 2**30:.1f} "
        text += f"({100 * one.memory_error:+.1f} %): {parts}"
    return text


def main() -> None:
    """Predict and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", help="only sources whose name starts so")
    parser.add_argument("--verbose", "-v", action="store_true", help="every run")
    options = parser.parse_args()
    console = Console(width=160)
    start = time.perf_counter()
    runs = [r for r in read_runs() if not options.source or r.source.startswith(options.source)]
    # Runs of one model together: it is captured once.
    order = sorted(range(len(runs)), key=lambda i: (repr(runs[i].shape), runs[i].batch))
    found: dict[int, Outcome] = {}
    for i in order:
        found[i] = predict(runs[i])
        if options.verbose:
            console.print(line(found[i]), highlight=False, soft_wrap=True)
    outcomes = [found[i] for i in range(len(runs))]
    report(outcomes, console)
    refused = dict.fromkeys(o.fault for o in outcomes if o.predicted is None)
    for fault in refused:
        count = sum(o.fault == fault for o in outcomes)
        console.print(f"not predicted, {count}: {fault}", highlight=False, soft_wrap=True)
    console.print(f"{len(outcomes)} runs in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

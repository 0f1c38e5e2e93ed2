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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from published_models import Shape, build
from published_runs import DATA, DEVICES, SITES, Run, read_runs
from rich.console import Console
from rich.table import Table

import autopar
from autopar.capture import capture
from autopar.cluster import resolve_cluster
from autopar.cost_models.collectives import CollectiveCost
from autopar.cost_models.overlap import OverlapCost
from autopar.graph.analyse import analyse
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.program import Program
from autopar.layouts.state_ratio import StateRatio
from autopar.plan import Predicted
from autopar.planning.account import account, stage_effects, stage_of, step_seconds
from autopar.planning.books import Tally, memory_of, tally, timed
from autopar.planning.decide import tokens_of
from autopar.planning.joined import whole_calls
from autopar.planning.pinned import pinned_program
from autopar.planning.pins import read_pins
from autopar.planning.prices import Prices
from autopar.plugin import (
    Candidate,
    ClusterSpec,
    Collective,
    CostModel,
    Effect,
    Kernels,
    Mesh,
    Region,
    Resident,
    Schedule,
    Strategy,
)
from autopar.registry import select_cost_models, select_strategies
from autopar.strategies.recompute import Recompute

FORMULA = ("parameter", "gradient", "optimizer", "master", "saved")
"""Kinds of memory that papers' formulas have."""


@dataclass(frozen=True)
class RecomputeInStages(Recompute):
    """Recompute under any schedule: others' programs do what this one's runtime can't yet."""

    def conflict(
        self, candidate: Candidate, region: Region, mesh: Mesh, schedule: Schedule | None = None
    ) -> str | None:
        """As without stages."""
        return super().conflict(candidate, region, mesh, None)


@dataclass(frozen=True)
class CutMessages(CollectiveCost):
    """What all tp ranks have goes to the next stage in parts, one from each, and is gathered there
    (Narayanan et al. 2021, "scatter/gather optimization"); this project's programs send it whole.
    """

    def cost(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> float:
        """Seconds."""
        ranks = mesh.size("tp")
        if not isinstance(effect, Collective) or effect.op != "send" or ranks == 1:
            return super().cost(effect, mesh, cluster)
        part = replace(effect, bytes=-(-effect.bytes // ranks))
        gather = replace(effect, op="all_gather", axes=(mesh.part("tp"),))
        return super().cost(part, mesh, cluster) + super().cost(gather, mesh, cluster)


@dataclass(frozen=True)
class Outcome:
    """A run with what was predicted for it, or why nothing was."""

    run: Run
    predicted: Predicted | None
    fault: str = ""
    memory_bytes: int = 0
    """What the source's figure of memory counts of the predicted bytes."""

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
        return self.memory_bytes / self.run.memory_bytes - 1


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
def constants() -> Mapping[str, float]:
    """Of devices ("ampere.sustained"), links ("nvlink.rate") and software ("megatron.op_s"), and
    those that all devices share ("all.prologue"); see benchmarks/data/README.md."""
    found: dict[str, float] = json.loads((DATA / "constants.json").read_text(encoding="utf-8"))
    return found


def owners(run: Run) -> tuple[str, ...]:
    """Whose constants a run depends on."""
    device = DEVICES[run.preset]
    network = str(SITES.get(run.site, {}).get("network", "network"))
    return device, run.software, f"{run.software}_on_{device}", "nvlink", network, "all"


def preset_of(run: Run) -> ClusterSpec:
    """The run's cluster under the preset's figures."""
    return _preset(run.preset, run.devices, run.power_w)


@functools.cache
def _preset(name: str, devices: int, power_w: int) -> ClusterSpec:
    spec: dict[str, object] = {"preset": f"{name}:{devices}"}
    if power_w:
        spec["memory_bytes_per_s"] = 2.4e12 * 0.86
    return resolve_cluster(spec)


def cluster_of(run: Run, values: Mapping[str, float]) -> ClusterSpec:
    """The preset with the run's network, and the constants of its device, links and software."""
    cluster, mine = preset_of(run), owners(run)
    own = {
        name.split(".")[1]: value
        for owner in mine
        for name, value in values.items()
        if name.split(".")[0] == owner and owner not in ("nvlink", mine[4])
    }
    assert cluster.device.kernels is not None
    known = {field.name for field in fields(Kernels)}
    kernels = replace(
        cluster.device.kernels,
        joins_pointwise=facts(run.software)["joins_pointwise"],
        weight_products=run.weight_products,
        **{name: value for name, value in own.items() if name in known},  # type: ignore[arg-type]
    )
    device = replace(
        cluster.device,
        kernels=kernels,
        op_overhead_s=own["op_s"],
        memory_bytes_per_s=cluster.device.memory_bytes_per_s * own["memory"],
    )
    network = mine[4]
    cards = SITES.get(run.site, {}).get("nic", 1.0)
    links = tuple(
        replace(link, bytes_per_s=link.bytes_per_s * values["nvlink.rate"])
        if link.name == "nvlink"
        else replace(
            link,
            bytes_per_s=link.bytes_per_s * cards * values[f"{network}.rate"],
            shared_efficiency=min(1.0, values[f"{network}.shared"])
            if link.shared_efficiency < 1
            else 1.0,
        )
        for link in cluster.links
    )
    return replace(cluster, device=device, links=links)


@functools.cache
def facts(software: str) -> Mapping[str, Any]:
    """What a generation of software did (benchmarks/data/software.json)."""
    found: dict[str, Mapping[str, Any]] = json.loads(
        (DATA / "software.json").read_text(encoding="utf-8")
    )
    return found[software]


def state_of(software: str) -> StateRatio:
    """What the software kept for each element of a parameter."""
    return StateRatio(**facts(software)["state"])


@functools.cache
def cost_models(software: str) -> tuple[CostModel, ...]:
    """Those that are installed; gradient sums hide where the software hid them."""
    mine: dict[str, CostModel] = {"overlap": OverlapCost(hides_sums=facts(software)["hides_sums"])}
    if facts(software)["cuts_messages"]:
        mine["collectives"] = CutMessages()
    return select_cost_models([mine.get(m.name, m) for m in select_cost_models()])


@dataclass(frozen=True)
class Prepared:
    """A run's program, and what each of its stages does in a step, worked out once."""

    run: Run
    program: Program
    stages: tuple[int, ...]
    tallies: tuple[Tally, ...]
    """Of stages that differ; `stages` says which of them each stage is."""


def prepare(run: Run) -> Prepared | str:
    """The run's pinned plan as a program, or why there is none."""
    if run.unsupported:
        return run.unsupported
    try:
        graph = graph_of(run.shape, run.batch)
        pins = read_pins(run.pins, (), strategies())
        program = pinned_program(graph, preset_of(run), strategies(), pins)
        found: dict[frozenset[object], int] = {}
        tallies: list[Tally] = []
        stages = []
        for effects in stage_effects(program, state_of(run.software)):
            one = tally(whole_calls(effects))
            key = frozenset(one.items())
            if key not in found:
                found[key] = len(tallies)
                tallies.append(one)
            stages.append(found[key])
        return Prepared(run, program, tuple(stages), tuple(tallies))
    except autopar.AutoparError as error:
        return str(error)


def timed_s(one: Prepared, values: Mapping[str, float]) -> float:
    """The step's time, as a plan's account has it."""
    setting = one.program.setting
    prices = Prices(cost_models(one.run.software), setting.mesh, cluster_of(one.run, values))
    books = [timed(found, prices, setting.microbatches) for found in one.tallies]
    return step_seconds([books[stage] for stage in one.stages], setting)


def counted_bytes(one: Prepared, prices: Prices, predicted: Predicted) -> int:
    """The predicted bytes that the source's figure counts: all that the device holds, what its
    allocator reserved, or, by formula, the layers' states and saved tensors on the first stage."""
    counts = one.run.counts or str(facts(one.run.software)["counts"])
    if counts == "device":
        return predicted.memory_bytes
    if counts == "allocator":
        return predicted.memory_bytes - predicted.memory.get("overhead", 0)
    assert counts == "layers of the first stage", counts
    effects = next(iter(stage_effects(one.program, state_of(one.run.software))))
    held = [(path, e) for path, e in effects if path and isinstance(e, Resident)]
    memory = memory_of(held, stage_of(one.program, 0), prices)
    return sum(
        memory.get(kind, 0) for kind in ("parameter", "gradient", "optimizer", "master", "saved")
    )


def predict(run: Run) -> Outcome:
    """What planning's own account says of the run's pinned plan."""
    one = prepare(run)
    if isinstance(one, str):
        return Outcome(run, None, one)
    prices = Prices(
        cost_models(run.software), one.program.setting.mesh, cluster_of(run, constants())
    )
    graph = one.program.model
    state = state_of(run.software)
    predicted = account(one.program, prices, state, tokens_of(graph)).predicted
    return Outcome(run, predicted, memory_bytes=counted_bytes(one, prices, predicted))


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


def too_large(one: Outcome) -> bool:
    """Whether the plan would be refused on its device, though it ran."""
    assert one.predicted is not None
    return one.predicted.memory_bytes > preset_of(one.run).device.memory_bytes


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
    known = [o for o in outcomes if o.predicted is not None]
    large = [o for o in known if too_large(o)]
    for source in dict.fromkeys(o.run.source for o in outcomes if o.memory_error is not None):
        found = [
            o.memory_error or 0.0
            for o in outcomes
            if o.run.source == source and o.memory_error is not None
        ]
        memory.add_row(source, str(len(found)), percent([abs(e) for e in found]), percent(found))
    console.print(memory)
    console.print(
        f"called too large for their device: {len(large)} of {len(known)}; all of them ran"
    )
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
    pins = " ".join(
        f"{key} {value}"
        for key, value in run.pins.items()
        if value is not False and (key == "zero" or value is True or value != 1)
    )
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
        text += f"; {run.memory_bytes / 2**30:.1f} GiB, predicted {one.memory_bytes / 2**30:.1f} "
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

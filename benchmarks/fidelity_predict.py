"""A published run through the code that plans: its program, and what its account says of it.

A run becomes a model on the meta device, a cluster and pins that leave nothing open; capture,
candidates, typing and account are planning's own. What a run's effects are is worked out once
(`prepare`); then only constants change their prices.
"""

import functools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from published_models import Shape, build
from published_runs import DATA, DEVICES, LINE_BYTES_PER_S, PEAK_BYTES_PER_S, SITES, Run
from published_software import SixteenBitHead, as_software

import autopar
from autopar.capture import capture
from autopar.cluster import resolve_cluster
from autopar.cost_models.collectives import CollectiveCost
from autopar.cost_models.overlap import OverlapCost
from autopar.graph.analyse import analyse
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.layout import Setting
from autopar.layouts.state_ratio import StateRatio
from autopar.planning.account import stage_of, step_seconds
from autopar.planning.books import Books, Stage, Tally, memory_of, tally, timed
from autopar.planning.joined import whole_calls
from autopar.planning.pinned import pinned_program
from autopar.planning.pins import read_pins
from autopar.planning.prices import Prices
from autopar.planning.program_effects import stage_effects
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

FORMULA = frozenset({"parameter", "gradient", "optimizer", "master", "saved"})
"""Kinds of memory that papers' formulas have."""

Constants = Mapping[str, float]


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
class TheirOverlap(OverlapCost):
    """`hidden`: what a generation of software ran beside compute: "sums" of gradients and ZeRO's
    collectives, "tensor" parallelism's, "messages" between stages."""

    hidden: frozenset[str] = frozenset()

    def hides(self, effect: Collective) -> bool:
        """Whether a collective counts as hidden."""
        if effect.phase == "grad_sync" or effect.hides:
            return "sums" in self.hidden
        axes = {part.axis for part in effect.axes}
        if effect.op == "send":
            return "messages" in self.hidden
        return axes == {"tp"} and "tensor" in self.hidden


# ---------------------------------------------------------------- models, software, clusters


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
def written() -> Mapping[str, Mapping[str, Any]]:
    """constants.json: of each, the value stated beforehand, the fitted one and what it means."""
    found: dict[str, Mapping[str, Any]] = json.loads(
        (DATA / "constants.json").read_text(encoding="utf-8")
    )
    return found


def stated() -> Constants:
    """Before any fit."""
    return {name: one["stated"] for name, one in written().items()}


def constants() -> Constants:
    """Of devices ("ampere.sustained"), links ("nvlink.rate") and software ("megatron.op_s"), and
    those that all devices share ("all.prologue"); see benchmarks/data/README.md."""
    return {name: one["fitted"] for name, one in written().items()}


@functools.cache
def facts(software: str) -> Mapping[str, Any]:
    """What a generation of software did (benchmarks/data/software.json)."""
    found: dict[str, Mapping[str, Any]] = json.loads(
        (DATA / "software.json").read_text(encoding="utf-8")
    )
    return found[software]


def owners(run: Run) -> tuple[str, ...]:
    """Whose constants a run depends on, all devices' first."""
    device = DEVICES[run.preset]
    code = str(facts(run.software)["constants"])
    return "all", device, code, f"{code}_on_{device}", network_of(run)


def network_of(run: Run) -> str:
    """Between its nodes."""
    return str(SITES.get(run.site, {}).get("network", "network"))


@functools.cache
def _preset(name: str, devices: int) -> ClusterSpec:
    if name != "gb200_nvl72" or devices <= 64:
        return resolve_cluster(f"{name}:{devices}")
    # Jobs over several racks use 64 of a rack's 72 devices.
    inner, outer = resolve_cluster(f"{name}:{72 * devices}").links
    whole = resolve_cluster(f"{name}:64")
    links = (replace(inner, devices=64), replace(outer, devices=devices))
    return replace(whole, devices=devices, links=links)


def preset_of(run: Run) -> ClusterSpec:
    """The run's cluster under the preset's figures."""
    found = _preset(run.preset, run.devices)
    if not run.power_w:
        return found
    memory = replace(found.device, memory_bytes_per_s=2.4e12)
    return replace(found, device=replace(memory, memory_bytes=96 * 10**9))


def cluster_of(run: Run, values: Constants) -> ClusterSpec:
    """The preset with the run's network, and the constants of its device, links and software."""
    cluster, of = preset_of(run), owners(run)[:4]
    own: dict[str, float] = {}
    for owner in of:
        mine = {k.split(".")[1]: v for k, v in values.items() if k.split(".")[0] == owner}
        own.update(mine)
    assert cluster.device.kernels is not None
    known = {field.name for field in fields(Kernels)} & set(own)
    if run.power_w:
        own["sustained"] *= own["at_500_w"]
        own["attention"] *= own["at_500_w"]
    rates = dict(cluster.device.flops_per_s)
    eight = "float8_e4m3fn"
    if eight in rates:
        rates[eight] *= own["fp8"] * (own["fp8_rows"] if run.scaled_rows else 1.0)
    code = facts(run.software)
    kernels = replace(
        cluster.device.kernels,
        joins_pointwise=code["joins"] != "nothing",
        joins_sums=code["joins"] == "all",
        weight_products=run.weight_products,
        cast_bytes=0.0 if code["casts_apart"] else cluster.device.kernels.cast_bytes,
        **{name: own[name] for name in known},  # type: ignore[arg-type]
    )
    device = replace(
        cluster.device,
        kernels=kernels,
        op_overhead_s=own["op_s"],
        flops_per_s=tuple(rates.items()),
        memory_bytes_per_s=_memory_rate(run) * own["memory"],
    )
    return replace(cluster, device=device, links=_links(run, cluster, values))


def _memory_rate(run: Run) -> float:
    return 2.4e12 if run.power_w else PEAK_BYTES_PER_S[run.preset]


def _links(run: Run, cluster: ClusterSpec, values: Constants) -> tuple[Any, ...]:
    network, cards = network_of(run), SITES.get(run.site, {}).get("nic", 1.0)
    found = []
    for link in cluster.links:
        if link.name == "nvlink":  # NCCL's own figures
            found.append(link)
            continue
        rate = LINE_BYTES_PER_S[run.preset] * cards * values[f"{network}.rate"]
        crowding = values[f"{network}.crowding"] if link.crowding else 0.0
        found.append(replace(link, bytes_per_s=rate, crowding=crowding))
    return tuple(found)


def state_of(software: str) -> StateRatio:
    """What the software kept for each element of a parameter."""
    return StateRatio(**facts(software)["state"])


@functools.cache
def cost_models(software: str, columns: int = 0) -> tuple[CostModel, ...]:
    """Those that are installed, with what the software hid, and how it sent. `columns`: those of
    the logits on a rank, where their product alone isn't in eight bits."""
    code = facts(software)
    mine: dict[str, CostModel] = {"overlap": TheirOverlap(hidden=frozenset(code["hides"]))}
    if columns:
        mine["compute"] = SixteenBitHead(columns)
    if code["cuts_messages"]:
        mine["collectives"] = CutMessages()
    return select_cost_models([mine.get(m.name, m) for m in select_cost_models()])


# ---------------------------------------------------------------- what a run does

Held = Mapping[tuple[str, Resident], int]
PARAMETER, GRADIENT = Resident("parameter", 0), Resident("gradient", 0)


@dataclass(frozen=True)
class Work:
    """One stage's step: what takes time, and what is held, by layer and kind (a Resident of no
    bytes)."""

    tally: Tally
    held: Held
    stage: Stage


@dataclass(frozen=True)
class Prepared:
    """What each stage of a run's program does in a step. `stages` says which of the works, those
    that differ, each stage has."""

    run: Run
    setting: Setting
    stages: tuple[int, ...]
    works: tuple[Work, ...]


def prepare(run: Run) -> Prepared | str:
    """What the run's pinned plan does, or why there is none."""
    if run.unsupported:
        return run.unsupported
    rates = dict(preset_of(run).device.flops_per_s)
    if run.weight_products and run.weight_products not in rates:
        return f"{run.preset} has no rate for {run.weight_products}"
    try:
        graph = graph_of(run.shape, run.batch)
        pins = read_pins(run.pins, (), strategies())
        program = pinned_program(graph, preset_of(run), strategies(), pins)
        known: dict[tuple[object, ...], int] = {}
        works: list[Work] = []
        stages = []
        for number, effects in enumerate(stage_effects(program, state_of(run.software))):
            found = as_software(whole_calls(effects), run, facts(run.software))
            held: Counter[tuple[str, Resident]] = Counter()
            for path, effect, _ in found:
                if isinstance(effect, Resident):
                    held[path, replace(effect, bytes=0)] += effect.bytes
            one = Work(tally(found), held, stage_of(program, number))
            if facts(run.software)["keeps_gathered"] and program.setting.schedule is not None:
                one = _gathered(one, run)
            kinds: Counter[Resident] = Counter()
            for (_, kind), size in held.items():
                kinds[kind] += size
            in_flight = one.stage.in_flight
            key = (frozenset(one.tally.items()), frozenset(kinds.items()), in_flight)
            if key not in known:
                known[key] = len(works)
                works.append(one)
            stages.append(known[key])
    except autopar.AutoparError as error:
        return str(error)
    return Prepared(run, program.setting, tuple(stages), tuple(works))


def _gathered(work: Work, run: Run) -> Work:
    """Under stages FSDP2 gathers once a step, keeps parameters and gradients whole until its end,
    and scatters gradients once."""
    pieces = run.pins["dp"] * run.pins["cp"]
    state = state_of(run.software)
    masters = sum(n for (_, kind), n in work.held.items() if kind.what == "master")
    elements = masters // 4 * pieces
    held = {
        **work.held,
        ("", PARAMETER): work.held.get(("", PARAMETER), 0) + 2 * elements,
        ("", GRADIENT): work.held.get(("", GRADIENT), 0)
        + state.gradient_bytes * elements * (pieces - 1) // pieces,
    }
    now: Counter[tuple[Effect, int]] = Counter()
    for (effect, calls), count in work.tally.items():
        if isinstance(effect, Collective) and effect.hides:
            if effect.op == "all_gather" and effect.phase == "backward":
                continue
            now[replace(effect, per="step"), calls] += count
        else:
            now[effect, calls] += count
    return Work(now, held, work.stage)


# ---------------------------------------------------------------- what it costs


@dataclass(frozen=True)
class Outcome:
    """A run with what was predicted for it, or why nothing was."""

    run: Run
    step_s: float = 0.0
    seconds: Mapping[str, float] | None = None
    """Of the slowest stage, by kind."""
    memory: Mapping[str, int] | None = None
    """Of the fullest stage, by kind."""
    counted_bytes: int = 0
    """What the source's figure of memory counts of them."""
    fault: str = ""

    @property
    def error(self) -> float | None:
        """Of the step's time, relative."""
        if self.fault or self.run.step_s is None:
            return None
        return self.step_s / self.run.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """Of a device's memory, relative."""
        if self.fault or self.run.memory_bytes is None:
            return None
        return self.counted_bytes / self.run.memory_bytes - 1


def _prices(
    one: Prepared, values: Constants, others: Mapping[str, CostModel] | None = None
) -> Prices:
    run = one.run
    columns = run.shape.vocab // run.pins["tp"] if run.weight_products else 0
    models = cost_models(run.software, columns)
    if others:
        models = tuple(others.get(model.name, model) for model in models)
    return Prices(models, one.setting.mesh, cluster_of(one.run, values))


def _books(one: Prepared, prices: Prices) -> list[Books]:
    found = [timed(work.tally, prices, one.setting.microbatches) for work in one.works]
    return [found[stage] for stage in one.stages]


def timed_s(
    one: Prepared, values: Constants, others: Mapping[str, CostModel] | None = None
) -> float:
    """The step's time, as a plan's account has it; with `others` in place of cost models."""
    return step_seconds(_books(one, _prices(one, values, others)), one.setting)


def _held(work: Work, prices: Prices) -> Mapping[str, int]:
    held = [(path, replace(kind, bytes=size)) for (path, kind), size in work.held.items()]
    return memory_of(held, work.stage, prices)


def outcome(one: Prepared | str, run: Run, values: Constants) -> Outcome:
    """What planning's own account says of the run's pinned plan."""
    if isinstance(one, str):
        return Outcome(run, fault=one)
    prices = _prices(one, values)
    books = _books(one, prices)
    memories = [_held(work, prices) for work in one.works]
    slowest = max(books, key=lambda b: b.step_s)
    fullest = max((memories[i] for i in one.stages), key=lambda m: sum(m.values()))
    step_s = step_seconds(books, one.setting)
    seconds = {**slowest.seconds, "waiting": step_s - slowest.step_s}
    if one.setting.schedule is None:
        seconds.pop("waiting")
    return Outcome(run, step_s, seconds, fullest, _counted(one, fullest, prices))


def _counted(one: Prepared, memory: Mapping[str, int], prices: Prices) -> int:
    """All that the device holds, what its allocator reserved, or, by formula, the layers' states
    and saved tensors on the first stage."""
    counts = one.run.counts or str(facts(one.run.software)["counts"])
    if counts == "device":
        return sum(memory.values())
    if counts == "allocator":
        return sum(size for kind, size in memory.items() if kind != "overhead")
    assert counts == "layers of the first stage", counts
    first = one.works[one.stages[0]]
    layers = {key: size for key, size in first.held.items() if key[0] and key[0][0] != "("}
    found = _held(replace(first, held=layers), prices)
    return sum(size for kind, size in found.items() if kind in FORMULA)

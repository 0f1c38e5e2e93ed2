"""The outer search: every mesh and microbatch count, cheapest bound first, an ILP for each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar.cluster import ClusterSpec
from autopar.errors import AutoparError, InfeasibleError
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.program import Program
from autopar.layouts.stages import Cut
from autopar.layouts.state_ratio import StateRatio
from autopar.planning.cuts import cuts
from autopar.planning.ilp import lower_bound, solve
from autopar.planning.meshes import axes_in_order, settings
from autopar.planning.outer import (
    Dropped,
    Outer,
    check_layers,
    open_setting,
    pointless,
    with_schedule,
)
from autopar.planning.pins import Pins
from autopar.planning.price import Pricer
from autopar.planning.prices import Prices
from autopar.planning.problem import Infeasible, PlanningProblem, Solution
from autopar.planning.schedules import scheduled
from autopar.planning.separable import why_inseparable
from autopar.planning.stage_price import StagePricer, least_work, schedule_bound
from autopar.planning.watch import Progress, Watch, unwatched
from autopar.planning.works import Works
from autopar.plugin import CostModel, Refusal, Strategy
from autopar.text import size


@dataclass(frozen=True)
class SearchOptions:
    """`limit_bytes` per device; `gap` at which a solve may stop; `state_ratio`: what training
    keeps for each element of a parameter."""

    limit_bytes: int
    gap: float
    time_limit_s: float | None
    state_ratio: StateRatio
    solver: str = "highs"


@dataclass(frozen=True)
class Tried:
    """One outer candidate and what came of it. `problem` None: pruned before a cut was chosen."""

    outer: Outer
    pricer: Pricer
    problem: PlanningProblem | None
    bound_s: float
    cut: Cut | None = None
    work: tuple[float, float] = (0.0, 0.0)
    result: Solution | Infeasible | None = None


@dataclass(frozen=True)
class Found:
    """The best program with its prices, and everything that was tried or dropped."""

    program: Program
    winner: Outer
    prices: Prices
    solution: Solution
    bound_s: float
    tried: tuple[Tried, ...]
    dropped: tuple[Dropped, ...]
    inseparable: str | None = field(default=None)


def search(
    model: ModelGraph,
    cluster: ClusterSpec,
    strategies: Sequence[Strategy],
    cost_models: Sequence[CostModel],
    pins: Pins,
    options: SearchOptions,
    watch: Watch = unwatched,
) -> Found:
    """The fastest program that fits. `watch` is told how far the search is.

    Errors: AutoparError where no mesh is legal (with each reason), InfeasibleError where nothing
    fits into memory (short by how much).
    """
    opened: list[Tried] = []
    dropped: list[Dropped] = []
    check_layers(model, pins)
    inseparable = why_inseparable(model)
    axes = axes_in_order(strategies)
    layers = len(model.layers)
    works: Works | None = None
    sizes = (pins.axes, pins.microbatches, model.batch_size, layers)
    for asked in settings(axes, cluster.devices, *sizes):
        watch(Progress(len(opened) + len(dropped), len(dropped)))
        if pointless(model, asked, strategies, pins.axes):
            continue
        alike: dict[bool, Outer | Dropped] = {}
        for setting in scheduled(asked, strategies, pins, layers):
            if isinstance(setting, Refusal):
                dropped.append(Dropped(asked, setting.reason))
                continue
            # What a schedule allows depends on how it makes gradients alone.
            kind = setting.schedule is not None and setting.schedule.table.splits_backward
            if kind not in alike:
                alike[kind] = open_setting(model, setting, strategies, pins, inseparable)
            outer = alike[kind]
            if isinstance(outer, Dropped):
                dropped.append(replace(outer, setting=setting))
                continue
            outer = with_schedule(outer, setting)
            prices = Prices(cost_models, outer.setting.mesh, cluster)
            works = works or Works(prices)
            pricer = Pricer(
                model, outer.setting, prices, outer.candidates, options.state_ratio, works
            )
            same = [t for t in opened[-1:] if t.outer.candidates is outer.candidates]
            opened.append(_opened(outer, pricer, same[0] if same else None))
    if not opened:
        raise _nothing_legal(cluster, pins, dropped)
    return _choose(
        *(model, opened, dropped, options, inseparable, watch),
        lambda: _nothing_legal(cluster, pins, dropped),
    )


def _opened(outer: Outer, pricer: Pricer, same: Tried | None) -> Tried:
    """The setting with its bound alone: most are pruned by it, and a problem takes much longer.
    `same`: the setting under another schedule, whose prices are the same."""
    schedule = outer.setting.schedule
    pricer = pricer if same is None else same.pricer.at(outer.setting)
    work = least_work(pricer) if same is None else same.work
    if schedule is not None:
        return Tried(outer, pricer, None, schedule_bound(schedule, work), work=work)
    return Tried(outer, pricer, None, outer.setting.microbatches * work[0] + work[1], work=work)


def _with_cuts(one: Tried, limit_bytes: int) -> list[Tried] | Dropped:
    """A candidate as problems: one for each cut of the layers into stages that is tried."""
    if one.outer.setting.schedule is None:
        problem = one.pricer.problem(limit_bytes)
        return [replace(one, problem=problem, bound_s=max(one.bound_s, lower_bound(problem)))]
    try:
        tried = cuts(one.pricer, limit_bytes)
    except AutoparError as error:
        return Dropped(one.outer.asked, str(error))
    problems = [(StagePricer(one.pricer, cut).problem(limit_bytes), cut) for cut in tried]
    return [
        replace(one, problem=problem, cut=cut, bound_s=max(one.bound_s, lower_bound(problem)))
        for problem, cut in problems
    ]


def _solved(one: Tried, options: SearchOptions, best_s: float | None) -> Tried:
    """The candidate with its answer, unless its bound is no better than the best so far."""
    if best_s is not None and one.bound_s >= best_s:
        return one
    assert one.problem is not None
    result = solve(
        one.problem,
        solver=options.solver,
        gap=options.gap,
        time_limit_s=options.time_limit_s,
    )
    return replace(one, result=result)


def _choose(
    model: ModelGraph,
    opened: list[Tried],
    dropped: list[Dropped],
    options: SearchOptions,
    inseparable: str | None,
    watch: Watch,
    nothing: Callable[[], AutoparError],
) -> Found:
    best: tuple[Solution, Tried] | None = None
    tried = []
    for one in sorted(opened, key=lambda t: t.bound_s):
        if best is not None and one.bound_s >= best[0].seconds:
            tried.append(one)
            continue
        solved = sum(t.result is not None for t in tried)
        counts = (len(opened) + len(dropped), len(dropped), len(tried) - solved, solved)
        watch(Progress(*counts, None if best is None else best[0].seconds, one.bound_s))
        found = _with_cuts(one, options.limit_bytes)
        if isinstance(found, Dropped):
            dropped.append(found)
            continue
        for each in found:
            done = _solved(each, options, None if best is None else best[0].seconds)
            tried.append(done)
            result = done.result
            if isinstance(result, Solution) and (best is None or result.seconds < best[0].seconds):
                best = (result, done)
    if best is None and not tried:
        raise nothing()
    if best is None:
        raise _nothing_fits(tried, options.limit_bytes)
    solution, winner = best
    bounds = [
        t.result.bound_seconds if isinstance(t.result, Solution) else t.bound_s
        for t in tried
        if not isinstance(t.result, Infeasible)
    ]
    program = _program(model, winner, solution)
    return Found(
        program,
        winner.outer,
        winner.pricer.prices,
        solution,
        min(bounds),
        tuple(tried),
        tuple(dropped),
        inseparable,
    )


def _program(model: ModelGraph, tried: Tried, solution: Solution) -> Program:
    choices: dict[str, dict[str, object]] = {}
    for ((path, region), candidates), index in zip(
        tried.outer.candidates.items(), solution.choices, strict=True
    ):
        choices.setdefault(path, {})[region] = candidates[index]
    return Program(model, tried.outer.setting, choices, tried.cut)  # type: ignore[arg-type]


def _nothing_legal(cluster: ClusterSpec, pins: Pins, dropped: Sequence[Dropped]) -> AutoparError:
    if not dropped:
        pinned = ", ".join(f"{axis} = {size}" for axis, size in pins.axes.items())
        return AutoparError(
            f"no mesh fills {cluster.devices} devices with {pinned or 'no axis to split over'}: "
            "the product of the axes must be the number of devices"
        )
    reasons = list(dict.fromkeys(f"{d.setting.mesh}: {d.reason}" for d in dropped))
    if len(reasons) == 1:
        return AutoparError(dropped[0].reason)
    listed = "\n  ".join(reasons[:12])
    return AutoparError(f"no mesh of {cluster.devices} devices is legal:\n  {listed}")


def _nothing_fits(tried: Sequence[Tried], limit_bytes: int) -> AutoparError:
    short = [
        (t.result.short_bytes, t)
        for t in tried
        if isinstance(t.result, Infeasible) and not t.result.impossible
    ]
    if not short:
        return AutoparError("no choice of layouts is possible on any mesh")
    least, one = min(short, key=lambda pair: pair[0])
    setting = one.outer.asked
    need = limit_bytes + least
    return InfeasibleError(
        f"nothing fits into {limit_bytes:,} bytes ({size(limit_bytes)}) a device: the smallest "
        f"plan, on {setting.mesh} with {setting.microbatches} microbatches, needs {need:,} bytes "
        f"({size(need)}), short by {least:,} ({size(least)}). Give more memory or more devices, a "
        "smaller batch, or lift a pin",
        least,
        setting,
    )

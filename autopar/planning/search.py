"""The outer search: every mesh and microbatch count, cheapest bound first, an ILP for each."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.cluster import ClusterSpec
from autopar.errors import AutoparError, InfeasibleError
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.program import Program
from autopar.layouts.stages import Cut
from autopar.planning.cuts import cuts
from autopar.planning.ilp import lower_bound, solve
from autopar.planning.meshes import axes_in_order, settings
from autopar.planning.outer import Dropped, Outer, check_layers, open_setting
from autopar.planning.pins import Pins
from autopar.planning.price import Pricer
from autopar.planning.prices import Prices
from autopar.planning.problem import Infeasible, PlanningProblem, Solution
from autopar.planning.schedules import scheduled
from autopar.planning.separable import why_inseparable
from autopar.planning.stage_price import StagePricer
from autopar.plugin import CostModel, Refusal, Strategy
from autopar.summary import size


@dataclass(frozen=True)
class SearchOptions:
    """`limit_bytes` per device; `gap` at which a solve may stop; `state_ratio` optimizer elements
    per parameter element."""

    limit_bytes: int
    gap: float
    time_limit_s: float | None
    state_ratio: float
    solver: str = "highs"


@dataclass(frozen=True)
class Tried:
    """One outer candidate and what came of it."""

    outer: Outer
    pricer: Pricer
    problem: PlanningProblem
    bound_s: float
    cut: Cut | None = None
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
) -> Found:
    """The fastest program that fits.

    Errors: AutoparError where no mesh is legal (with each reason), InfeasibleError where nothing
    fits into memory (short by how much).
    """
    opened: list[Tried] = []
    dropped: list[Dropped] = []
    check_layers(model, pins)
    inseparable = why_inseparable(model)
    axes = axes_in_order(strategies)
    layers = len(model.layers)
    sizes = (pins.axes, pins.microbatches, model.batch_size, layers)
    for asked in settings(axes, cluster.devices, *sizes):
        for setting in scheduled(asked, strategies, pins, layers):
            if isinstance(setting, Refusal):
                dropped.append(Dropped(asked, setting.reason))
                continue
            outer = open_setting(model, setting, strategies, pins, inseparable)
            if isinstance(outer, Dropped):
                dropped.append(outer)
                continue
            prices = Prices(cost_models, outer.setting.mesh, cluster)
            pricer = Pricer(model, outer.setting, prices, outer.candidates, options.state_ratio)
            found = _priced(outer, pricer, options.limit_bytes)
            if isinstance(found, Dropped):
                dropped.append(found)
            else:
                opened += found
    if not opened:
        raise _nothing_legal(cluster, pins, dropped)
    return _choose(model, opened, dropped, options, inseparable)


def _priced(outer: Outer, pricer: Pricer, limit_bytes: int) -> list[Tried] | Dropped:
    """The setting as a problem; with each cut that is tried, where layers lie in stages."""
    if outer.setting.schedule is None:
        problem = pricer.problem(limit_bytes)
        return [Tried(outer, pricer, problem, lower_bound(problem))]
    try:
        tried = cuts(pricer, limit_bytes)
    except AutoparError as error:
        return Dropped(outer.asked, str(error))
    problems = [(StagePricer(pricer, cut).problem(limit_bytes), cut) for cut in tried]
    return [Tried(outer, pricer, p, lower_bound(p), cut) for p, cut in problems]


def _choose(
    model: ModelGraph,
    opened: list[Tried],
    dropped: list[Dropped],
    options: SearchOptions,
    inseparable: str | None,
) -> Found:
    best: tuple[Solution, Tried] | None = None
    tried = []
    for one in sorted(opened, key=lambda t: t.bound_s):
        if best is not None and one.bound_s >= best[0].seconds:
            tried.append(one)
            continue
        result = solve(
            one.problem,
            solver=options.solver,
            gap=options.gap,
            time_limit_s=options.time_limit_s,
        )
        tried.append(replace(one, result=result))
        if isinstance(result, Solution) and (best is None or result.seconds < best[0].seconds):
            best = (result, one)
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
    )

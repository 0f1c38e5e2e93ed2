"""One setting on its way through the search: opened with a rough bound, relaxed, solved."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.layouts.stages import Cut, make_cut
from autopar.layouts.state_ratio import StateRatio
from autopar.planning.anywhere import Anywhere
from autopar.planning.cuts import check_weights, cuts, every_cut
from autopar.planning.ilp import least_bytes, smallest, solve
from autopar.planning.layered import Layered
from autopar.planning.outer import Dropped, Outer
from autopar.planning.price import Pricer
from autopar.planning.problem import Infeasible, PlanningProblem, Solution
from autopar.planning.relaxed import Relaxed, relaxed
from autopar.planning.stage_price import StagePricer, least_work, schedule_bound
from autopar.planning.whole_price import whole_problem


@dataclass(frozen=True)
class SearchOptions:
    """`limit_bytes` per device; `gap` at which a solve may stop; `state_ratio`: optimizer elements
    of parameters."""

    limit_bytes: int
    gap: float
    time_limit_s: float | None
    state_ratio: StateRatio
    solver: str = "highs"


@dataclass(frozen=True)
class Tried:
    """One outer candidate and what came of it. No program of it is faster than `bound_s`.

    `work`: least seconds of a microbatch and of what is done once a step. `low`: the relaxation of
    its problem, where layers don't lie in stages; `anywhere`: what is known before they are cut.
    """

    outer: Outer
    layered: Layered
    bound_s: float
    work: tuple[float, float]
    problem: PlanningProblem | None = None
    low: Relaxed | None = None
    anywhere: Anywhere | None = None
    cut: Cut | None = None
    result: Solution | Infeasible | None = None

    @property
    def is_relaxed(self) -> bool:
        """Whether its bound knows of memory."""
        return self.low is not None or self.anywhere is not None


def opened(outer: Outer, pricer: Pricer, same: Tried | None) -> Tried:
    """The setting with a rough bound: most are pruned by it, and a problem takes much longer.
    `same`: the setting under another schedule, whose prices are the same."""
    schedule = outer.setting.schedule
    pricer = pricer if same is None else same.layered.pricer.at(outer.setting)
    work = least_work(pricer) if same is None else same.work
    bound_s = outer.setting.microbatches * work[0] + work[1]
    if schedule is not None:
        bound_s = schedule_bound(schedule, work)
    return Tried(outer, Layered(pricer), bound_s, work)


def relax(tried: Tried, options: SearchOptions) -> Tried | Dropped:
    """The setting with a bound that knows of memory; with its result, where nothing fits."""
    if any(not kind.columns.picks for kind in tried.layered.kinds.values()):
        return replace(tried, result=Infeasible(0, impossible=True))
    if tried.outer.setting.schedule is None:
        problem = whole_problem(tried.layered, options.limit_bytes)
        low = relaxed(problem, options.solver)
        result = None if low.feasible else _short(least_bytes(problem), options)
        bound_s = max(tried.bound_s, low.bound_s)
        return replace(tried, problem=problem, low=low, bound_s=bound_s, result=result)
    try:
        check_weights(tried.layered.pricer)
    except AutoparError as error:
        return Dropped(tried.outer.asked, str(error))
    anywhere = Anywhere(tried.layered, options.limit_bytes)
    bound_s = max(tried.bound_s, anywhere.bound(options.solver))
    result = None if math.isfinite(bound_s) else _short(anywhere.least_bytes(), options)
    return replace(tried, anywhere=anywhere, bound_s=bound_s, result=result)


def _short(least: int, options: SearchOptions) -> Infeasible:
    return Infeasible(max(least - options.limit_bytes, 1), at_least=True)


def solutions(tried: Tried, options: SearchOptions, best_s: float) -> Iterator[Tried]:
    """The setting with its answer; where layers lie in stages, one for each cut that is tried."""
    if tried.problem is not None:
        yield _solved(tried, tried.low, options, best_s)
        return
    assert tried.anywhere is not None
    every = every_cut(tried.anywhere)
    if every is not None:
        yield from _each_cut(tried, every, options, best_s)
        return
    found = cuts(tried.anywhere)
    if not found:
        yield replace(tried, result=_short(tried.anywhere.least_bytes(), options))
    for cut in found:
        done = _at(tried, cut, options, best_s)
        if isinstance(done.result, Solution):
            best_s = min(best_s, done.result.seconds)
        yield replace(done, bound_s=tried.bound_s)  # other cuts aren't ruled out


def _each_cut(
    tried: Tried,
    every: list[tuple[float, tuple[int, ...]]],
    options: SearchOptions,
    best_s: float,
) -> Iterator[Tried]:
    skeleton = tried.layered.pricer.model.skeleton
    for bound_s, counts in every:
        low = replace(tried, bound_s=max(tried.bound_s, bound_s))
        if low.bound_s >= best_s * (1 - options.gap):
            result = None
            if not math.isfinite(low.bound_s):
                assert tried.anywhere is not None
                result = _short(tried.anywhere.least_bytes(), options)
            yield replace(low, result=result)
            return
        done = _at(low, make_cut(skeleton, counts), options, best_s)
        if isinstance(done.result, Solution):
            best_s = min(best_s, done.result.seconds)
        yield done


def _at(tried: Tried, cut: Cut, options: SearchOptions, best_s: float) -> Tried:
    problem = StagePricer(tried.layered, cut).problem(options.limit_bytes)
    return _solved(replace(tried, problem=problem, cut=cut), None, options, best_s)


def _solved(tried: Tried, low: Relaxed | None, options: SearchOptions, best_s: float) -> Tried:
    assert tried.problem is not None
    result = solve(
        tried.problem,
        solver=options.solver,
        gap=options.gap,
        time_limit_s=options.time_limit_s,
        cutoff_s=best_s if math.isfinite(best_s) else None,
        low=low,
        measure=False,
    )
    proven_s = result.bound_seconds if isinstance(result, Solution) else best_s
    tried = replace(tried, bound_s=max(tried.bound_s, proven_s))
    return replace(tried, result=result)


def shortage(tried: Tried, options: SearchOptions) -> Tried:
    """By how many bytes the smallest program of a setting, in which nothing fits, is too large."""
    problems = [tried.problem]
    if tried.problem is None:
        assert tried.anywhere is not None
        wide = Anywhere(tried.layered, 2**60)
        problems = [
            StagePricer(tried.layered, cut).problem(options.limit_bytes) for cut in cuts(wide)
        ]
    found = [smallest(p, options.solver, options.time_limit_s) for p in problems if p is not None]
    least = min((f for f in found if not f.impossible), key=lambda f: f.short_bytes, default=None)
    return replace(tried, result=least or Infeasible(0, impossible=True))

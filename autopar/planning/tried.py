"""One setting on its way through the search: opened with a rough bound, relaxed, solved."""

import math
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.layouts.program import Program
from autopar.layouts.stages import Cut, make_cut
from autopar.layouts.state_ratio import StateRatio
from autopar.planning.account import books_by_stage, spent_in_step, step_seconds
from autopar.planning.anywhere import Anywhere
from autopar.planning.columns import EACH_S, ONCE_S
from autopar.planning.cuts import check_groups, check_weights, cuts, every_cut, roomier
from autopar.planning.ilp import least_bytes, smallest, solve
from autopar.planning.layered import Layered
from autopar.planning.outer import Dropped, Outer
from autopar.planning.problem import Infeasible, PlanningProblem, Solution
from autopar.planning.rate import LeastWork
from autopar.planning.relaxed import Relaxed, relaxed
from autopar.planning.stage_price import StagePricer
from autopar.planning.weights import Spent, Weights, seconds_of, sharpest
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
class Answer:
    """A program of a setting: by the programme, and by the account, whose figures the plan
    shows. `spent`: what its slowest stage does."""

    program: Program
    solution: Solution
    step_s: float
    spent: Spent


@dataclass(frozen=True)
class Tried:
    """One outer candidate and what came of it. No program of it is faster than `bound_s`.

    `low`: the relaxation of
    its problem, where layers don't lie in stages; `anywhere`: what is known before they are cut.
    `answer`: the best program found so far; `seen`: what each answer so far does, which was found
    by weights that are sharp for those before it; `rounds`: by how many weights it was solved, each
    time for one or for many cuts of its layers.
    """

    outer: Outer
    layered: Layered
    bound_s: float
    problem: PlanningProblem | None = None
    low: Relaxed | None = None
    anywhere: Anywhere | None = None
    answer: Answer | None = None
    seen: tuple[Spent, ...] = ()
    rounds: int = 0
    result: Infeasible | None = None

    @property
    def is_relaxed(self) -> bool:
        """Whether its bound knows of memory."""
        return self.low is not None or self.anywhere is not None

    @property
    def step_s(self) -> float:
        """The best step, by the account; inf where none was found."""
        return math.inf if self.answer is None else self.answer.step_s

    def by(self, weights: Weights) -> "Tried":
        """The same by other weights, with nothing but its bound."""
        if weights == self.layered.pricer.prices.weights:
            return self
        layered = Layered(self.layered.pricer.weighing(weights))
        return replace(self, layered=layered, problem=None, low=None, anywhere=None)


def relax(tried: Tried, options: SearchOptions) -> Tried | Dropped:
    """The setting with a bound that knows of memory; with its result, where nothing fits."""
    if not tried.layered.is_possible:
        return replace(tried, bound_s=math.inf, result=Infeasible(0, impossible=True))
    if tried.outer.setting.schedule is None:
        problem = whole_problem(tried.layered, options.limit_bytes)
        low = relaxed(problem, options.solver)
        result = None if low.feasible else _short(least_bytes(problem), options)
        bound_s = max(tried.bound_s, low.bound_s)
        return replace(tried, problem=problem, low=low, bound_s=bound_s, result=result)
    try:
        check_weights(tried.layered.pricer)
        check_groups(tried.layered)
    except AutoparError as error:
        return Dropped(tried.outer.asked, str(error))
    anywhere = Anywhere(tried.layered, options.limit_bytes)
    bound_s = max(tried.bound_s, anywhere.bound(options.solver))
    result = None if math.isfinite(bound_s) else _short(anywhere.least_bytes(), options)
    return replace(tried, anywhere=anywhere, bound_s=bound_s, result=result)


def least_of(layered: Layered) -> LeastWork:
    """Seconds of a microbatch and once a step at least, whatever memory allows."""
    each_s = once_s = 0.0
    for kind in layered.kinds.values():
        each_s += float(kind.columns.costs[:, EACH_S].min())
        once_s += float(kind.columns.costs[:, ONCE_S].min())
    pricer = layered.pricer
    for key in layered.skeleton:
        bills = [pricer.bill("", candidate) for candidate in pricer.candidates[key]]
        each_s += min(bill.each_s(pricer.setting.microbatches) for bill in bills)
        once_s += min(bill.step_s for bill in bills)
    return each_s, once_s


def _short(least: int, options: SearchOptions) -> Infeasible:
    return Infeasible(max(least - options.limit_bytes, 1), at_least=True)


def settle(tried: Tried, options: SearchOptions, best_s: float) -> Tried:
    """The setting with its answer by its weights, if one is faster than `best_s`, and a bound that
    holds for every program of it."""
    if tried.problem is not None:
        queue: list[tuple[float, Cut | None]] = [(tried.bound_s, None)]
        rest_s = math.inf
    else:
        assert tried.anywhere is not None
        found_cuts, rest_s = _cuts(tried, tried.anywhere)
        queue = [*found_cuts]
    bounds_s, result, spare_bytes, limit = [rest_s], None, 0, options.limit_bytes
    while queue:
        bound_s, cut = queue.pop(0)
        low_s = max(tried.bound_s, bound_s)
        worth_s = min(best_s, tried.step_s) * (1 - options.gap)
        if low_s >= worth_s:
            bounds_s.append(low_s)
            break  # those that follow have no lower bounds
        # The first time the weights are a guess: half the gap is for what they don't see.
        gap = options.gap / 2 if tried.seen else options.gap
        mine = replace(options, gap=gap)
        if cut is None:
            assert tried.problem is not None
            layered = tried.layered
            found = _solved(tried.problem, tried.low, mine, worth_s, rest_s)
        else:
            layered, found = _of_cut(tried, cut, mine, worth_s, rest_s)
        if isinstance(found, Infeasible):
            fits = not found.impossible and found.short_bytes == 0
            bounds_s.append(max(low_s, worth_s) if fits else math.inf)
            result = found if result is None or fits else result
            if not fits and math.isfinite(rest_s) and queue and spare_bytes < MOST_SPARE * limit:
                # The fastest cut doesn't fit: before the smallest, the fastest that has more room.
                assert tried.anywhere is not None
                spare_bytes = max(found.short_bytes, 2 * spare_bytes, limit // 100)
                more = roomier(tried.anywhere, spare_bytes)
                queue[:0] = [(tried.bound_s, more)] if more else []
            continue
        bounds_s.append(max(low_s, found.bound_seconds))
        tried = _answered(tried, layered, found, cut, options)
    proven_s = max(tried.bound_s, min(bounds_s))
    result = None if tried.answer else result
    return replace(tried, bound_s=proven_s, result=result, rounds=tried.rounds + 1)


MOST_SPARE = 0.04
"""Of the memory: no cut is looked for that leaves more of it free."""
WIDTH = 1e-3
"""Of the bound: so far above it choices are looked at first."""


def _of_cut(
    tried: Tried, cut: Cut, options: SearchOptions, worth_s: float, rest_s: float
) -> tuple[Layered, Solution | Infeasible]:
    """The best program of a cut, and the layers whose columns its choices are: first of those that
    may have a part in a program that is little slower than the bound. Where other cuts have no
    bound above `rest_s`, and nothing can be proven, a few stand for all."""
    anywhere = tried.anywhere
    assert anywhere is not None
    proves = math.isinf(rest_s)
    layered, others_s = anywhere.few(), math.inf
    if proves:
        layered, others_s = anywhere.narrowed(WIDTH * tried.bound_s, options.solver)
    if layered.is_possible:
        problem = StagePricer(layered, cut).problem(options.limit_bytes)
        found = _solved(problem, None, options, min(worth_s, others_s), rest_s)
        if isinstance(found, Solution):
            bound_s = min(found.bound_seconds, others_s if proves else rest_s)
            return layered, replace(found, bound_seconds=bound_s)
        if math.isfinite(worth_s) and worth_s <= others_s:
            return layered, found
    problem = StagePricer(tried.layered, cut).problem(options.limit_bytes)
    return tried.layered, _solved(problem, None, options, worth_s, rest_s)


def _cuts(tried: Tried, anywhere: Anywhere) -> tuple[list[tuple[float, Cut | None]], float]:
    """Cuts with their bounds, lowest first, and the bound of all others."""
    skeleton = tried.layered.pricer.model.skeleton
    every = every_cut(anywhere)
    if every is None:
        return [(tried.bound_s, cut) for cut in cuts(anywhere)], tried.bound_s
    return [(bound_s, make_cut(skeleton, counts)) for bound_s, counts in every], math.inf


def _solved(
    problem: PlanningProblem,
    low: Relaxed | None,
    options: SearchOptions,
    worth_s: float,
    rest_s: float,
) -> Solution | Infeasible:
    return solve(
        problem,
        solver=options.solver,
        gap=options.gap,
        time_limit_s=options.time_limit_s,
        cutoff_s=worth_s if math.isfinite(worth_s) else None,
        low=low,
        proves=math.isinf(rest_s),
        measure=False,
    )


def _answered(
    tried: Tried, layered: Layered, found: Solution, cut: Cut | None, options: SearchOptions
) -> Tried:
    """With the program of a solution, if the account says that it is faster than what is there."""
    program = layered.program(found.choices, cut)
    books = books_by_stage(program, tried.layered.pricer.prices, options.state_ratio)
    step_s, spent = step_seconds(books, program.setting), spent_in_step(books, program.setting)
    answer = tried.answer
    sharp = answer and step_s == answer.step_s and found.seconds > answer.solution.seconds
    if step_s < tried.step_s or sharp:
        answer = Answer(program, found, step_s, spent)
    return replace(tried, answer=answer, seen=(*tried.seen, spent))


ROUNDS = 12
"""How often a setting is solved by weights that are sharper for what was found before."""


def sharper(tried: Tried, options: SearchOptions) -> Weights | None:
    """The weights that are sharpest for what a setting's programs do, or None: where they wouldn't
    show more, or enough was tried."""
    if tried.answer is None or tried.rounds >= ROUNDS:
        return None
    if tried.bound_s >= tried.step_s * (1 - options.gap):
        return None
    prices = tried.layered.pricer.prices
    weights = sharpest(prices.rows, tried.seen, options.solver)
    worth_s = min(seconds_of(one, weights) for one in tried.seen)
    now_s = min(seconds_of(one, prices.weights) for one in tried.seen)
    is_rough = len(tried.seen) == 1 and weights != prices.weights
    return weights if is_rough or worth_s > now_s * (1 + options.gap / 4) else None


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

"""One setting on its way through the search: opened with a rough bound, relaxed, solved."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.layouts.program import Program
from autopar.layouts.state_ratio import StateRatio
from autopar.planning.anywhere import Anywhere
from autopar.planning.columns import EACH_S, ONCE_S
from autopar.planning.cuts import check_groups, check_weights
from autopar.planning.ilp import least_bytes
from autopar.planning.layered import Layered
from autopar.planning.outer import Dropped, Outer
from autopar.planning.problem import Infeasible, PlanningProblem, Solution
from autopar.planning.rate import LeastWork
from autopar.planning.relaxed import Relaxed, relaxed
from autopar.planning.weights import Spent, Weights, seconds_of, sharpest, sharpest_of_stages
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
    shows."""

    program: Program
    solution: Solution
    step_s: float


@dataclass(frozen=True)
class Tried:
    """One outer candidate and what came of it. No program of it is faster than `bound_s`.

    `low`: the relaxation of
    its problem, where layers don't lie in stages; `anywhere`: what is known before they are cut.
    `answer`: the best program found so far; `seen`: what each answer so far does, which was found
    by weights that are sharp for those before it; `rounds`: by how many weights it was solved, each
    time for one or for many cuts of its layers; `is_guessed`: before anything is to be proven, a
    few of its columns were looked at; `every_cut`: whether each cut of its layers is looked at, so
    that a bound need not hold for all together; `by_stage`: the weights of each stage by which a
    cut is then solved, if they aren't those of `layered`; `is_whole`: whether a bound of whole
    layers was tried.
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
    is_guessed: bool = False
    every_cut: bool = False
    by_stage: tuple[Weights, ...] = ()
    is_whole: bool = False
    result: Infeasible | None = None

    @property
    def is_relaxed(self) -> bool:
        """Whether its bound knows of memory."""
        return self.low is not None or self.anywhere is not None

    @property
    def step_s(self) -> float:
        """The best step, by the account; inf where none was found."""
        return math.inf if self.answer is None else self.answer.step_s

    @property
    def weights(self) -> Weights:
        """Those of all stages together."""
        return self.layered.pricer.prices.weights

    def by(self, weights: Weights) -> "Tried":
        """The same by other weights, with nothing but its bound."""
        if weights == self.weights:
            return self
        layered = Layered(self.layered.pricer.weighing(weights))
        return replace(self, layered=layered, problem=None, low=None, anywhere=None, by_stage=())

    @property
    def layered_by_stage(self) -> tuple[Layered, ...]:
        """Each stage's by its weights, or what is the same for all."""
        pricer = self.layered.pricer
        if not self.by_stage:
            return (self.layered,)
        return tuple(Layered(pricer.weighing(weights)) for weights in self.by_stage)


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
    microbatches = layered.pricer.setting.microbatches
    for bills in layered.skeleton_bills:
        each_s += min(bill.each_s(microbatches) for bill in bills)
        once_s += min(bill.step_s for bill in bills)
    return each_s, once_s


def _short(least: int, options: SearchOptions) -> Infeasible:
    return Infeasible(max(least - options.limit_bytes, 1), at_least=True)


ROUNDS = 12
"""How often a setting is solved by weights that are sharper for what was found before."""


def sharper(tried: Tried, options: SearchOptions) -> Tried | None:
    """The setting by the weights that are sharpest for what its programs do: first the same on all
    stages, then, where each cut is looked at, each stage's own. None: where they
    wouldn't show more, or enough was tried."""
    if tried.answer is None or tried.rounds >= ROUNDS:
        return None
    if tried.bound_s >= tried.step_s * (1 - options.gap):
        return None
    rows, seen = tried.layered.pricer.prices.rows, tried.seen
    weights = sharpest(rows, seen, options.solver)
    is_rough = len(seen) == 1 and weights != tried.weights
    if is_rough or _are_sharper((weights,), (tried.weights,), tried, options):
        return tried.by(weights)
    if not tried.every_cut:
        return None
    stages = tried.layered.schedule.brief.stages
    every = sharpest_of_stages(rows, seen, stages, options.solver)
    if _are_sharper(every, tried.by_stage or (tried.weights,), tried, options):
        return replace(tried, by_stage=every)
    return None


def _are_sharper(
    new: Sequence[Weights], old: Sequence[Weights], tried: Tried, options: SearchOptions
) -> bool:
    """Whether the cheapest program that was seen costs more."""
    new_s, old_s = (min(seconds_of(one, some) for one in tried.seen) for some in (new, old))
    return new_s > old_s * (1 + options.gap / 4)

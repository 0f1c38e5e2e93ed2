"""How a planning problem is solved: first by those choices alone that lie close to the relaxation's
bound, then by more of them, until none that is left out can be better."""

import math
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import OutOfTimeError
from autopar.planning.deadline import NEVER, Deadline
from autopar.planning.evaluate import evaluate
from autopar.planning.problem import Infeasible, PlanningProblem, Solution
from autopar.planning.relaxed import Relaxed
from autopar.planning.rows import Kept, Rows, build, cut_off, limit_memory, linear
from autopar.planning.scale import choose_scale
from autopar.planning.solvers import run


@dataclass(frozen=True)
class Task:
    """The arguments of one `solve`, and the choices that presolve keeps."""

    problem: PlanningProblem
    kept: Kept
    solver: str
    gap: float
    time_limit_s: float | None
    cutoff_s: float | None
    deadline: Deadline = NEVER
    most_nodes: int | None = None


FIRST, WIDER = 1e-6, 16.0
"""The first width of the sieve, in the bound: little more than what the relaxation mixes; and how
it grows."""
CLOSE = 5e-3
"""So far above the relaxation's bound an answer may lie that needs no proof, at once."""
UNPROVEN, NODES = 2e-3, 100
"""The gap of the few choices that such an answer is taken from, and how far they are searched."""
MANY = 1_500
"""Choices of all slots together, more of which aren't searched without need of proof."""
LARGE = 0.3
"""Of all choices: after so many those that are left are all looked at."""
SMALL = 400
"""Choices of all slots together for which a sieve isn't worth its rounds."""


def sifted(task: Task, low: Relaxed, proves: bool) -> Solution | Infeasible | float:
    """The best choice that fits, or else the bound, from choices that lie close to the relaxation's
    bound: a better one than what they give has no choice outside, once they reach so far. Without
    need of proof (not `proves`) it needn't."""
    if not low.feasible:
        return math.inf
    if not proves and task.cutoff_s and low.bound_s >= task.cutoff_s * (1 - UNPROVEN):
        return Infeasible(0)  # the best of these choices would hardly be better
    reach_s = math.inf if task.cutoff_s is None else task.cutoff_s - low.bound_s
    small = _size(task.kept) <= SMALL
    width_s = math.inf if small or low.bound_s <= 0 else FIRST * low.bound_s
    while True:
        kept = tuple(
            tuple(c for c in some if excess[c] <= width_s)
            for some, excess in zip(task.kept, low.excess_s, strict=True)
        )
        whole = kept == task.kept
        quick = task if proves else replace(task, gap=max(task.gap, UNPROVEN), most_nodes=NODES)
        found, bound_s = _fastest(replace(quick, kept=kept))
        if not found and quick.most_nodes and task.cutoff_s and math.isfinite(bound_s):
            return Infeasible(0)  # none in so many nodes
        if not whole:
            bound_s = min(bound_s, low.bound_s + width_s)
        bound_s = max(bound_s, low.bound_s)
        over_s = found.seconds - low.bound_s if found else math.inf
        enough = whole or over_s <= width_s  # what lies outside can't be better
        enough |= not proves and (over_s <= CLOSE * low.bound_s or width_s > FIRST * low.bound_s)
        is_over = task.deadline.is_over
        if found and (enough or is_over or found.seconds - bound_s <= task.gap * found.seconds):
            return replace(found, bound_seconds=min(bound_s, found.seconds))
        if whole or is_over:
            return bound_s
        if width_s >= reach_s:
            return found or Infeasible(0)
        few_s = math.inf if proves else _width_of(MANY, task.kept, low)
        if few_s <= width_s and task.cutoff_s:
            return Infeasible(0)  # none of so many
        # Without need of proof, the rest takes hardly longer than some of it.
        large = not proves and _size(kept) > LARGE * _size(task.kept)
        wider_s = min(math.inf if large else width_s * WIDER, over_s, reach_s)
        width_s = min(wider_s, few_s) if few_s > width_s else wider_s


def _size(kept: Kept) -> int:
    return sum(map(len, kept))


def _width_of(count: int, kept: Kept, low: Relaxed) -> float:
    """The width of a sieve that leaves so many choices, of all slots together."""
    every = [low.excess_s[s][list(some)] for s, some in enumerate(kept)]
    excess = np.sort(np.concatenate(every))
    return float(excess[min(count, len(excess)) - 1])


def _fastest(task: Task) -> tuple[Solution | None, float]:
    """The best choice that fits, and the bound in seconds: inf where nothing fits."""
    scale = choose_scale(task.problem)
    bound_s, spare_bytes = None, 0
    while True:
        rows = build(task.problem, task.kept, scale, "fastest")
        limit_memory(rows, task.problem.limit_bytes - task.problem.base_bytes - spare_bytes)
        if task.cutoff_s is not None:
            cut_off(rows, task.cutoff_s)
        rows.programme.setObjective(linear(rows.seconds))
        outcome = run(
            rows.programme,
            task.solver,
            gap=task.gap,
            time_limit_s=task.deadline.left_s,
            most_nodes=task.most_nodes,
            # Without need of proof, that nothing is faster than the cutoff proves nothing.
            sure=task.most_nodes is None or task.cutoff_s is None,
        )
        if bound_s is None:
            bound_s = outcome.bound / scale.per_second
        if not outcome.has_values:
            return None, bound_s
        found = _solution(task.problem, rows, bound_s)
        over_bytes = found.memory_bytes - task.problem.limit_bytes
        if over_bytes <= 0:
            return found, bound_s
        # An x within the solver's tolerance of an integer hid these bytes. The first bound stays.
        spare_bytes += over_bytes


def lightest_of(task: Task, found: Solution) -> Solution:
    """Of the choices that are hardly slower than those found, the one whose stages take least
    together: what a stage does that no other waits for is free in the programme, not in an account
    that weighs it differently. The same where none is found at once."""
    scale = choose_scale(task.problem)
    rows = build(task.problem, task.kept, scale, "lightest")
    limit_memory(rows, task.problem.limit_bytes - task.problem.base_bytes)
    cut_off(rows, found.seconds * (1 + task.gap / 2))
    rows.programme.setObjective(linear(rows.loads))
    outcome = run(
        rows.programme,
        task.solver,
        gap=task.gap,
        time_limit_s=task.deadline.left_s,
        most_nodes=NODES,
        sure=False,
    )
    if not outcome.has_values:
        return found
    lightest = _solution(task.problem, rows, found.bound_seconds)
    return lightest if lightest.memory_bytes <= task.problem.limit_bytes else found


def smallest_of(task: Task, bound_s: float) -> Solution | Infeasible:
    """The answer where no choice was found that fits: look for the one with the least memory."""
    problem, scale = task.problem, choose_scale(task.problem)
    rows = build(problem, task.kept, scale, "smallest")
    rows.programme.setObjective(linear(rows.memory))
    half_grain = scale.per_grain / 2
    outcome = run(
        rows.programme, task.solver, gap=0.0, gap_abs=half_grain, time_limit_s=task.time_limit_s
    )
    if outcome.status == "infeasible":
        return Infeasible(0, impossible=True)
    if outcome.has_values:
        least = _solution(problem, rows, bound_s)
        short_bytes = least.memory_bytes - problem.limit_bytes
        if short_bytes <= 0 and bound_s == math.inf:
            assert task.cutoff_s is not None, "the memory row excludes a choice that fits"
            return Infeasible(0)
        if short_bytes <= 0:
            return least
        if outcome.status == "solved":
            return Infeasible(short_bytes)
    raise out_of_time(task)


def out_of_time(task: Task) -> OutOfTimeError:
    """What to say where the time limit was too short."""
    problem = task.problem
    assert task.time_limit_s is not None, "a solver stopped without a limit"
    return OutOfTimeError(
        f"{task.time_limit_s:.3g} s were too short to find out whether {len(problem.slots)} "
        f"regions fit into {problem.limit_bytes:,} bytes: raise time_limit_s"
    )


def _solution(problem: PlanningProblem, rows: Rows, bound_s: float) -> Solution:
    taken: dict[int, list[int]] = {}
    for (s, c), x in rows.chosen.items():
        taken.setdefault(s, []).extend([c] * round(x.varValue))
    for first, slots in rows.merged.items():
        every = taken.pop(first)
        taken |= {s: [c] for s, c in zip(slots, every, strict=True)}
    choices = tuple(taken[s][0] for s in range(len(problem.slots)))
    cost = evaluate(problem, choices)
    assert cost is not None, "the programme has no flow on a forbidden pair"
    return Solution(choices, *cost, min(bound_s, cost[0]))

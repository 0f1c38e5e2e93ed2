"""One integer linear programme per planning problem: which choice every slot takes.

Sets: slots s with choices c; edges e with uses u; layouts m (made) and n (needed) of an edge.
Given: seconds t, resident bytes r, transient bytes q of a choice; seconds T and resident bytes R
of a conversion; t₀ and r₀ of what is not chosen; the limit.

Variables

    x[s,c]     ∈ {0,1}   slot s takes choice c
    f[e,u,m,n] ≥ 0       use u gets the value of edge e, made in m, as n; none for forbidden pairs
    z[e,m,n]   ∈ [0,1]   the conversion m → n of edge e is paid
    peak       ≥ 0       transient bytes of the group of slots that needs most
    N[k]       integer   how often something alike happens

    minimise  t₀ + Σ t·x + Σ T·z                                  (seconds)   Rows.charge
    subject to
      Σ_c x[s,c] = 1                                              (choice)    add_choices
      Σ_n f[e,u,m,n] = Σ x of source choices that make m          (made)      add_flow
      Σ_m f[e,u,m,n] = Σ x of u's choices that need n             (needed)    add_flow
      z[e,m,n] ≥ f[e,u,m,n]   for each use u                      (shared)    add_conversions
      peak ≥ Σ_{s in group} q·x                                   (transient) add_transient
      r₀ + Σ r·x + Σ R·z + peak ≤ limit                           (memory)    limit_memory
      Σ x of the choices that use it ≥ 1   for each cover         (cover)     add_covers
      N[k] = Σ of the x, or of the f, that are alike              (count)     add_counts
      t₀ + Σ t·x + Σ T·z ≤ cutoff                                 (cutoff)    cut_off

Slots that have the same choices, and of which every edge sees the same whatever they take, are
counted, not told apart: x of such a class is an integer, Σ_c x = their number, and in (transient)
peak ≥ q for each choice that is taken at all (`rows.merged_slots`, `merged_rows`).

Where layers lie in stages, `stage_rows` has other rows for (seconds), (transient) and (memory).

"Neither makes nor needs the value" is one more layout whose conversions are free. With x integral,
(made) and (needed) leave f one possible value, 1 on the pair that occurs, so f and z need not be
declared integer. Without the memory row a chain is a shortest path and its relaxation is integral;
z ≥ x + y − 1 instead would have the relaxation 0. With one use f itself is paid and z is left out.

(count) removes no solution: a sum of integers is an integer. Over identical layers the relaxation
mixes choices, and branching on one layer's x only moves the mixture to the next layer; branching
on how many layers take a choice, or a pair of layouts, moves the bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import AutoparError
from autopar.planning.columns import pareto
from autopar.planning.loose import least_bytes_of
from autopar.planning.problem import Choice, Edge, Infeasible, PlanningProblem, Slot, Solution
from autopar.planning.relaxed import (
    Relaxed,
    alike_slots,
    loosened,
    relaxed,
)
from autopar.planning.rows import Kept, Rows, build, cut_off, limit_memory, linear
from autopar.planning.scale import choose_scale
from autopar.planning.solvers import run
from autopar.planning.staged import evaluate_stages


@dataclass(frozen=True)
class _Task:
    """The arguments of one `solve`, and the choices that presolve keeps."""

    problem: PlanningProblem
    kept: Kept
    solver: str
    gap: float
    time_limit_s: float | None
    cutoff_s: float | None
    most_nodes: int | None = None


def solve(
    problem: PlanningProblem,
    *,
    solver: str = "highs",
    gap: float = 1e-6,
    time_limit_s: float | None = None,
    cutoff_s: float | None = None,
    low: Relaxed | None = None,
    proves: bool = True,
    measure: bool = True,
) -> Solution | Infeasible:
    """The choices with the least seconds within the memory limit.

    `solver`: "highs" or "cbc". `gap`: seconds − bound_seconds <= gap · seconds, where no choice is
    faster than `bound_seconds`. `cutoff_s`: slower choices are of no interest; if all that fit are
    slower, the answer is Infeasible with `short_bytes` 0. `time_limit_s`, for each run of the
    solver, may leave a wider gap, or where nothing was found the choice with the least memory;
    without it, the same problem has the same answer. `low`: the problem's relaxation, where it is
    known. Not `proves`: a better bound than the relaxation's is of no use, and the best of a few
    choices is taken. Not `measure`: a shortage may be said to be `at_least` so many.

    `bound_seconds` and `short_bytes` are exact up to the solvers' arithmetic (1e-9, relative).
    Errors: AutoparError for an unknown solver, and where the time limit leaves neither a choice
    that fits nor a proof that there is none.
    """
    check(problem)
    task = _Task(problem, undominated(problem), solver, gap, time_limit_s, cutoff_s)
    low = low or relaxed(problem, solver)
    if cutoff_s is not None and cutoff_s <= low.bound_s < math.inf:
        return Infeasible(0)
    found = _sifted(task, low, proves)
    if found == math.inf and not measure and low.feasible and cutoff_s is not None:
        return Infeasible(0)  # of what may fit nothing is faster
    if found == math.inf and not measure:
        return Infeasible(max(least_bytes(problem) - problem.limit_bytes, 1), at_least=True)
    return found if isinstance(found, Solution | Infeasible) else _smallest(task, found)


def smallest(problem: PlanningProblem, solver: str, time_limit_s: float | None) -> Infeasible:
    """By how many bytes the choice that needs least is over the limit, in which nothing fits."""
    task = _Task(problem, undominated(problem), solver, 0.0, time_limit_s, None)
    found = _smallest(task, math.inf)
    assert isinstance(found, Infeasible), "something fits"
    return found


def least_bytes(problem: PlanningProblem) -> int:
    """No choice needs less: each slot's least of every kind, on the fullest stage."""
    loose = loosened(problem, alike_slots(problem))
    return least_bytes_of(loose)


FIRST, WIDER = 1e-6, 16.0
"""The first width of the sieve, in the bound: little more than what the relaxation mixes; and how
it grows."""
CLOSE = 5e-3
"""So far above the relaxation's bound an answer may lie that needs no proof, at once."""
UNPROVEN, NODES = 2e-3, 100
"""The gap of the few choices that such an answer is taken from, and how far they are searched."""
MANY = 1_500
"""Choices of all slots together, more of which aren't searched without need of proof."""
SMALL = 400
"""Choices of all slots together for which a sieve isn't worth its rounds."""


def _sifted(task: _Task, low: Relaxed, proves: bool) -> Solution | Infeasible | float:
    """The best choice that fits, or else the bound, from choices that lie close to the relaxation's
    bound: a better one than what they give has no choice outside, once they reach so far. Without
    need of proof (not `proves`) it needn't."""
    if not low.feasible:
        return math.inf
    if not proves and task.cutoff_s and low.bound_s >= task.cutoff_s * (1 - UNPROVEN):
        return Infeasible(0)  # the best of these choices would hardly be better
    reach_s = math.inf if task.cutoff_s is None else task.cutoff_s - low.bound_s
    small = sum(map(len, task.kept)) <= SMALL
    width_s = math.inf if small or low.bound_s <= 0 else FIRST * low.bound_s
    while True:
        kept = tuple(
            tuple(c for c in some if excess[c] <= width_s)
            for some, excess in zip(task.kept, low.excess_s, strict=True)
        )
        whole = kept == task.kept
        quick = task if proves else replace(task, gap=max(task.gap, UNPROVEN), most_nodes=NODES)
        found, bound_s = _fastest(replace(quick, kept=kept))
        if not found and not proves and task.cutoff_s and math.isfinite(bound_s):
            return Infeasible(0)  # none in so many nodes
        if not whole:
            bound_s = min(bound_s, low.bound_s + width_s)
        bound_s = max(bound_s, low.bound_s)
        over_s = found.seconds - low.bound_s if found else math.inf
        enough = whole or over_s <= width_s  # what lies outside can't be better
        enough |= not proves and (over_s <= CLOSE * low.bound_s or width_s > FIRST * low.bound_s)
        if found and (enough or found.seconds - bound_s <= task.gap * found.seconds):
            return replace(found, bound_seconds=min(bound_s, found.seconds))
        if whole:
            return bound_s
        if width_s >= reach_s:
            return found or Infeasible(0)
        wider_s = min(width_s * WIDER, over_s, reach_s)
        few_s = wider_s if proves else min(wider_s, _width_of(MANY, task.kept, low))
        if few_s <= width_s and task.cutoff_s:
            return Infeasible(0)  # none of so many
        width_s = few_s if few_s > width_s else wider_s


def _width_of(count: int, kept: Kept, low: Relaxed) -> float:
    """The width of a sieve that leaves so many choices, of all slots together."""
    every = [low.excess_s[s][list(some)] for s, some in enumerate(kept)]
    excess = np.sort(np.concatenate(every))
    return float(excess[min(count, len(excess)) - 1])


def _fastest(task: _Task) -> tuple[Solution | None, float]:
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
            time_limit_s=task.time_limit_s,
            most_nodes=task.most_nodes,
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


def _smallest(task: _Task, bound_s: float) -> Solution | Infeasible:
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
    raise AutoparError(
        f"{task.time_limit_s} s were too short to find out whether {len(problem.slots)} regions "
        f"fit into {problem.limit_bytes:,} bytes: raise time_limit_s"
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


def evaluate(problem: PlanningProblem, choices: Sequence[int]) -> tuple[float, int] | None:
    """Seconds and bytes of one choice per slot, or None where a forbidden pair occurs or a cover
    is left out."""
    for cover in problem.covers:
        if not any(c in takes for c, takes in zip(choices, cover.takes, strict=True)):
            return None
    taken = [slot.choices[c] for slot, c in zip(problem.slots, choices, strict=True)]
    made_of = [
        (edge, made, needed)
        for edge in problem.edges
        for made, needed in sorted(_conversions(edge, choices))
    ]
    if any(edge.seconds[made][needed] is None for edge, made, needed in made_of):
        return None
    if problem.stages is not None:
        return evaluate_stages(problem, choices, made_of)
    seconds = problem.base_seconds + sum(choice.seconds for choice in taken)
    memory_bytes = problem.base_bytes + sum(choice.resident_bytes for choice in taken)
    for edge, made, needed in made_of:
        seconds += sum(edge.costs(made, needed))
        memory_bytes += edge.resident_bytes[made][needed]
    groups: dict[str, int] = {}
    for slot, choice in zip(problem.slots, taken, strict=True):
        groups[slot.group] = groups.get(slot.group, 0) + choice.transient_bytes
    return seconds, memory_bytes + max(groups.values(), default=0)


def _conversions(edge: Edge, choices: Sequence[int]) -> set[tuple[int, int]]:
    made = edge.source.layouts[choices[edge.source.slot]]
    needed = [use.layouts[choices[use.slot]] for use in edge.uses]
    return {(made, n) for n in needed if made is not None and n is not None}


def undominated(problem: PlanningProblem) -> Kept:
    """Per slot (but those that are fronts) the choices that no other can replace: one with the same
    layouts on every edge, in the same covers, and no more seconds, resident or transient bytes. Of
    equals the first stays; no optimum is lost."""
    layouts: list[list[tuple[int | None, ...]]] = [[] for _ in problem.slots]
    for edge in problem.edges:
        for use in (edge.source, *edge.uses):
            layouts[use.slot].append(use.layouts)
    for cover in problem.covers:
        for s, takes in enumerate(map(frozenset, cover.takes)):
            layouts[s].append(tuple(int(c in takes) for c in range(len(problem.slots[s].choices))))
    known: dict[tuple[object, ...], tuple[int, ...]] = {}
    out = []
    for slot, rows in zip(problem.slots, layouts, strict=True):
        if slot.is_front:
            out.append(tuple(range(len(slot.choices))))
            continue
        key = (id(slot.choices), tuple(rows))
        if key not in known:
            known[key] = _undominated(slot, rows)
        out.append(known[key])
    return tuple(out)


def _costs(choice: Choice) -> tuple[float, ...]:
    """Every number that a choice pays, in the same order for all choices of a slot."""
    if not choice.shares:
        return choice.seconds, choice.resident_bytes, choice.transient_bytes
    return tuple(
        number
        for s in choice.shares
        for number in (
            *(s.seconds, s.step_seconds, s.resident_bytes, s.transient_bytes),
            *s.held_bytes,
        )
    )


def _undominated(slot: Slot, layouts: list[tuple[int | None, ...]]) -> tuple[int, ...]:
    alike: dict[tuple[int | None, ...], list[int]] = {}
    for c in range(len(slot.choices)):
        alike.setdefault(tuple(row[c] for row in layouts), []).append(c)
    costs = np.array([_costs(choice) for choice in slot.choices], np.float64)
    return tuple(sorted(some[k] for some in alike.values() for k in pareto(costs[some])))


def check(problem: PlanningProblem) -> None:
    """What the programme relies on, asserted: an index per choice, and no conversion below zero
    (z has no reason to be above its rows)."""
    for slot in problem.slots:
        assert slot.choices, f"{slot.name} has no choice"
        assert all(math.isfinite(c.seconds) for c in slot.choices), f"{slot.name} has no price"
    for edge in problem.edges:
        for use in (edge.source, *edge.uses):
            assert len(use.layouts) == len(problem.slots[use.slot].choices), edge.name
        pairs = [(m, n) for m, row in enumerate(edge.seconds) for n, s in enumerate(row)]
        possible = [(m, n) for m, n in pairs if edge.seconds[m][n] is not None]
        prices = [edge.costs(made, needed) for made, needed in possible]
        assert all(0 <= each < math.inf and each + once >= 0 for each, once in prices), edge.name
        assert all(b >= 0 for row in edge.resident_bytes for b in row), edge.name

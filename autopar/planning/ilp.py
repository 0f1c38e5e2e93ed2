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
      peak ≥ Σ_{s in group} (q + a)·x − Σ f·x                         (again) add_transient
      r₀ + Σ r·x + Σ R·z + Σ B·o + peak ≤ limit                   (memory)    limit_memory
      o[b] ≥ Σ x of slot s's choices that take b, for each s      (once)      add_shared
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
from dataclasses import replace

import numpy as np

from autopar.planning import multipliers
from autopar.planning.deadline import after
from autopar.planning.loose import Loose, least_bytes_of
from autopar.planning.pareto import pareto
from autopar.planning.problem import Choice, Infeasible, PlanningProblem, Slot, Solution
from autopar.planning.relaxed import Relaxed, alike_slots, loosened, relaxed
from autopar.planning.rows import Kept
from autopar.planning.sieve import Task, lightest_of, out_of_time, sifted, smallest_of


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
    lightest: bool = False,
    most_nodes: int | None = None,
) -> Solution | Infeasible:
    """The choices with the least seconds within the memory limit.

    `solver`: "highs" or "cbc". `gap`: seconds − bound_seconds <= gap · seconds, where no choice is
    faster than `bound_seconds`. `cutoff_s`: slower choices are of no interest; if all that fit are
    slower, the answer is Infeasible with `short_bytes` 0. `time_limit_s`, for all runs of the
    solver together, may leave a wider gap, or where nothing was found (in as much time again) the
    choice with the least memory; without it, the same problem has the same answer. `low`: the
    problem's relaxation, where it is known. Not `proves`: a better bound than the relaxation's is
    of no use, and the best of a few choices is taken. Not `measure`: a shortage may be said to be
    `at_least` so many. `lightest`: of what is hardly slower than the fastest, the choices whose
    stages take least together.

    `bound_seconds` and `short_bytes` are exact up to the solvers' arithmetic (1e-9, relative).
    Errors: AutoparError for an unknown solver, OutOfTimeError where the time limit leaves neither a
    choice that fits (and isn't slower than `cutoff_s`) nor a proof that there is none.
    """
    check(problem)
    kept, deadline = undominated(problem), after(time_limit_s)
    task = Task(problem, kept, solver, gap, time_limit_s, cutoff_s, deadline, most_nodes)
    low = low or relaxed(problem, solver)
    if cutoff_s is not None and cutoff_s <= low.bound_s < math.inf:
        return Infeasible(0)
    found = sifted(task, low, proves)
    if found == math.inf and not measure and low.feasible and cutoff_s is not None:
        return Infeasible(0)  # of what may fit nothing is faster
    if found == math.inf and not measure:
        return Infeasible(max(least_bytes(problem) - problem.limit_bytes, 1), at_least=True)
    if isinstance(found, float) and cutoff_s is not None and deadline.is_over:
        raise out_of_time(task)  # the choice with the least memory is slower
    if isinstance(found, Solution) and lightest:
        return lightest_of(task, found)
    return found if isinstance(found, Solution | Infeasible) else smallest_of(task, found)


def smallest(
    problem: PlanningProblem, solver: str, time_limit_s: float | None
) -> Solution | Infeasible:
    """The choices that need the least bytes, whether they fit or not; Infeasible where there are
    none."""
    boundless = replace(problem, limit_bytes=BOUNDLESS)
    return smallest_of(Task(boundless, undominated(problem), solver, 0.0, time_limit_s, None), 0.0)


BOUNDLESS = 2**60
"""Bytes that nothing needs."""


def over_bytes(problem: PlanningProblem, solver: str) -> float:
    """By how many bytes at least each choice is over the limit, by multipliers."""
    return multipliers.over_bytes(_loose(problem), solver)


def least_bytes(problem: PlanningProblem) -> int:
    """No choice needs less: each slot's least of every kind, on the fullest stage."""
    return least_bytes_of(_loose(problem))


def _loose(problem: PlanningProblem) -> Loose:
    return loosened(problem, alike_slots(problem))


def undominated(problem: PlanningProblem) -> Kept:
    """Per slot (but those that are fronts) the choices that no other can replace: one with the same
    layouts on every edge, in the same covers, sharing the same, and no more seconds, resident or
    transient bytes. Of equals the first stays; no optimum is lost."""
    layouts: list[list[tuple[int | None, ...]]] = [[] for _ in problem.slots]
    for edge in problem.edges:
        for use in (edge.source, *edge.uses):
            layouts[use.slot].append(use.layouts)
    for cover in problem.covers:
        for s, takes in enumerate(map(frozenset, cover.takes)):
            layouts[s].append(tuple(int(c in takes) for c in range(len(problem.slots[s].choices))))
    for one in problem.shared:
        for s in one.takes:
            every = range(len(problem.slots[s].choices))
            layouts[s].append(tuple(int(one.taken(s, c)) for c in every))
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
        sizes = choice.resident_bytes, choice.transient_bytes
        return choice.seconds, *sizes, choice.again_bytes, -choice.freed_bytes
    return tuple(
        number
        for s in choice.shares
        for number in (
            *(s.seconds, s.step_seconds, s.resident_bytes, s.transient_bytes),
            *(s.again_bytes, -s.freed_bytes),
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

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
      N[k] = Σ of the x, or of the f, that are alike              (count)     add_counts
      t₀ + Σ t·x + Σ T·z ≤ cutoff                                 (cutoff)    cut_off

"Neither makes nor needs the value" is one more layout whose conversions are free. With x integral,
(made) and (needed) leave f one possible value, 1 on the pair that occurs, so f and z need not be
declared integer. Without the memory row a chain is a shortest path and its relaxation is integral;
z ≥ x + y − 1 instead would have the relaxation 0. With one use f itself is paid and z is left out.

(count) removes no solution: a sum of integers is an integer. Over identical layers the relaxation
mixes choices, and branching on one layer's x only moves the mixture to the next layer; branching
on how many layers take a choice, or a pair of layouts, moves the bound.
"""

from autopar.errors import AutoparError
from autopar.planning.problem import Edge, Infeasible, PlanningProblem, Solution
from autopar.planning.rows import Kept, Rows, build, cut_off, limit_memory, linear
from autopar.planning.scale import Scale, choose_scale
from autopar.planning.solvers import Outcome, run


def solve(
    problem: PlanningProblem,
    *,
    solver: str = "highs",
    gap: float = 1e-6,
    time_limit_s: float | None = None,
    cutoff_s: float | None = None,
) -> Solution | Infeasible:
    """The choices with the least seconds within the memory limit.

    `solver`: "highs" or "cbc". `gap`: seconds − bound_seconds <= gap · seconds, unless the time
    limit stops the solver before. `cutoff_s`: plans at or above it are of no interest; where none
    is below it, the answer is Infeasible with `short_bytes` 0.

    Deterministic as long as no time limit strikes. Errors: AutoparError for an unknown solver, and
    where the time limit leaves neither a plan nor a proof that there is none.
    """
    kept, scale = undominated(problem), choose_scale(problem)
    rows = build(problem, kept, scale, "fastest")
    limit_memory(rows, problem.limit_bytes - problem.base_bytes)
    if cutoff_s is not None:
        cut_off(rows, cutoff_s)
    rows.programme.setObjective(linear(rows.seconds))
    outcome = run(rows.programme, solver, gap, 0.0, time_limit_s)
    if outcome.has_values:
        found = _solution(problem, _taken(rows), outcome.bound / scale.per_second)
        if found.memory_bytes <= problem.limit_bytes:
            return found
    return _smallest(problem, kept, scale, solver, time_limit_s, outcome)


def _smallest(problem: PlanningProblem, kept: Kept, scale: Scale, solver: str, time_limit_s: float | None, fastest: Outcome) -> Solution | Infeasible:
    """No plan was found: how much memory is missing."""
    rows = build(problem, kept, scale, "smallest")
    rows.programme.setObjective(linear(rows.memory))
    outcome = run(rows.programme, solver, 0.0, 0.5 * scale.per_grain, time_limit_s)
    if outcome.status == "infeasible":
        return Infeasible(0, impossible=True)
    assert outcome.has_values
    least = _solution(problem, _taken(rows), fastest.bound / scale.per_second)
    return Infeasible(max(0, least.memory_bytes - problem.limit_bytes))


def _taken(rows: Rows) -> dict[int, int]:
    return {s: c for (s, c), x in rows.chosen.items() if (x.varValue or 0.0) > 0.5}


def _solution(problem: PlanningProblem, taken: dict[int, int], bound_s: float) -> Solution:
    choices = tuple(taken[s] for s in range(len(problem.slots)))
    cost = evaluate(problem, choices)
    assert cost is not None, "the programme has no forbidden pair"
    return Solution(choices, *cost, min(bound_s, cost[0]))


def evaluate(problem: PlanningProblem, choices: tuple[int, ...]) -> tuple[float, int] | None:
    """Seconds and bytes of one choice per slot, or None where a forbidden pair occurs."""
    taken = [slot.choices[c] for slot, c in zip(problem.slots, choices, strict=True)]
    seconds = problem.base_seconds + sum(choice.seconds for choice in taken)
    memory_bytes = problem.base_bytes + sum(choice.resident_bytes for choice in taken)
    for edge in problem.edges:
        for made, needed in sorted(_pairs(edge, choices)):
            conversion_s = edge.seconds[made][needed]
            if conversion_s is None:
                return None
            seconds += conversion_s
            memory_bytes += edge.resident_bytes[made][needed]
    groups: dict[str, int] = {}
    for slot, choice in zip(problem.slots, taken, strict=True):
        groups[slot.group] = groups.get(slot.group, 0) + choice.transient_bytes
    return seconds, memory_bytes + max(groups.values(), default=0)


def _pairs(edge: Edge, choices: tuple[int, ...]) -> set[tuple[int, int]]:
    made = edge.source.layouts[choices[edge.source.slot]]
    needed = {use.layouts[choices[use.slot]] for use in edge.uses}
    return {(made, n) for n in needed if made is not None and n is not None}


def undominated(problem: PlanningProblem) -> Kept:
    """Per slot, the choices that no other one replaces: same layouts on all edges, and no more
    seconds, resident or transient bytes. Of equal ones the first stays. No optimum is lost."""
    layouts: list[list[tuple[int | None, ...]]] = [[] for _ in problem.slots]
    for edge in problem.edges:
        for use in (edge.source, *edge.uses):
            layouts[use.slot].append(use.layouts)
    kept = []
    for slot, columns in zip(problem.slots, layouts, strict=True):
        costs = [(c.seconds, c.resident_bytes, c.transient_bytes) for c in slot.choices]
        seen = [tuple(column[c] for column in columns) for c in range(len(costs))]
        def better(d, c):
            return seen[d] == seen[c] and all(a <= b for a, b in zip(costs[d], costs[c])) and (costs[d] != costs[c] or d < c)
        kept.append(tuple(c for c in range(len(costs)) if not any(better(d, c) for d in range(len(costs)))))
    return tuple(kept)

"""A bound on a planning problem, and how far above it each choice lies.

The rows that join slots (the slowest stage, memory, transient bytes) are given up for multipliers:

    bound = Σ_slots min_c w(c) + w(base) − Σ_ik λ_ik · limit
    w(c) = Σ_shares ((a − s)·α_i + b + s·β_i) · seconds + β_i · step seconds
           + Σ_k λ_ik (resident + held · in flight) + μ_ig · transient

with a, b and s the per_slowest, per_stage and spare of `Stages`, α, β, λ, μ ≥ 0, Σ_i α_i = 1,
Σ_i β_i = 1 and Σ_g μ_ig = Σ_k λ_ik, so that no choice for all slots is below the bound (weak
duality; conversions between slots, which never cost below 0 s, are left out).
The multipliers are the dual values of the linear relaxation in which alike slots are one. Its
columns are generated: those that the multipliers so far price lowest are added until the bound
stands (Dantzig and Wolfe 1960). Rounding in multipliers costs sharpness, never validity.

A choice c that lies in a solution of cost U has w(c) − min w ≤ U − bound: its *excess* says whether
it can matter.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.planning.loose import TRANSIENT, Alike, Floats, Loose, zeros
from autopar.planning.multipliers import bound
from autopar.planning.problem import Choice, PlanningProblem, Share, Stages

WHOLE = Stages(0.0, 1.0, (((1,),),))
"""Without stages: one stage, whose seconds are those of the step."""


@dataclass(frozen=True)
class Relaxed:
    """`bound_s`: no solution is faster. `excess_s[slot][choice]`: how much more than that a
    solution with this choice costs, at least. Not `feasible`: there is no solution."""

    bound_s: float
    excess_s: tuple[Floats, ...]
    feasible: bool = True


def relaxed(problem: PlanningProblem, solver: str) -> Relaxed:
    """The bound and the excesses of a problem's choices."""
    groups = alike_slots(problem)
    loose = loosened(problem, groups)
    found = bound(loose, solver)
    excess: list[Floats] = [np.zeros(0)] * len(problem.slots)
    for slots, weight in zip(groups.values(), found.weights, strict=True):
        for s in slots:
            excess[s] = weight[0] - weight[0].min()
    return Relaxed(found.seconds, tuple(excess), np.isfinite(found.seconds))


def alike_slots(problem: PlanningProblem) -> dict[tuple[int, str], list[int]]:
    """Slots with the same choices: those of one group of several slots, or each alone in its."""
    sizes: dict[str, int] = {}
    for slot in problem.slots:
        sizes[slot.group] = sizes.get(slot.group, 0) + 1
    members: dict[tuple[int, str], list[int]] = {}
    for s, slot in enumerate(problem.slots):
        alone = sizes[slot.group] == 1 and slot.group != ""
        group = "" if alone else f"group {slot.group}"
        members.setdefault((id(slot.choices), group), []).append(s)
    return members


def loosened(problem: PlanningProblem, groups: dict[tuple[int, str], list[int]]) -> Loose:
    """A problem as the relaxation sees it."""
    stages = problem.stages or WHOLE
    moments: dict[str, int] = {"group ": 0}  # the base's group
    every, freed = [], _most_freed(problem, stages, groups)
    for k, ((_, group), slots) in enumerate(groups.items()):
        rows = choice_rows(problem.slots[slots[0]].choices, stages, freed)
        moment = moments.setdefault(group or f"alone {k}", len(moments))
        share = 1.0 if group else 1.0 / len(slots)
        every.append(Alike(len(slots), (rows,), moment, share))
    start = Share(0, problem.base_seconds, 0.0, problem.base_bytes)
    base = base_rows((start, *problem.base_shares), stages)
    return Loose(problem.limit_bytes, stages, tuple(every), base)


def _most_freed(
    problem: PlanningProblem, stages: Stages, groups: Mapping[tuple[int, str], Sequence[int]]
) -> list[int]:
    """By stage, what all slots free at most."""
    most = [0] * len(stages.in_flight)
    for slots in groups.values():
        choices = problem.slots[slots[0]].choices
        every = [share for choice in choices for share in _shares(choice) if share.freed_bytes]
        for stage in {share.stage for share in every}:
            freed = max(share.freed_bytes for share in every if share.stage == stage)
            most[stage] += len(slots) * freed
    return most


def choice_rows(
    choices: Sequence[Choice], stages: Stages, freed: Sequence[int]
) -> dict[int, Floats]:
    """By stage, a row of costs for each choice, where so much may be freed: of transient bytes what
    it needs at least."""
    where = {share.stage for choice in choices for share in _shares(choice)}
    rows = {i: np.zeros((len(choices), len(zeros(stages)))) for i in sorted(where)}
    for c, choice in enumerate(choices):
        for share in _shares(choice):
            rows[share.stage][c] += _numbers(share, stages)
            again_bytes = max(share.again_bytes - freed[share.stage], 0)
            rows[share.stage][c, TRANSIENT] += again_bytes
    return rows


def base_rows(shares: Iterable[Share], stages: Stages) -> tuple[Floats, ...]:
    """By stage, what is there whatever is chosen."""
    rows = tuple(zeros(stages) for _ in stages.in_flight)
    for share in shares:
        rows[share.stage][:] += _numbers(share, stages)
    return rows


def _shares(choice: Choice) -> tuple[Share, ...]:
    """A choice's shares; without stages the one that is the whole."""
    if choice.shares:
        return choice.shares
    sizes = choice.resident_bytes, (0,), choice.transient_bytes
    return (Share(0, choice.seconds, 0.0, *sizes, choice.again_bytes, choice.freed_bytes),)


def _numbers(share: Share, stages: Stages) -> Floats:
    held = share.held_bytes or (0,) * len(stages.in_flight[0][0])
    sizes = (share.resident_bytes, share.transient_bytes, *held)
    return np.array([share.seconds, share.step_seconds, *sizes], np.float64)

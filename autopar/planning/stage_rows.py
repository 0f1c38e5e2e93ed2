"""The rows of a programme whose layers lie in stages.

Variables on top of `ilp`'s, for stages i and the microbatches v that i's chunks hold together

    slowest ≥ 0    the longest that a stage takes for one microbatch
    late    ≥ 0    the longest that a stage takes once a step
    most    ≥ 0    the bytes of the fullest stage

    seconds = a · slowest + b · Σ_i τ_i + late,   τ_i = Σ share seconds · x + Σ T · z of stage i
    slowest ≥ τ_i                                                          (slowest)
    late ≥ Σ step seconds · x + Σ T · z (once)                             (late)
    peak_i ≥ Σ_{s in group} q · x                                          (transient)
    most ≥ Σ (r + v·h) · x + Σ R · z + peak_i,   memory = most             (stage)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pulp

from autopar.planning.problem import PlanningProblem, Share
from autopar.planning.staged import Sums, base_sums

if TYPE_CHECKING:
    from autopar.planning.rows import Kept, Rows, Terms


@dataclass(frozen=True)
class _Stage:
    """Σ factor · variable of one stage, in the programme's units, and what is there anyway."""

    base: Sums
    seconds: "Terms" = field(default_factory=list)
    step_seconds: "Terms" = field(default_factory=list)
    resident: "Terms" = field(default_factory=list)
    held: "dict[int, Terms]" = field(default_factory=dict)
    groups: "dict[str, Terms]" = field(default_factory=dict)


def add_stages(rows: "Rows", problem: PlanningProblem, kept: "Kept") -> None:
    """All of the above; fills the programme's sums of seconds and memory."""
    stages, scale = problem.stages, rows.scale
    assert stages is not None
    every = [_Stage(base) for base in base_sums(problem)]
    for variable, share, group in _shares(rows, problem, kept):
        _charge(rows, every[share.stage], variable, share, group)
    slowest, late, most = map(rows.variable, ("slowest", "late", "most"))
    base = rows.programme.add_variable("base", 1.0, 1.0)  # PuLP's HiGHS drops constants
    whole = sum(scale.of_seconds(one.base.seconds) for one in every)
    rows.seconds.append((base, stages.per_stage * whole))
    rows.seconds.extend([(slowest, stages.per_slowest), (late, 1.0)])
    rows.memory.append((most, 1.0))
    for i, (one, in_flight) in enumerate(zip(every, stages.in_flight, strict=True)):
        rows.seconds.extend((v, stages.per_stage * f) for v, f in one.seconds)
        of_base = scale.of_seconds(one.base.seconds), scale.of_seconds(one.base.step_seconds)
        _at_least(rows, f"slowest_{i:02}", slowest, one.seconds, of_base[0])
        _at_least(rows, f"late_{i:02}", late, one.step_seconds, of_base[1])
        peak = rows.variable(f"peak_{i:02}")
        for g, group in enumerate(dict.fromkeys((*one.base.transient, *one.groups))):
            sizes, more = one.groups.get(group, []), one.base.transient.get(group, 0)
            _at_least(rows, f"transient_{i:02}_{g:04}", peak, sizes, _grains(rows, more))
        for k, counts in enumerate(in_flight):
            held = [(v, f * counts[c]) for c, found in one.held.items() for v, f in found]
            terms = [*one.resident, *held, (peak, 1.0)]
            size = one.base.resident_bytes + one.base.held(counts)
            _at_least(rows, f"stage_{i:02}_{k:02}", most, terms, _grains(rows, size))


def _grains(rows: "Rows", size_bytes: int) -> float:
    """Bytes that are there anyway, rounded up."""
    return math.ceil(size_bytes / rows.scale.grain_bytes) * rows.scale.per_grain


def _at_least(
    rows: "Rows", name: str, variable: pulp.LpVariable, terms: "Terms", more: float
) -> None:
    rows.add(name, [(variable, 1.0), *((v, -f) for v, f in terms)], pulp.LpConstraintGE, more)


def _shares(
    rows: "Rows", problem: PlanningProblem, kept: "Kept"
) -> Iterator[tuple[pulp.LpVariable, Share, str]]:
    for s, slot in enumerate(problem.slots):
        for c in kept[s]:
            for share in slot.choices[c].shares:
                yield rows.chosen[s, c], share, slot.group
    for edge, variable, made, needed in rows.paid:
        seconds, size = edge.seconds[made][needed], edge.resident_bytes[made][needed]
        assert seconds is not None, "a forbidden pair has no flow"
        times = (0.0, seconds) if edge.once else (seconds, 0.0)
        yield variable, Share(edge.stage, *times, size), ""


def _charge(
    rows: "Rows", stage: _Stage, variable: pulp.LpVariable, share: Share, group: str
) -> None:
    scale = rows.scale
    stage.seconds.append((variable, scale.of_seconds(share.seconds)))
    stage.step_seconds.append((variable, scale.of_seconds(share.step_seconds)))
    stage.resident.append((variable, scale.of_bytes(share.resident_bytes)))
    for chunk, size in enumerate(share.held_bytes):
        stage.held.setdefault(chunk, []).append((variable, scale.of_bytes(size)))
    if share.transient_bytes:
        term = (variable, scale.of_bytes(share.transient_bytes))
        stage.groups.setdefault(group, []).append(term)

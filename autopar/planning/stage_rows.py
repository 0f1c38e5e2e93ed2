"""The rows of a programme whose layers lie in stages.

Variables on top of `ilp`'s, for stages i and the microbatches v that i's chunks hold together

    slowest ≥ 0    the longest that a stage takes for one microbatch
    late    ≥ 0    the longest that a stage takes once a step
    most    ≥ 0    the bytes of the fullest stage
    r_i, h_ij ≥ 0  resident bytes of a stage, and bytes held for one microbatch in its chunk j

    seconds = a · slowest + b · Σ_i τ_i + late,   τ_i = Σ share seconds · x + Σ T · z of stage i
    slowest ≥ τ_i                                                          (slowest)
    late ≥ Σ step seconds · x + Σ T · z (once) + spare · (τ_i − slowest)   (late)
    peak_i ≥ Σ_{s in group} q · x                                          (transient)
    peak_i ≥ Σ_{s in group} (q + a) · x − Σ f · x                              (again)
    r_i ≥ Σ r · x + Σ R · z,   h_ij ≥ Σ h · x + Σ B · o                      (resident) (held)
    most ≥ r_i + Σ_j v_j · h_ij + peak_i,   memory = most                  (stage)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pulp

from autopar.planning.moment_rows import Taken, add_moments
from autopar.planning.problem import PlanningProblem, Share
from autopar.planning.staged import Sums, base_sums

if TYPE_CHECKING:
    from autopar.planning.rows import Rows, Terms


@dataclass(frozen=True)
class _Stage:
    """Σ factor · variable of one stage, in the programme's units, and what is there anyway."""

    base: Sums
    seconds: "Terms" = field(default_factory=list)
    step_seconds: "Terms" = field(default_factory=list)
    resident: "Terms" = field(default_factory=list)
    held: "dict[int, Terms]" = field(default_factory=dict)
    taken: list[Taken] = field(default_factory=list)


def add_stages(rows: "Rows", problem: PlanningProblem) -> None:
    """All of the above; fills the programme's sums of seconds and memory."""
    stages, scale = problem.stages, rows.scale
    assert stages is not None
    every = [_Stage(base) for base in base_sums(problem)]
    _charge_all(rows, problem, every)
    slowest, most = map(rows.variable, ("slowest", "most"))
    late = rows.programme.add_variable("late", None)
    whole = sum(scale.of_seconds(one.base.seconds) for one in every)
    rows.seconds.append((rows.one[0], stages.per_stage * whole))
    rows.seconds.extend([(slowest, stages.per_slowest), (late, 1.0)])
    rows.memory.append((most, 1.0))
    for i, (one, in_flight) in enumerate(zip(every, stages.in_flight, strict=True)):
        rows.seconds.extend((v, stages.per_stage * f) for v, f in one.seconds)
        pace = stages.per_slowest + stages.per_stage
        rows.loads.extend([*((v, pace * f) for v, f in one.seconds), *one.step_seconds])
        of_base = scale.of_seconds(one.base.seconds), scale.of_seconds(one.base.step_seconds)
        _at_least(rows, f"slowest_{i:02}", slowest, one.seconds, of_base[0])
        spare = stages.spare
        terms = [*one.step_seconds, *((v, spare * f) for v, f in one.seconds), (slowest, -spare)]
        _at_least(rows, f"late_{i:02}", late, terms, of_base[1] + spare * of_base[0])
        peak = rows.variable(f"peak_{i:02}")
        add_moments(rows, f"_{i:02}", peak, one.taken, one.base.moments.brief)
        kept = rows.variable(f"resident_{i:02}")
        _at_least(rows, f"resident_{i:02}", kept, one.resident, 0.0)
        held = {c: rows.variable(f"held_{i:02}_{c:02}") for c in one.held}
        for c, terms in one.held.items():
            _at_least(rows, f"held_{i:02}_{c:02}", held[c], terms, 0.0)
        for k, counts in enumerate(in_flight):
            sums = [(kept, 1.0), (peak, 1.0), *((v, float(counts[c])) for c, v in held.items())]
            size = one.base.resident_bytes + one.base.held(counts)
            _at_least(rows, f"stage_{i:02}_{k:02}", most, sums, scale.grains(size))


def _at_least(
    rows: "Rows", name: str, variable: pulp.LpVariable, terms: "Terms", more: float
) -> None:
    rows.add(name, [(variable, 1.0), *((v, -f) for v, f in terms)], pulp.LpConstraintGE, more)


def _charge_all(rows: "Rows", problem: PlanningProblem, every: Sequence[_Stage]) -> None:
    """What choices and conversions cost each stage."""
    for (s, c), x in rows.chosen.items():
        for share in problem.slots[s].choices[c].shares:
            stage = every[share.stage]
            _charge(rows, stage, x, share)
            if share.transient_bytes or share.again_bytes or share.freed_bytes or s in rows.merged:
                stage.taken.append((s, problem.slots[s].group, x, share))
    for edge, variable, made, needed in rows.paid:
        size = edge.resident_bytes[made][needed]
        share = Share(edge.stage, *edge.costs(made, needed), size)
        _charge(rows, every[edge.stage], variable, share)
    for one, variable in rows.once:
        _charge(rows, every[one.share.stage], variable, one.share)


def _charge(rows: "Rows", stage: _Stage, variable: pulp.LpVariable, share: Share) -> None:
    scale = rows.scale
    stage.seconds.append((variable, scale.of_seconds(share.seconds)))
    stage.step_seconds.append((variable, scale.of_seconds(share.step_seconds)))
    stage.resident.append((variable, scale.of_bytes(share.resident_bytes)))
    for chunk, size in enumerate(share.held_bytes):
        stage.held.setdefault(chunk, []).append((variable, scale.of_bytes(size)))

"""The rows and columns of the integer programme, in PuLP. `ilp` states the maths.

Names of variables: `x_slot_choice`, `f_edge_use_made_needed`, `z_edge_made_needed`, `o_shared`,
`n_…` counts.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import pulp

from autopar.planning.moment_rows import add_moments
from autopar.planning.problem import Edge, PlanningProblem, Shared, Use
from autopar.planning.scale import Scale
from autopar.planning.stage_rows import add_stages

Layout = int | None  # None: that choice neither makes nor needs the value
Terms = list[tuple[pulp.LpVariable, float]]
Kept = tuple[tuple[int, ...], ...]  # by slot: the choices that the programme may take
Merged = dict[int, tuple[int, ...]]  # the first of alike slots → all of them


@dataclass(frozen=True)
class Rows:
    """A programme being built: its two sums, and which of its integers are alike.

    `seconds` and `memory` are Σ factor · variable in the units of `scale`; one is minimised, the
    other limited. `alike` collects variables that mean the same in identical slots or edges.
    """

    programme: pulp.LpProblem
    scale: Scale
    merged: Merged = field(default_factory=dict)
    one: list[pulp.LpVariable] = field(default_factory=list)
    chosen: dict[tuple[int, int], pulp.LpVariable] = field(default_factory=dict)
    seconds: Terms = field(default_factory=list)
    memory: Terms = field(default_factory=list)
    alike: dict[Hashable, Terms] = field(default_factory=dict)
    paid: list[tuple[Edge, pulp.LpVariable, int, int]] = field(default_factory=list)
    """Each conversion that costs something, with the variable that says whether it is made."""
    once: list[tuple[Shared, pulp.LpVariable]] = field(default_factory=list)
    """What is there once, with the variable that says whether anyone takes it."""
    loads: Terms = field(default_factory=list)
    """What all stages take together, waited for or not."""

    def variable(self, name: str, upper: float | None = None) -> pulp.LpVariable:
        return self.programme.add_variable(name, 0.0, upper)

    def add(
        self, name: str, terms: Iterable[tuple[pulp.LpVariable, float]], sense: int, rhs: float
    ) -> None:
        row = pulp.LpConstraint(linear(terms), sense, name, rhs)
        self.programme.addConstraint(row)

    def charge(self, variable: pulp.LpVariable, seconds: float, size_bytes: int) -> None:
        self.seconds.append((variable, self.scale.of_seconds(seconds)))
        self.memory.append((variable, self.scale.of_bytes(size_bytes)))


def linear(terms: Iterable[tuple[pulp.LpVariable, float]]) -> pulp.LpAffineExpression:
    """Σ factor · variable. Of two terms with one variable PuLP would keep the last: add them up."""
    sums: dict[pulp.LpVariable, float] = {}
    for variable, factor in terms:
        sums[variable] = sums.get(variable, 0.0) + factor
    return pulp.LpAffineExpression(list(sums.items()))


def merged_slots(problem: PlanningProblem, kept: Kept) -> Merged:
    """Slots with the same choices of which every edge sees the same whatever they take: how often
    each choice is taken is all that matters."""
    groups = Counter(slot.group for slot in problem.slots)
    settled = [True] * len(problem.slots)
    for edge in problem.edges:
        for use in (edge.source, *edge.uses):
            if len({use.layouts[c] for c in kept[use.slot]}) > 1 and not is_free(edge):
                settled[use.slot] = False
    found: dict[Hashable, list[int]] = {}
    for s, slot in enumerate(problem.slots):
        if settled[s] and slot.group and groups[slot.group] == 1:
            takes = (
                *(cover.takes[s] for cover in problem.covers),
                *(one.takes.get(s) for one in problem.shared),
            )
            found.setdefault((id(slot.choices), kept[s], takes), []).append(s)
    return {slots[0]: tuple(slots) for slots in found.values() if len(slots) > 1}


def build(problem: PlanningProblem, kept: Kept, scale: Scale, name: str) -> Rows:
    """All rows but the limits, which the caller adds with the objective."""
    rows = Rows(pulp.LpProblem(name, pulp.LpMinimize), scale, merged_slots(problem, kept))
    rows.one.append(rows.programme.add_variable("one", 1.0, 1.0))  # PuLP's HiGHS drops constants
    add_choices(rows, problem, kept)
    for e, edge in enumerate(problem.edges):
        if not is_free(edge):
            add_conversions(rows, f"{e:04}", edge, kept)
    add_shared(rows, problem)
    if problem.stages is None:
        charge_all(rows, problem)
        add_transient(rows, problem)
    else:
        add_stages(rows, problem)
    add_covers(rows, problem)
    add_counts(rows)
    return rows


def add_choices(rows: Rows, problem: PlanningProblem, kept: Kept) -> None:
    """(choice): a slot's, or how many of merged slots take each."""
    follow = {s for slots in rows.merged.values() for s in slots[1:]}
    for s, slot in enumerate(problem.slots):
        if s in follow:
            continue
        count = len(rows.merged.get(s, (s,)))
        for c in kept[s]:
            name, kind = f"x_{s:04}_{c:03}", pulp.LpInteger if count > 1 else pulp.LpBinary
            x = rows.programme.add_variable(name, 0, count, kind)
            rows.chosen[s, c] = x
            if count == 1:
                rows.alike.setdefault((slot.choices, c), []).append((x, 1.0))
        every = [(rows.chosen[s, c], 1.0) for c in kept[s]]
        rows.add(f"choice_{s:04}", every, pulp.LpConstraintEQ, float(count))


def charge_all(rows: Rows, problem: PlanningProblem) -> None:
    """(seconds) and (memory): what choices, conversions and the base pay."""
    rows.seconds.append((rows.one[0], rows.scale.of_seconds(problem.base_seconds)))
    for (s, c), x in rows.chosen.items():
        choice = problem.slots[s].choices[c]
        rows.charge(x, choice.seconds, choice.resident_bytes)
    for edge, paid, made, needed in rows.paid:
        rows.charge(paid, sum(edge.costs(made, needed)), edge.resident_bytes[made][needed])
    for one, paid in rows.once:
        rows.charge(paid, 0.0, one.share.resident_bytes)


def add_shared(rows: Rows, problem: PlanningProblem) -> None:
    """(once): paid if any slot takes it; of merged slots any number of them may."""
    for k, one in enumerate(problem.shared):
        takers: dict[int, Terms] = {}
        for (s, c), x in rows.chosen.items():
            if one.taken(s, c):
                takers.setdefault(s, []).append((x, -1.0))
        if takers:
            merged = any(s in rows.merged for s in takers)
            kind = pulp.LpBinary if merged else pulp.LpContinuous
            paid = rows.programme.add_variable(f"o_{k:03}", 0, 1, kind)
            for s, terms in takers.items():
                count = float(len(rows.merged.get(s, (s,))))
                rows.add(f"once_{k:03}_{s:04}", [(paid, count), *terms], pulp.LpConstraintGE, 0.0)
            rows.once.append((one, paid))


def add_covers(rows: Rows, problem: PlanningProblem) -> None:
    """(cover): at least one choice that uses it."""
    for k, cover in enumerate(problem.covers):
        users = [(x, 1.0) for (s, c), x in rows.chosen.items() if c in cover.takes[s]]
        rows.add(f"cover_{k:02}", users, pulp.LpConstraintGE, 1.0)


def is_free(edge: Edge) -> bool:
    """Every conversion is possible and costs nothing: the edge needs no rows."""
    seconds = (s for table in (edge.seconds, edge.step_seconds) for row in table for s in row)
    return all(s == 0 for s in seconds) and not any(
        size for row in edge.resident_bytes for size in row
    )


def add_conversions(rows: Rows, name: str, edge: Edge, kept: Kept) -> None:
    """(made), (needed) and (shared) of one edge, and what its conversions pay."""
    sharers: dict[tuple[int, int], Terms] = {}
    for u, use in enumerate(dict.fromkeys(edge.uses)):
        for pair, flow in add_flow(rows, f"{name}_{u:02}", edge, use, kept).items():
            sharers.setdefault(pair, []).append((flow, -1.0))
    for (made, needed), flows in sharers.items():
        if not (any(edge.costs(made, needed)) or edge.resident_bytes[made][needed]):
            continue
        paid = flows[0][0]
        if len(flows) > 1:
            paid = rows.variable(f"z_{name}_{made:03}_{needed:03}", 1.0)
            for k, flow in enumerate(flows):
                row = f"shared_{name}_{made:03}_{needed:03}_{k:02}"
                rows.add(row, [(paid, 1.0), flow], pulp.LpConstraintGE, 0.0)
        rows.paid.append((edge, paid, made, needed))


def add_flow(
    rows: Rows, name: str, edge: Edge, use: Use, kept: Kept
) -> dict[tuple[int, int], pulp.LpVariable]:
    """(made) and (needed) of one use: the flow of each possible pair of layouts."""
    makers, takers = _by_layout(rows, edge.source, kept), _by_layout(rows, use, kept)
    out: dict[Layout, Terms] = {made: [] for made in makers}
    into: dict[Layout, Terms] = {needed: [] for needed in takers}
    flows = {}
    for a, made in enumerate(makers):
        for b, needed in enumerate(takers):
            pair = None if made is None or needed is None else (made, needed)
            if pair and edge.seconds[pair[0]][pair[1]] is None:
                continue
            flow = rows.variable(f"f_{name}_{a:03}_{b:03}")
            out[made].append((flow, 1.0))
            into[needed].append((flow, 1.0))
            where = (edge.stage, edge.seconds, edge.step_seconds, edge.resident_bytes)
            key = (*where, edge.source.layouts, use.layouts, a, b)
            rows.alike.setdefault(key, []).append((flow, 1.0))
            if pair:
                flows[pair] = flow
    for a, made in enumerate(makers):
        rows.add(f"made_{name}_{a:03}", out[made] + makers[made], pulp.LpConstraintEQ, 0.0)
    for b, needed in enumerate(takers):
        rows.add(f"needed_{name}_{b:03}", into[needed] + takers[needed], pulp.LpConstraintEQ, 0.0)
    return flows


def _by_layout(rows: Rows, use: Use, kept: Kept) -> dict[Layout, Terms]:
    """−x of the choices, by the layout that they make or need."""
    if any(use.slot in slots for slots in rows.merged.values()):
        (layout,) = {use.layouts[c] for c in kept[use.slot]}
        return {layout: [(rows.one[0], -1.0)]}
    groups: dict[Layout, Terms] = {}
    for c in kept[use.slot]:
        groups.setdefault(use.layouts[c], []).append((rows.chosen[use.slot, c], -1.0))
    return groups


def add_transient(rows: Rows, problem: PlanningProblem) -> None:
    """(transient), (again)."""
    peak = rows.variable("transient")
    rows.memory.append((peak, 1.0))
    slots = problem.slots
    taken = [(s, slots[s].group, x, slots[s].choices[c]) for (s, c), x in rows.chosen.items()]
    add_moments(rows, "", peak, taken, {})


def add_counts(rows: Rows) -> None:
    """(count): how often identical slots or edges agree is an integer to branch on."""
    for k, terms in enumerate(rows.alike.values()):
        if len(terms) > 1:
            count = rows.programme.add_variable(f"n_{k:04}", 0, len(terms), cat=pulp.LpInteger)
            rows.add(f"count_{k:04}", [*terms, (count, -1.0)], pulp.LpConstraintEQ, 0.0)


def limit_memory(rows: Rows, headroom_bytes: int) -> None:
    """(memory): half a grain to spare, so no tolerance decides whether a choice fits."""
    grains = headroom_bytes // rows.scale.grain_bytes
    limit = (grains + 0.5) * rows.scale.per_grain
    rows.add("memory", rows.memory, pulp.LpConstraintLE, limit)


def cut_off(rows: Rows, cutoff_s: float) -> None:
    """(cutoff)."""
    rows.add("cutoff", rows.seconds, pulp.LpConstraintLE, rows.scale.of_seconds(cutoff_s))

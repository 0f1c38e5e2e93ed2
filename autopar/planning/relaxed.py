"""A bound on a planning problem, and how far above it each choice lies.

The rows that join slots (the slowest stage, memory, transient bytes) are given up for multipliers:

    bound = Σ_slots min_c w(c) + w(base) − Σ_ik λ_ik · limit
    w(c) = Σ_shares (a·α_i + b) · seconds + β_i · step seconds
           + Σ_k λ_ik (resident + held · in flight) + μ_ig · transient

with α, β, λ, μ ≥ 0, Σ_i α_i = 1, Σ_i β_i = 1 and Σ_g μ_ig = Σ_k λ_ik, so that no choice for all
slots is below the bound (weak duality; conversions between slots, never below 0 s, are left out).
The multipliers are the dual values of the linear relaxation in which alike slots are one. Its
columns are generated: those that the multipliers so far price lowest are added until the bound
stands (Dantzig and Wolfe 1960). Rounding in multipliers costs sharpness, never validity.

A choice c that lies in a solution of cost U has w(c) − min w ≤ U − bound: its *excess* says whether
it can matter.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.planning.problem import Choice, PlanningProblem, Share, Stages
from autopar.planning.relaxed_rows import Linear, Row, solved_duals

Floats = NDArray[np.float64]
WHOLE = Stages(0.0, 1.0, (((1,),),))
"""Without stages: one stage, whose seconds are those of the step."""
SECONDS, STEP, RESIDENT, TRANSIENT, HELD = range(5)
"""Columns of costs; what is held has one for each chunk."""
ROUNDS, CLOSE = 60, 1e-5
SLACK = 1e-6
"""Of the limit: no solver's tolerance may say that nothing fits where something does."""


@dataclass(frozen=True)
class Relaxed:
    """`bound_s`: no solution is faster. `excess_s[slot][choice]`: how much more than that a
    solution with this choice costs, at least. Not `feasible`: there is no solution."""

    bound_s: float
    excess_s: tuple[Floats, ...]
    feasible: bool = True


@dataclass(frozen=True)
class Alike:
    """So many slots that the relaxation doesn't tell apart. `options`: their choices, in groups
    that cost the same stages; by stage, a row of costs for each choice. `moment`: the row of
    transient bytes that they are counted in, each by `moment_share`."""

    count: int
    options: tuple[dict[int, Floats], ...]
    moment: int
    moment_share: float


@dataclass(frozen=True)
class Loose:
    """A problem without what joins its slots: what the relaxation sees. `least_slowest_s`: what the
    slowest stage takes at least, for a reason that no row states. `spread`: by part, how many slots
    with an option for each part lie in it, at least and at most."""

    limit_bytes: int
    stages: Stages
    every: tuple[Alike, ...]
    base: tuple[Floats, ...]
    least_slowest_s: float = 0.0
    spread: tuple[tuple[int, int], ...] = ()

    def part_of(self, one: Alike, option: int) -> int | None:
        """The part that an option lies in, of a slot that may lie in any."""
        return option if self.spread and len(one.options) == len(self.spread) else None


@dataclass(frozen=True)
class _Multipliers:
    """By stage: of seconds (`every` those of the sum of stages, and `floor` `least_slowest_s`), of
    step seconds, of memory for each count of microbatches in flight, of each row of transient
    bytes. By part: of the least and the most slots."""

    every: float
    seconds: Floats
    floor: float
    step: Floats
    memory: tuple[Floats, ...]
    moments: Floats
    least: Floats
    most: Floats


def relaxed(problem: PlanningProblem, solver: str) -> Relaxed:
    """The bound and the excesses of a problem's choices."""
    groups = alike_slots(problem)
    loose = loosened(problem, groups)
    bound_s, weights = bound(loose, solver)
    excess: list[Floats] = [np.zeros(0)] * len(problem.slots)
    for slots, weight in zip(groups.values(), weights, strict=True):
        for s in slots:
            excess[s] = weight[0] - weight[0].min()
    return Relaxed(bound_s, tuple(excess), np.isfinite(bound_s))


def bound(loose: Loose, solver: str) -> tuple[float, list[list[Floats]]]:
    """The bound in seconds (inf where nothing fits), and every choice's weight."""
    active: list[list[list[int]]] = [
        [_first(group, loose.stages) for group in one.options] for one in loose.every
    ]
    best = _priced(loose, _without_memory(loose))
    for _ in range(ROUNDS):
        found = _multipliers(loose, active, solver)
        if found is None:
            if _made_fit(loose, active, solver):
                continue
            return np.inf, [[np.zeros(len(_any(g))) for g in one.options] for one in loose.every]
        multipliers, value_s = found
        bound_s, weights = _priced(loose, multipliers)
        best = max(best, (bound_s, weights), key=lambda pair: pair[0])
        if bound_s >= value_s * (1 - CLOSE) or not _add_lowest(loose, active, weights):
            break
    return best


def _without_memory(loose: Loose) -> _Multipliers:
    """Multipliers by which memory doesn't count and every stage is as slow as the slowest."""
    count = len(loose.stages.in_flight)
    even, parts = np.full(count, 1.0 / count), np.zeros(len(loose.spread))
    memory = tuple(np.zeros(len(counts)) for counts in loose.stages.in_flight)
    moments = np.zeros((count, 1 + max([one.moment for one in loose.every], default=0)))
    return _Multipliers(loose.stages.per_stage, even, 0.0, even, memory, moments, parts, parts)


def _made_fit(loose: Loose, active: list[list[list[int]]], solver: str) -> bool:
    """Adds choices until some mixture of them fits into memory, by the same column generation on
    the bytes above the limit; whether there is one."""
    while True:
        found = _multipliers(loose, active, solver, fit=True)
        if found is None:
            return _add_all(loose, active)  # it isn't memory that forbids them
        multipliers, over = found
        if over <= 0:
            return True
        _, weights = _priced(loose, multipliers)
        if not _add_lowest(loose, active, weights):
            return False


def _priced(loose: Loose, found: _Multipliers) -> tuple[float, list[list[Floats]]]:
    total = loose.stages.per_slowest * found.floor * loose.least_slowest_s
    for i, row in enumerate(loose.base):
        total += float(row @ _weights(found, loose.stages, i, 0, 1.0))
        total -= float(found.memory[i].sum()) * loose.limit_bytes
    for part, (least, most) in enumerate(loose.spread):
        total += float(found.least[part]) * least - float(found.most[part]) * most
    weights = []
    for one in loose.every:
        mine = []
        for g, group in enumerate(one.options):
            rows = [
                costs @ _weights(found, loose.stages, i, one.moment, one.moment_share)
                for i, costs in group.items()
            ]
            lies = loose.part_of(one, g)
            own = 0.0 if lies is None else found.most[lies] - found.least[lies]
            mine.append(np.sum(rows, axis=0) + own)
        weights.append(mine)
        total += one.count * min(float(x.min()) for x in mine)
    return total, weights


def _weights(found: _Multipliers, stages: Stages, i: int, moment: int, share: float) -> Floats:
    """What a stage's costs count for."""
    counts = np.array(stages.in_flight[i], np.float64)
    seconds = stages.per_slowest * found.seconds[i] + found.every
    held = found.memory[i] @ counts
    moments = found.moments[i, moment] * share
    return np.array([seconds, found.step[i], found.memory[i].sum(), moments, *held])


# ---------------------------------------------------------------- columns


def _any(group: dict[int, Floats]) -> Floats:
    return next(iter(group.values()))


def _first(group: dict[int, Floats], stages: Stages) -> list[int]:
    """The fastest choice and the one that needs least memory."""
    seconds = np.sum([costs[:, SECONDS] + costs[:, STEP] for costs in group.values()], axis=0)
    return list(dict.fromkeys([int(seconds.argmin()), int(_sizes(group, stages).argmin())]))


def _sizes(group: dict[int, Floats], stages: Stages) -> Floats:
    """Bytes on the stages of a group, with the most microbatches in flight."""
    total = np.zeros(len(_any(group)))
    for i, costs in group.items():
        most = np.max(np.array(stages.in_flight[i], np.float64), axis=0)
        total += costs[:, RESIDENT] + costs[:, TRANSIENT] + costs[:, HELD:] @ most
    return total


def least_bytes_of(loose: Loose) -> int:
    """No choice needs less: each slot's least of every kind of bytes, on the fullest stage. Slots
    whose stage is open count on none."""
    needs = []
    for i, in_flight in enumerate(loose.stages.in_flight):
        base = loose.base[i]
        sizes = [base[RESIDENT] + base[HELD:] @ np.array(counts) for counts in in_flight]
        moment = base[TRANSIENT]
        for one in loose.every:
            if len(one.options) > 1 or i not in one.options[0]:
                continue
            costs = one.options[0][i]
            for k, counts in enumerate(in_flight):
                own = costs[:, RESIDENT] + costs[:, HELD:] @ np.array(counts)
                sizes[k] += one.count * own.min()
            moment = max(moment, costs[:, TRANSIENT].min())
        needs.append(max(sizes) + moment)
    return int(max(needs))


def _add_all(loose: Loose, active: list[list[list[int]]]) -> bool:
    before = sum(len(known) for mine in active for known in mine)
    for one, mine in zip(loose.every, active, strict=True):
        mine[:] = [list(range(len(_any(group)))) for group in one.options]
    return sum(len(known) for mine in active for known in mine) > before


def _add_lowest(loose: Loose, active: list[list[list[int]]], weights: list[list[Floats]]) -> bool:
    added = False
    for mine, found in zip(active, weights, strict=True):
        for known, weight in zip(mine, found, strict=True):
            c = int(weight.argmin())
            if c not in known:
                known.append(c)
                added = True
    return added


# ---------------------------------------------------------------- the relaxation


def _multipliers(
    loose: Loose, active: Sequence[Sequence[Sequence[int]]], solver: str, fit: bool = False
) -> tuple[_Multipliers, float] | None:
    """The dual values of the relaxation with these choices, made to add up exactly, and its value
    in seconds; None where it has no solution. `fit`: of bytes above the limit, not of seconds; the
    value is then a share of the limit."""
    stages = loose.stages
    second = 1.0 / _scale_s(loose)
    unit = 1.0 / max(loose.limit_bytes, 1)
    taken = [
        _Taken(k, g, known)
        for k, groups in enumerate(active)
        for g, known in enumerate(groups)
        if known
    ]
    rows = list(_rows(loose, taken, second, unit))
    pace = 0.0 if fit else stages.per_stage * second
    seconds = np.concatenate(
        [
            np.zeros(0),
            *(
                pace * sum(costs[one.known, SECONDS] for costs in one.of(loose).values())
                for one in taken
            ),
        ]
    )
    names = ["slowest", "late", "over"]
    for i, in_flight in enumerate(stages.in_flight):
        names += [f"peak{i}", f"resident{i}", *(f"held{i}_{j}" for j in range(len(in_flight[0])))]
    objective = {"over": 1.0} if fit else {"slowest": stages.per_slowest, "late": 1.0}
    if not fit:
        rows.append(Row(("fits", 0, 0), np.zeros(0), {"over": -1.0}, 0.0))
    found = solved_duals(Linear(names, objective, seconds, rows), solver)
    if found is None:
        return None
    values, value = found
    values = {key: max(x, 0.0) for key, x in values.items()}
    exact = _exact(loose, values, unit / second, second, fit)
    base_s = stages.per_stage * float(sum(row[SECONDS] for row in loose.base))
    return exact, value if fit else value / second + base_s


@dataclass(frozen=True)
class _Taken:
    """Some choices of a group of an alike slot's options."""

    slot: int
    group: int
    known: Sequence[int]

    def of(self, loose: Loose) -> dict[int, Floats]:
        """The group's costs."""
        return loose.every[self.slot].options[self.group]


def _scale_s(loose: Loose) -> float:
    """Seconds of a typical step: the least ones may all be 0."""
    total = float(sum(row[SECONDS] + row[STEP] for row in loose.base))
    for one in loose.every:
        every = (costs for group in one.options for costs in group.values())
        total += one.count * max(
            float(costs[:, SECONDS : STEP + 1].sum(1).mean()) for costs in every
        )
    return total or 1.0


def _rows(loose: Loose, taken: Sequence[_Taken], second: float, unit: float) -> Iterator[Row]:
    stages, every = loose.stages, loose.every
    lengths = [len(one.known) for one in taken]

    def spread(values: Iterable[float]) -> Floats:
        return np.repeat(np.array(list(values), np.float64), lengths)

    for k, slot in enumerate(every):
        mine = spread(float(one.slot == k) for one in taken)
        yield Row(("take", k, 0), mine, {}, float(slot.count), equal=True)
    floor = second * loose.least_slowest_s
    for part, (least, most) in enumerate(loose.spread):
        inside = spread(float(loose.part_of(every[one.slot], one.group) == part) for one in taken)
        yield Row(("least", part, 0), inside, {}, float(least))
        yield Row(("most", part, 0), -inside, {}, -float(most))
    yield Row(("floor", 0, 0), np.zeros(0), {"slowest": 1.0}, floor)
    moments = sorted({0, *(slot.moment for slot in every)})
    shares = {
        moment: spread(
            every[one.slot].moment_share * (every[one.slot].moment == moment) for one in taken
        )
        for moment in moments
    }
    for i, in_flight in enumerate(stages.in_flight):
        costs = _stage_costs(loose, taken, i)
        base = loose.base[i]
        own_s = -second * costs[:, SECONDS]
        yield Row(("slowest", i, 0), own_s, {"slowest": 1.0}, second * base[SECONDS])
        yield Row(("late", i, 0), -second * costs[:, STEP], {"late": 1.0}, second * base[STEP])
        for moment in moments:
            rhs = unit * base[TRANSIENT] if moment == 0 else 0.0
            sizes = -unit * costs[:, TRANSIENT] * shares[moment]
            if moment == 0 or sizes.any():
                yield Row(("moment", i, moment), sizes, {f"peak{i}": 1.0}, rhs)
        others = {f"peak{i}": -1.0, f"resident{i}": -1.0, "over": 1.0}
        own = -unit * costs[:, RESIDENT]
        yield Row(("resident", i, 0), own, {f"resident{i}": 1.0}, unit * base[RESIDENT])
        for j in range(len(in_flight[0])):
            own = -unit * costs[:, HELD + j]
            yield Row(("held", i, j), own, {f"held{i}_{j}": 1.0}, unit * base[HELD + j])
        for k, counts in enumerate(in_flight):
            sums = {f"held{i}_{j}": -float(count) for j, count in enumerate(counts)}
            yield Row(("memory", i, k), np.zeros(0), {**others, **sums}, -1.0 - SLACK)


def _stage_costs(loose: Loose, taken: Sequence[_Taken], stage: int) -> Floats:
    """What each choice costs a stage."""
    none = np.zeros((1, HELD + len(loose.stages.in_flight[0][0])))
    found = [none[:0]]
    for one in taken:
        costs = one.of(loose).get(stage)
        found.append(none.repeat(len(one.known), 0) if costs is None else costs[one.known])
    return np.concatenate(found)


def _zero(stages: Stages) -> Floats:
    return np.zeros(HELD + len(stages.in_flight[0][0]))


def _exact(
    loose: Loose,
    values: dict[tuple[str, int, int], float],
    per_byte: float,
    per_second: float,
    fit: bool,
) -> _Multipliers:
    """Multipliers that add up as they must, from a solver's. `fit`: none of seconds."""
    stages, count = loose.stages, len(loose.stages.in_flight)
    pace = np.array([*(values["slowest", i, 0] for i in range(count)), values["floor", 0, 0]])
    pace = np.zeros(count + 1) if fit else _to_one(pace)
    memory = [
        np.array([values["memory", i, k] for k in range(len(counts))]) * per_byte
        for i, counts in enumerate(stages.in_flight)
    ]
    moments = np.zeros((count, 1 + max([one.moment for one in loose.every], default=0)))
    for (kind, i, k), value in values.items():
        if kind == "moment":
            moments[i, k] = value
    for i in range(count):
        total = moments[i].sum()
        if total > 0:
            moments[i] *= memory[i].sum() / total
        else:
            moments[i, 0] = memory[i].sum()
    step = np.array([values["late", i, 0] for i in range(count)])
    step = np.zeros(count) if fit else _to_one(step)
    parts = range(len(loose.spread))
    # These rows count slots: their multipliers are seconds.
    least, most = (
        np.array([values[kind, part, 0] / per_second for part in parts])
        for kind in ("least", "most")
    )
    every = 0.0 if fit else stages.per_stage
    return _Multipliers(
        every, pace[:-1], float(pace[-1]), step, tuple(memory), moments, least, most
    )


def _to_one(weights: Floats) -> Floats:
    total = weights.sum()
    return weights / total if total > 0 else np.full(len(weights), 1.0 / len(weights))


# ---------------------------------------------------------------- from a problem


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
    every = []
    for k, ((_, group), slots) in enumerate(groups.items()):
        rows = choice_rows(problem.slots[slots[0]].choices, stages)
        moment = moments.setdefault(group or f"alone {k}", len(moments))
        share = 1.0 if group else 1.0 / len(slots)
        every.append(Alike(len(slots), (rows,), moment, share))
    start = Share(0, problem.base_seconds, 0.0, problem.base_bytes)
    base = base_rows((start, *problem.base_shares), stages)
    return Loose(problem.limit_bytes, stages, tuple(every), base)


def choice_rows(choices: Sequence[Choice], stages: Stages) -> dict[int, Floats]:
    """By stage, a row of costs for each choice."""
    where = {share.stage for choice in choices for share in _shares(choice)}
    rows = {i: np.zeros((len(choices), len(_zero(stages)))) for i in sorted(where)}
    for c, choice in enumerate(choices):
        for share in _shares(choice):
            rows[share.stage][c] += _numbers(share, stages)
    return rows


def base_rows(shares: Iterable[Share], stages: Stages) -> tuple[Floats, ...]:
    """By stage, what is there whatever is chosen."""
    rows = tuple(_zero(stages) for _ in stages.in_flight)
    for share in shares:
        rows[share.stage][:] += _numbers(share, stages)
    return rows


def _shares(choice: Choice) -> tuple[Share, ...]:
    """A choice's shares; without stages the one that is the whole."""
    if choice.shares:
        return choice.shares
    sizes = (choice.resident_bytes, (0,), choice.transient_bytes)
    return (Share(0, choice.seconds, 0.0, *sizes),)


def _numbers(share: Share, stages: Stages) -> Floats:
    held = share.held_bytes or (0,) * len(stages.in_flight[0][0])
    sizes = (share.resident_bytes, share.transient_bytes, *held)
    return np.array([share.seconds, share.step_seconds, *sizes], np.float64)

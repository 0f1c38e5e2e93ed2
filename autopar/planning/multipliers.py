"""The multipliers of `relaxed`: dual values of the linear relaxation in which alike slots are one,
its columns generated. Those that the multipliers so far price lowest are added until the bound
stands (Dantzig and Wolfe 1960). Rounding in multipliers costs sharpness, never validity."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.planning.loose import (
    HELD,
    RESIDENT,
    SECONDS,
    STEP,
    TRANSIENT,
    Everywhere,
    Floats,
    Loose,
    Multipliers,
    any_of,
    coarser,
    priced,
    without_memory,
)
from autopar.planning.problem import Stages
from autopar.planning.relaxed_rows import Linear, Row, solved_duals

ROUNDS, CLOSE = 60, 1e-5
FIRST = (0.1, 1.0, 10.0)
"""What memory is worth in the first choices' prices, in mean seconds a byte."""
SLACK = 1e-6
"""Of the limit: no solver's tolerance may say that nothing fits where something does."""


@dataclass(frozen=True)
class Bound:
    """Of a problem `seconds` that no solution beats (inf where nothing fits), what every choice
    weighs, and the multipliers that say so."""

    seconds: float
    weights: list[list[Floats]]
    by: Multipliers


def bound(loose: Loose, solver: str) -> Bound:
    """The best bound."""
    exact, coarse = coarser(loose)
    best, over = _generated(coarse, solver)
    if over is not None and (exact is coarse or priced(exact, over)[0] > 0):
        none = [
            [np.zeros(0 if isinstance(one.options, Everywhere) else len(any_of(one.options[0])))]
            for one in loose.every
        ]
        return Bound(np.inf, none, over)
    found = [Bound(*priced(exact, best), best)]
    if exact is not coarse:
        plain = without_memory(exact)
        found.append(Bound(*priced(exact, plain), plain))
    return max(found, key=lambda one: one.seconds)


def bound_by(loose: Loose, found: Multipliers) -> float:
    """The bound by the multipliers of another problem of the same form: not the best, but at
    once."""
    return priced(loose, replace(found, every=loose.stages.per_stage))[0]


def over_bytes(loose: Loose, solver: str) -> float:
    """By how many bytes at least every choice is over the limit on some stage: the mean over rows
    of memory, weighed by the multipliers that say so best. 0 where some mixture fits."""
    loose = replace(loose, least_slowest_s=0.0)
    exact, coarse = coarser(loose)
    found = _made_fit(coarse, _start(coarse), solver)
    if found is None:
        return 0.0
    each_byte = sum(float(one.sum()) for one in found.memory)
    return max(0.0, priced(exact, found)[0] / each_byte) if each_byte > 0 else 0.0


def _generated(loose: Loose, solver: str) -> tuple[Multipliers, Multipliers | None]:
    """The best multipliers; where nothing fits, those of bytes that say so."""
    active = _start(loose)
    best = without_memory(loose)
    best_s = priced(loose, best)[0]
    for _ in range(ROUNDS):
        found = _multipliers(loose, active, solver)
        if found is None:
            over = _made_fit(loose, active, solver)
            if over is None:
                continue
            return best, over
        multipliers, value_s = found
        bound_s, weights = priced(loose, multipliers)
        if bound_s > best_s:
            best, best_s = multipliers, bound_s
        if bound_s >= value_s * (1 - CLOSE) or not _add_lowest(loose, active, weights):
            break
    return best, None


def _start(loose: Loose) -> list[list[list[int]]]:
    """The choices that are looked at first, by slot and group."""
    return [[_first(group, loose.stages) for group in one.options] for one in loose.every]


def _made_fit(loose: Loose, active: list[list[list[int]]], solver: str) -> Multipliers | None:
    """Adds choices until some mixture of them fits into memory, by the same column generation on
    the bytes above the limit; where none does, the multipliers that say so."""
    while True:
        found = _multipliers(loose, active, solver, fit=True)
        if found is None:
            # It isn't memory that forbids them.
            return None if _add_all(loose, active) else without_memory(loose)
        multipliers, over = found
        if over <= 0:
            return None
        _, weights = priced(loose, multipliers)
        if not _add_lowest(loose, active, weights):
            return multipliers


def _first(group: dict[int, Floats], stages: Stages) -> list[int]:
    """The fastest choice, the one that needs least memory, and those that are best between."""
    seconds = np.sum([costs[:, SECONDS] + costs[:, STEP] for costs in group.values()], axis=0)
    sizes = _sizes(group, stages)
    pace = float(seconds.mean() / max(sizes.mean(), 1.0))
    between = [int((seconds + pace * factor * sizes).argmin()) for factor in FIRST]
    return list(dict.fromkeys([int(seconds.argmin()), int(sizes.argmin()), *between]))


def _sizes(group: dict[int, Floats], stages: Stages) -> Floats:
    """Bytes on the stages of a group, with the most microbatches in flight."""
    total = np.zeros(len(any_of(group)))
    for i, costs in group.items():
        most = np.max(np.array(stages.in_flight[i], np.float64), axis=0)
        total += costs[:, RESIDENT] + costs[:, TRANSIENT] + costs[:, HELD:] @ most
    return total


def _add_all(loose: Loose, active: list[list[list[int]]]) -> bool:
    before = sum(len(known) for mine in active for known in mine)
    for one, mine in zip(loose.every, active, strict=True):
        mine[:] = [list(range(len(any_of(group)))) for group in one.options]
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


def _multipliers(
    loose: Loose, active: Sequence[Sequence[Sequence[int]]], solver: str, fit: bool = False
) -> tuple[Multipliers, float] | None:
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
    found = solved_duals(Linear(names, ("late",), objective, seconds, rows), solver)
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
    slots = np.repeat(np.array([one.slot for one in taken], np.int64), lengths)
    for k, slot in enumerate(every):
        mine = (slots == k).astype(np.float64)
        yield Row(("take", k, 0), mine, {}, float(slot.count), equal=True)
    floor = second * loose.least_slowest_s
    parts = [loose.part_of(every[one.slot], one.group) for one in taken] if loose.spread else []
    lies = np.repeat([-1 if part is None else part for part in parts], lengths[: len(parts)])
    for part, (least, most) in enumerate(loose.spread):
        inside = (lies == part).astype(np.float64)
        yield Row(("least", part, 0), inside, {}, float(least))
        yield Row(("most", part, 0), -inside, {}, -float(most))
    yield Row(("floor", 0, 0), np.zeros(0), {"slowest": 1.0}, floor)
    moments = sorted({0, *(slot.moment for slot in every)})
    share = np.array([slot.moment_share for slot in every], np.float64)[slots]
    group = np.array([slot.moment for slot in every], np.int64)[slots]
    shares = {moment: share * (group == moment) for moment in moments}
    for i, in_flight in enumerate(stages.in_flight):
        costs = _stage_costs(loose, taken, i)
        base = loose.base[i]
        own_s = -second * costs[:, SECONDS]
        yield Row(("slowest", i, 0), own_s, {"slowest": 1.0}, second * base[SECONDS])
        own_s = -second * (costs[:, STEP] + stages.spare * costs[:, SECONDS])
        late = second * (base[STEP] + stages.spare * base[SECONDS])
        yield Row(("late", i, 0), own_s, {"late": 1.0, "slowest": stages.spare}, late)
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


def _exact(
    loose: Loose,
    values: dict[tuple[str, int, int], float],
    per_byte: float,
    per_second: float,
    fit: bool,
) -> Multipliers:
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
    return Multipliers(every, pace[:-1], float(pace[-1]), step, tuple(memory), moments, least, most)


def _to_one(weights: Floats) -> Floats:
    total = weights.sum()
    return weights / total if total > 0 else np.full(len(weights), 1.0 / len(weights))

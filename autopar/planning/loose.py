"""A planning problem without what joins its slots, and what multipliers say of it (`relaxed`)."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.planning.columns import moment_bytes
from autopar.planning.problem import Stages

Floats = NDArray[np.float64]
SECONDS, STEP, RESIDENT, TRANSIENT, HELD = range(5)
"""Columns of costs; what is held has one for each chunk."""
BRIEF = HELD + 1
"""Of a layer wherever it lies: its transient bytes where nothing runs again."""


@dataclass(frozen=True, eq=False)
class Everywhere(Sequence[dict[int, Floats]]):
    """The options of a slot that may lie in some `parts`, in each of which it costs the same:
    `rows` of costs, one a choice, with what is held in one column. `freed`: by part of all, what
    has been freed when a layer's backward comes; `factor`: by part of all, how often transient
    bytes count. Made when asked for: a thousand layers in a hundred parts have a hundred
    thousand."""

    rows: Floats
    stages: int
    chunks: int
    freed: Floats
    factor: Floats
    parts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, option: Any) -> Any:
        return self._made[option]

    @cached_property
    def _made(self) -> tuple[dict[int, Floats], ...]:
        known: dict[tuple[int, float, float], Floats] = {}
        freed, factor = self.freed[self.parts].tolist(), self.factor[self.parts].tolist()
        keys = list(zip((self.parts // self.stages).tolist(), freed, factor, strict=True))
        for key in dict.fromkeys(keys):
            held = np.zeros((len(self.rows), self.chunks))
            held[:, key[0]] = self.rows[:, HELD]
            own = known[key] = np.hstack([self.rows[:, :HELD], held])
            own[:, TRANSIENT] = self._moments(*key[1:])
        stages = (self.parts % self.stages).tolist()
        return tuple({i: known[key]} for i, key in zip(stages, keys, strict=True))

    def _moments(self, freed: float, factor: float) -> Floats:
        return factor * moments(self.rows, freed)

    def weighed(self, plain: Sequence[Floats], by_stage: Floats) -> Floats:
        """What each choice weighs in each part, by the stages' weights and those of transient
        bytes."""
        parts, stages = self.parts, self.parts % self.stages
        by_part = np.array(plain)[stages]
        counted = np.empty((len(parts), HELD + 1))
        counted[:, :HELD] = by_part[:, :HELD]
        counted[:, TRANSIENT] = by_stage[stages]
        counted[:, HELD] = by_part[np.arange(len(parts)), HELD + parts // self.stages]
        found: Floats = counted @ self.rows[:, :BRIEF].T
        freed, factor = self.freed[parts], self.factor[parts]
        for option in np.flatnonzero((freed > 0) | (factor != 1.0)):
            own = self._moments(freed[option], factor[option])
            found[option] += counted[option, TRANSIENT] * (own - self.rows[:, TRANSIENT])
        return found


@dataclass(frozen=True)
class Alike:
    """So many slots that the relaxation doesn't tell apart. `options`: their choices, in groups
    that cost the same stages; by stage, a row of costs for each choice. `moment`: the row of
    transient bytes that they are counted in, each by `moment_share`."""

    count: int
    options: Sequence[dict[int, Floats]]
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

    @property
    def form(self) -> Hashable:
        """What problems have in common for which the same multipliers may be tried."""
        return _form(self.stages.in_flight, _moments(self.every), len(self.spread))

    def part_of(self, one: Alike, option: int) -> int | None:
        """The part that an option lies in, of a slot that may lie in several."""
        return int(one.options.parts[option]) if isinstance(one.options, Everywhere) else None


@dataclass(frozen=True)
class Multipliers:
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

    @property
    def form(self) -> Hashable:
        """That of the problems for which they may be tried."""
        return _form(self.memory, self.moments.shape[1], len(self.least))


def _form(in_flight: Sequence[Sequence[object] | Floats], moments: int, parts: int) -> Hashable:
    return tuple(map(len, in_flight)), moments, parts


def _moments(every: Sequence[Alike]) -> int:
    """How many rows of transient bytes a stage has."""
    return 1 + max([one.moment for one in every], default=0)


def moments(rows: Floats, freed_bytes: float) -> Floats:
    """Of layers' rows, what each needs for a moment where so much has been freed."""
    return moment_bytes(rows, freed_bytes, TRANSIENT, BRIEF)


def without_memory(loose: Loose) -> Multipliers:
    """Multipliers by which memory doesn't count and every stage is as slow as the slowest."""
    count = len(loose.stages.in_flight)
    even, parts = np.full(count, 1.0 / count), np.zeros(len(loose.spread))
    memory = tuple(np.zeros(len(counts)) for counts in loose.stages.in_flight)
    moments = np.zeros((count, _moments(loose.every)))
    return Multipliers(loose.stages.per_stage, even, 0.0, even, memory, moments, parts, parts)


def by_slowest(loose: Loose) -> Multipliers:
    """The same, with `least_slowest_s` for the slowest."""
    even = without_memory(loose)
    return replace(even, seconds=np.zeros_like(even.seconds), floor=1.0)


def priced(loose: Loose, found: Multipliers) -> tuple[float, list[list[Floats]]]:
    """The bound by some multipliers, and what each choice weighs."""
    stages = loose.stages
    total = (stages.per_slowest - stages.spare) * found.floor * loose.least_slowest_s
    plain = [_weights(found, loose.stages, i) for i in range(len(loose.base))]
    for i, row in enumerate(loose.base):
        total += float(row @ _counted(plain[i], found.moments[i, 0]))
        total -= float(found.memory[i].sum()) * loose.limit_bytes
    for part, (least, most) in enumerate(loose.spread):
        total += float(found.least[part]) * least - float(found.most[part]) * most
    weights = []
    for one in loose.every:
        mine: list[Floats] = []
        if isinstance(one.options, Everywhere):
            own = (found.most - found.least)[one.options.parts]
            by_stage = found.moments[:, one.moment] * one.moment_share
            mine = list(one.options.weighed(plain, by_stage) + own[:, None])
            weights.append(mine)
            total += one.count * float(np.min(mine))
            continue
        for g, group in enumerate(one.options):
            rows = [
                costs @ _counted(plain[i], found.moments[i, one.moment] * one.moment_share)
                for i, costs in group.items()
            ]
            lies = loose.part_of(one, g)
            here = 0.0 if lies is None else float(found.most[lies] - found.least[lies])
            mine.append(sum(rows[1:], rows[0]) + here)
        weights.append(mine)
        total += one.count * min(float(x.min()) for x in mine)
    return total, weights


def _weights(found: Multipliers, stages: Stages, i: int) -> Floats:
    """What a stage's costs count for, but for transient bytes."""
    counts = np.array(stages.in_flight[i], np.float64)
    seconds = (stages.per_slowest - stages.spare) * found.seconds[i] + found.every
    seconds += stages.spare * found.step[i]
    return np.array([seconds, found.step[i], found.memory[i].sum(), 0.0, *found.memory[i] @ counts])


def _counted(weights: Floats, moment: float) -> Floats:
    counted = weights.copy()
    counted[TRANSIENT] = moment
    return counted


# ---------------------------------------------------------------- of many slots a few

FEW, BINS, OPTIONS = 24, 16, 512
"""Up to so many kinds are left as they are; else there are so many bins, or so few that they have
so many options, but two."""


def coarser(loose: Loose) -> tuple[Loose, Loose]:
    """Of a problem with many kinds of slots: the same with fewer rows of transient bytes, and one
    in which a few kinds, each the median of some that take about as long, stand for all.

    The multipliers of the second are good ones for the first, whose bound they give. A largest
    transient is no less than the mean of those that share a row, so rows may be shared.
    """
    uses = Counter(one.moment for one in loose.every)
    alone = [k for k, one in enumerate(loose.every) if one.moment > 0 and uses[one.moment] == 1]
    if len(alone) <= FEW:
        return loose, loose
    classes: dict[Hashable, list[int]] = {}
    for k in alone:
        options = loose.every[k].options
        key: Hashable = tuple(map(tuple, options))
        if isinstance(options, Everywhere):
            key = options.parts.tobytes()
        classes.setdefault(key, []).append(k)
    every, few = list(loose.every), [one for one in loose.every if uses[one.moment] > 1]
    few += [one for one in loose.every if one.moment == 0 and uses[0] == 1]
    for members in classes.values():
        members.sort(key=lambda k: _fastest_s(loose.every[k]))
        bins = max(2, min(BINS, OPTIONS // len(loose.every[members[0]].options)))
        for ends in np.array_split(np.array(members), min(bins, len(members))):
            moment = loose.every[ends[0]].moment
            count = sum(loose.every[k].count for k in ends)
            for k in ends:
                every[k] = replace(every[k], moment=moment, moment_share=1.0 / count)
            few.append(replace(every[ends[len(ends) // 2]], count=count))
    return replace(loose, every=tuple(every)), replace(loose, every=tuple(few))


def _fastest_s(one: Alike) -> float:
    if isinstance(one.options, Everywhere):
        return float(one.options.rows[:, SECONDS].min())
    return float(any_of(one.options[0])[:, SECONDS].min())


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


def zeros(stages: Stages) -> Floats:
    """A row of costs."""
    return np.zeros(HELD + len(stages.in_flight[0][0]))


def any_of(group: dict[int, Floats]) -> Floats:
    """The costs on one of the stages of a group."""
    return next(iter(group.values()))

"""A bound over all cuts in which layers don't divide and do one thing each (`whole_layers`): other
bounds let a stage mix choices.

With E for what comes late (`Stages`), late + spare · slowest, stages are coupled only by a largest
and a sum: a step is (per_slowest − spare) · slowest + per_stage · Σ τ + E. For each E a stage has
with so many layers a least τ, by multipliers y of its own late part; which stage has how many is
found by dynamic programming, and the bound is the least over E, in steps.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.planning.anywhere import Anywhere
from autopar.planning.deadline import NEVER, Deadline
from autopar.planning.loose import SECONDS, STEP
from autopar.planning.rooms import Room
from autopar.planning.shared_out import Layers, Values, laid, split
from autopar.planning.whole_layers import Group, Memory

Floats = NDArray[np.float64]
SHARES = (0.0, 0.5, 1.0, 2.0)
"""Multipliers of a stage's late part that are tried, in that of one where all stages are equal."""
STEPS = 100
"""So many values of E are told apart."""
FEWER, MORE = 4, (2, 1)
"""Layers less and more than the fullest stage of an even cut, of which the least is worked out:
where a stage has one part, and several."""
LESS = (1.0, 0.998, 0.99)
"""Of a stage's memory, so much is given to the layers of a program that may be the best."""
KINDS = 2
"""With so many kinds of layers at most."""


@dataclass(frozen=True)
class Whole:
    """No cut beats `seconds`. `layers`: by stage, how many the best has of each kind; `columns`: by
    kind, what these layers do, in their memory or a little less."""

    seconds: float
    layers: tuple[Layers, ...] = ()
    columns: tuple[tuple[int, ...], ...] = ()


def whole_bound(anywhere: Anywhere, worth_s: float, deadline: Deadline = NEVER) -> Whole | None:
    """The bound; `worth_s` where it is above that; None where there are too many kinds, or too
    little time."""
    if len(anywhere.counts) > KINDS or not np.isfinite(worth_s):
        return None
    tables, every = _Tables(anywhere), []
    for stage in range(tables.stages):
        if deadline.is_over:
            return None
        every.append(tables.values(stage))
    found = _least_over_late(tables, every, worth_s)
    return replace(found, columns=tables.columns(found.layers)) if found.layers else found


@dataclass(frozen=True, eq=False)
class _Tables:
    """What stages take at least. A stage's layers are told by how many it has of each kind."""

    anywhere: Anywhere
    rooms: dict[float, list[Room]] = field(default_factory=dict)
    memories: dict[float, Memory] = field(default_factory=dict)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """How many layers there are of each kind."""
        return tuple(self.anywhere.counts.values())

    @cached_property
    def rows(self) -> list[Floats]:
        """What layers of each kind may do."""
        return [self.anywhere.rows[key] for key in self.anywhere.counts]

    @property
    def stages(self) -> int:
        """How many there are."""
        return self.anywhere.schedule.brief.stages

    @cached_property
    def multipliers(self) -> tuple[float, ...]:
        """Those that are tried of a stage's late part."""
        stages = self.anywhere.stages
        even = 1.0 / (stages.per_slowest + stages.per_stage * self.stages)
        return tuple(share * even for share in SHARES)

    @cached_property
    def counts(self) -> range:
        """How many layers of a stage are looked at; more take no less than the last of these."""
        top, more = self._top, MORE[self.anywhere.schedule.brief.chunks > 1]
        return range(max(1, top - FEWER), top + more + 1)

    def values(self, stage: int) -> dict[Layers, Floats]:
        """By a stage's layers, by multiplier y, the least of τ + y · late part."""
        found, fewest = {}, self._fewest
        for layers in itertools.product(*(range(total + 1) for total in self.totals)):
            if fewest <= sum(layers) <= self.counts[-1] and self._can_have(stage, layers):
                # Of few it is enough that they take no less than none.
                some = layers if sum(layers) in self.counts else None
                own = np.array([self._value(stage, some, y) for y in self.multipliers])
                if np.isfinite(own[0]):
                    found[layers] = own
        return found

    @cached_property
    def no_later_s(self) -> float:
        """What the late part of some stage takes at least, with the layers that it may have."""
        spare, least_s = self.anywhere.stages.spare, []
        each = [float((rows[:, SECONDS] * spare + rows[:, STEP]).min()) for rows in self.rows]
        fewest = self._fewest
        for own_s in self.anywhere.own_s(spare, 1.0):
            counts = (fewest, sum(self.totals))
            least_s.append(own_s + min(n * one for n in counts for one in each))
        return max(least_s)

    def _chunks_of(self, stage: int, kind: int) -> list[int]:
        parts = self.anywhere.may_lie(kind)
        return [int(part) // self.stages for part in parts if part % self.stages == stage]

    def _can_have(self, stage: int, layers: Layers) -> bool:
        return all(n == 0 or self._chunks_of(stage, kind) for kind, n in enumerate(layers))

    def _value(self, stage: int, layers: Layers | None, y: float) -> float:
        if y not in self.rooms:
            self.rooms[y] = self.anywhere.rooms(1.0 + y * self.anywhere.stages.spare, y)
            most = max(room.free_bytes for room in self.rooms[y])
            self.memories[y] = Memory(most)
        room, memory = self.rooms[y][stage], self.memories[y]
        own_s = room.least_beside_s
        if layers is None:
            return own_s
        ways = self._ways(stage, layers, room, y)
        return own_s + min((memory.least_s(way, room.left_bytes) for way in ways), default=np.inf)

    def columns(self, layers: Sequence[Layers]) -> tuple[tuple[int, ...], ...]:
        """What layers do on the stages that have so many of each kind."""
        found: list[set[int]] = [set() for _ in self.totals]
        for (stage, own), y in itertools.product(enumerate(layers), self.multipliers):
            room, memory = self.rooms[y][stage], self.memories[y]
            for way, share in itertools.product(self._ways(stage, own, room, y), LESS):
                chosen = memory.choices(way, share * room.left_bytes)
                for kind, columns in chosen.items():
                    found[kind] |= columns
        return tuple(tuple(sorted(columns)) for columns in found)

    def _ways(
        self, stage: int, layers: Layers, room: Room, y: float
    ) -> Iterator[tuple[Group, ...]]:
        """The ways to lay so many layers into a stage's parts, those that need the same as one."""
        numbers = []
        for kind, rows in enumerate(self.rows):
            seconds = rows[:, SECONDS] * (1.0 + y * self.anywhere.stages.spare) + y * rows[:, STEP]
            # What one needs for a moment is no less than the mean of more.
            sizes = room.layer_bytes(rows, max(sum(layers), self._top - 1))
            numbers.append([self.memories[y].group(kind, one, seconds) for one in sizes])
        allowed = [self._chunks_of(stage, kind) for kind in range(len(layers))]
        places = Counter(  # by the numbers of kinds that may lie there
            tuple(
                own[chunk] if chunk in may else None
                for own, may in zip(numbers, allowed, strict=True)
            )
            for chunk in range(len(room.in_flight))
        )
        for way in laid(tuple(places.items()), layers, *self._of_part):
            counts: dict[int, int] = {}
            for (place, _), own in zip(places.items(), way, strict=True):
                for number, n in zip(place, own, strict=True):
                    if n and number is not None:
                        counts[number] = counts.get(number, 0) + n
            # What most layers are comes first: stages share it.
            yield tuple(sorted(counts.items(), key=lambda one: (-one[1], one[0])))

    @cached_property
    def sum_s(self) -> float:
        """What all stages take together, at least."""
        own = self.anywhere.own_s(1.0, 0.0)
        each = (float(rows[:, SECONDS].min()) for rows in self.rows)
        return sum(own) + sum(n * one for n, one in zip(self.totals, each, strict=True))

    @property
    def _top(self) -> int:
        """Layers of the fullest stage of an even cut."""
        return -(-sum(self.totals) // self.stages)

    @property
    def _fewest(self) -> int:
        return self._of_part[0] * self.anywhere.schedule.brief.chunks

    @property
    def _of_part(self) -> tuple[int, int]:
        return self.anywhere.spread[0]


def _least_over_late(
    tables: _Tables, every: Sequence[Mapping[Layers, Floats]], worth_s: float
) -> Whole:
    """The least over E, in steps of which each counts for its start."""
    stages, ys = tables.anywhere.stages, np.array(tables.multipliers)
    most = tables.counts[-1]

    def of(late_s: float) -> Values:
        return [{n: float(np.max(own - ys * late_s)) for n, own in row.items()} for row in every]

    def least(values: Values) -> Whole:
        found = Whole(*split(values, tables.totals, pace, stages.per_stage))
        # A stage with more layers than were looked at takes no less than one with the most.
        full = [v for row in values for n, v in row.items() if sum(n) == most]
        crowded_s = pace * min(full, default=np.inf) + stages.per_stage * tables.sum_s
        return min(found, Whole(crowded_s), key=lambda one: one.seconds)

    pace, best = stages.per_slowest - stages.spare, Whole(worth_s)
    start_s = tables.no_later_s
    end_s = worth_s - least([{n: float(own[0]) for n, own in row.items()} for row in every]).seconds
    if end_s <= start_s:
        return best
    for low_s, high_s in itertools.pairwise(np.linspace(start_s, end_s, STEPS + 1).tolist()):
        found = least(of(high_s))
        if found.seconds + low_s < best.seconds:
            best = Whole(found.seconds + low_s, found.layers)
    return best

"""A bound over all cuts in which layers don't divide and do one thing each (`whole_layers`): other
bounds let a stage mix choices.

With E for what comes late (`Stages`), late + spare · slowest, stages are coupled only by a largest
and a sum: a step is (per_slowest − spare) · slowest + per_stage · Σ τ + E. For each E a stage has
with so many layers a least τ, by multipliers y of its own late part; which stage has how many is
found by dynamic programming, and the bound is the least over E, in ranges.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.planning.anywhere import Anywhere
from autopar.planning.deadline import NEVER, Deadline
from autopar.planning.loose import SECONDS, STEP, moments
from autopar.planning.rooms import Room
from autopar.planning.shared_out import Layers, Order, Values, laid, split
from autopar.planning.whole_layers import Group, Memory

Floats = NDArray[np.float64]
SHARES = (0.0, 0.5, 1.0, 2.0)
"""Multipliers of a stage's late part that are tried, in that of one where all stages are equal."""
FINE = 1 / 4_096
"""So finely values of E are told apart, of all that come into question."""
NARROW, NARROWER = 1 / 128, 1 / 1_024
"""And what layers need for a moment, of a stage's memory: for a bound, and for what they do."""
FEWER, MORE = 4, (2, 1)
"""Layers less and more than the fullest stage of an even cut, of which the least is worked out:
where a stage has one part, and several."""
LESS = (1.0, 0.9995, 0.999, 0.998, 0.995, 0.99)
"""Of a stage's memory, so much is given to the layers of a program that may be the best."""
KINDS = 2
"""With so many kinds of layers at most."""


@dataclass(frozen=True)
class Whole:
    """No cut beats `seconds`. `layers`: by stage, how many the best has of each kind; `columns`: by
    stage and kind, what these layers do, in their memory or a little less."""

    seconds: float
    layers: tuple[Layers, ...] = ()
    columns: tuple[tuple[tuple[int, ...], ...], ...] = ()


def whole_bound(anywhere: Anywhere, worth_s: float, deadline: Deadline = NEVER) -> Whole | None:
    """The bound; `worth_s` where it is above that; None where there are too many kinds, or too
    little time."""
    if len(anywhere.counts) > KINDS or not np.isfinite(worth_s):
        return None
    tables, every = _Tables(anywhere), []
    for stage in range(tables.stages):
        if deadline.is_over:
            return None
        every.append(tables.values(stage, worth_s))
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
    def order(self) -> Order:
        """The layers' order."""
        brief = self.anywhere.schedule.brief
        return Order(tuple(self.anywhere.kind_numbers), brief.stages, brief.chunks, *self._of_part)

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

    def values(self, stage: int, worth_s: float) -> dict[Layers, Floats]:
        """By a stage's layers, by multiplier y, the least of τ + y · late part; without those that
        are in no step below `worth_s`."""
        found, fewest, stages = {}, self._fewest, self.anywhere.stages
        others_s = stages.per_stage * self.sum_s + self.no_later_s
        pace = stages.per_slowest - stages.spare
        slowest_s = (worth_s - others_s) / pace if pace > 0 else np.inf
        for layers in itertools.product(*(range(total + 1) for total in self.totals)):
            if fewest <= sum(layers) <= self.counts[-1] and self._can_have(stage, layers):
                # Of few it is enough that they take no less than none.
                some = layers if sum(layers) in self.counts else None
                none, *others = self.multipliers
                alone_s = self._value(stage, some, none, slowest_s)
                if alone_s < slowest_s:
                    own = (self._value(stage, some, y) for y in others)
                    found[layers] = np.array([alone_s, *own])
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

    @cached_property
    def _parts_of(self) -> list[list[int]]:
        """By kind, the parts in which some layer of it may lie."""
        return [self.anywhere.may_lie(kind).tolist() for kind in range(len(self.totals))]

    def _chunks_of(self, stage: int, kind: int) -> list[int]:
        parts = self._parts_of[kind]
        return [part // self.stages for part in parts if part % self.stages == stage]

    def _can_have(self, stage: int, layers: Layers) -> bool:
        return all(n == 0 or self._chunks_of(stage, kind) for kind, n in enumerate(layers))

    def _value(
        self, stage: int, layers: Layers | None, y: float, enough_s: float = np.inf
    ) -> float:
        if y not in self.rooms:
            self.rooms[y] = self.anywhere.rooms(1.0 + y * self.anywhere.stages.spare, y)
            most = max(room.free_bytes for room in self.rooms[y])
            self.memories[y] = Memory(most)
        own_s = self.rooms[y][stage].least_beside_s
        if layers is None:
            return own_s
        return own_s + self._best(stage, layers, y, enough_s - own_s)[0]

    def columns(self, layers: Sequence[Layers]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By stage and kind, what layers do on stages that have so many of each kind."""
        return tuple(self._columns(stage, own) for stage, own in enumerate(layers))

    def _columns(self, stage: int, layers: Layers) -> tuple[tuple[int, ...], ...]:
        """With them those that need least, as a stage may have less room than this search knows."""
        sizes = [
            self.rooms[0.0][stage].layer_bytes(rows, max(sum(layers), 1)) for rows in self.rows
        ]
        found = [set(one.argmin(axis=1).tolist()) for one in sizes]
        for y in self.multipliers:
            room, memory = self.rooms[y][stage], self.memories[y]
            _, moment, way = self._best(stage, layers, y, narrow=NARROWER)
            if way is None:  # they don't fit
                continue
            for share in LESS:
                chosen = memory.choices(way, share * room.left_bytes - moment)
                for kind, columns in chosen.items():
                    found[kind] |= columns
        return tuple(tuple(sorted(columns)) for columns in found)

    def _best(
        self,
        stage: int,
        layers: Layers,
        y: float,
        enough_s: float = np.inf,
        narrow: float = NARROW,
    ) -> tuple[float, float, tuple[Group, ...] | None]:
        """Seconds of so many layers of a stage at least; what one of them then needs for a moment
        at least, and how they lie. What the layer needs that needs most is told apart where it
        matters: the range with the least seconds is halved until it is narrow or has `enough_s`."""
        room = self.rooms[y][stage]
        low, high = self._moments(room)
        apart = narrow * room.left_bytes
        start = self._within(stage, layers, y, low, high)
        queue = [(start[0], low, high, start[1])]
        while queue[0][0] < enough_s and queue[0][2] - queue[0][1] > apart:
            least_s, low, high, _ = heapq.heappop(queue)
            middle = (low + high) / 2
            for ends in ((low, middle), (middle, high)):
                own_s, way = self._within(stage, layers, y, *ends)
                heapq.heappush(queue, (max(own_s, least_s), *ends, way))
        least_s, low, _, way = queue[0]
        return least_s, low, way

    def _moments(self, room: Room) -> tuple[float, float]:
        """The least and the most that layers need for a moment on a stage where that counts."""
        if not room.counts_moment:
            return 0.0, 0.0
        every = np.concatenate([moments(rows, room.least_freed) for rows in self.rows])
        return float(every.min()), float(every.max())

    def _within(
        self, stage: int, layers: Layers, y: float, low: float, high: float
    ) -> tuple[float, tuple[Group, ...] | None]:
        """The least seconds where one layer needs at least `low` for a moment, and none more than
        `high`, and how layers then lie."""
        room, memory = self.rooms[y][stage], self.memories[y]
        best: tuple[float, tuple[Group, ...] | None] = (np.inf, None)
        for way in self._ways(stage, layers, y, low, high):
            least_s = memory.least_s(way, room.left_bytes - low)
            best = (least_s, way) if least_s < best[0] else best
        return best

    def _ways(
        self, stage: int, layers: Layers, y: float, low: float, high: float
    ) -> Iterator[tuple[Group, ...]]:
        """The ways to lay so many layers into a stage's parts, those that need the same as one."""
        room, numbers = self.rooms[y][stage], []
        for kind, rows in enumerate(self.rows):
            seconds = rows[:, SECONDS] * (1.0 + y * self.anywhere.stages.spare) + y * rows[:, STEP]
            # What one needs beyond the least is no less than the mean of more.
            sizes = room.layer_bytes(rows, max(sum(layers), self._top - 1), low, high)
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
    """The least over E, in ranges of which each counts for its start."""
    stages, ys = tables.anywhere.stages, np.array(tables.multipliers)
    most = tables.counts[-1]

    def of(late_s: float) -> Values:
        return [{n: float(np.max(own - ys * late_s)) for n, own in row.items()} for row in every]

    def least(values: Values) -> Whole:
        found = Whole(*split(values, tables.order, pace, stages.per_stage))
        # A stage with more layers than were looked at takes no less than one with the most.
        full = [v for row in values for n, v in row.items() if sum(n) == most]
        crowded_s = pace * min(full, default=np.inf) + stages.per_stage * tables.sum_s
        return min(found, Whole(crowded_s), key=lambda one: one.seconds)

    pace = stages.per_slowest - stages.spare
    start_s = tables.no_later_s
    end_s = worth_s - least([{n: float(own[0]) for n, own in row.items()} for row in every]).seconds
    # By what no step is below whose E is in a range: the least is halved until it is narrow.
    queue = [(-np.inf, start_s, end_s, Whole(worth_s))] if end_s > start_s else []
    while queue and queue[0][0] < worth_s:
        known_s, low_s, high_s, whole = heapq.heappop(queue)
        if high_s - low_s <= FINE * (end_s - start_s):
            return replace(whole, seconds=known_s)
        middle_s = (low_s + high_s) / 2
        for ends in ((low_s, middle_s), (middle_s, high_s)):
            found = least(of(ends[1]))
            bound_s = max(known_s, found.seconds + ends[0])
            heapq.heappush(queue, (bound_s, *ends, found))
    return Whole(worth_s)

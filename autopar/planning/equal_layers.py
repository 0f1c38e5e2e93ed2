"""How long the slowest stage takes at least where each has several parts, as if each layer could do
what any other can."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.planning.loose import SECONDS
from autopar.planning.rooms import COARSE, FINE, Room, more_of, multipliers_of

Floats = NDArray[np.float64]
MOST = 2**21
"""So many numbers are worked out at once."""


def slowest_of_equal(rows: Floats, count: int, rooms: Sequence[Room]) -> float:
    """Seconds that it takes at least; inf where they don't fit. Each further layer goes where the
    stage would be fastest with it: with one layer less no stage takes longer."""
    chunks = len(rooms[0].in_flight)
    equal = Equal(rows, rooms, count // (chunks * len(rooms)))
    least = equal.fewest * chunks
    further = count - least * len(rooms)
    if not further:
        return float(equal.seconds(0).max())
    queue = [(float(after), i, 1) for i, after in enumerate(equal.seconds(1))]
    heapq.heapify(queue)
    slowest = 0.0
    for _ in range(further):
        after, i, more = heapq.heappop(queue)
        slowest = max(slowest, after)
        if slowest == np.inf:
            break
        if more < chunks:
            heapq.heappush(queue, (float(equal.seconds(more + 1)[i]), i, more + 1))
    return slowest


@dataclass(frozen=True, eq=False)
class Equal:
    """Stages whose layers may all do the same, each of whose parts has `fewest` or one more."""

    rows: Floats
    rooms: Sequence[Room]
    fewest: int
    known: dict[int, Floats] = field(default_factory=dict)

    @cached_property
    def _multipliers(self) -> Floats:
        """[stage, multiplier]: seconds a byte."""
        return np.array([multipliers_of(self.rows, room) for room in self.rooms])

    @cached_property
    def _beside_s(self) -> Floats:
        """[stage, multiplier]: what a stage takes at least beside layers, less what is free."""
        every = zip(self.rooms, self._multipliers, strict=True)
        return np.array([room.beside_s(multipliers) for room, multipliers in every])

    def seconds(self, more: int) -> Floats:
        """[stage]: what each takes at least if so many of its parts have one layer more; inf where
        they don't fit."""
        if more not in self.known:
            self.known[more] = np.concatenate([*self._seconds(more)])
        return self.known[more]

    def _seconds(self, more: int) -> Iterator[Floats]:
        chunks = len(self.rooms[0].in_flight)
        at_once = max(1, MOST // (2 * COARSE * chunks * len(self.rows)))
        for first in range(0, len(self.rooms), at_once):
            yield self._of_some(slice(first, first + at_once), more)

    def _of_some(self, some: slice, more: int) -> Floats:
        rooms = self.rooms[some]
        layers = self.fewest * len(rooms[0].in_flight) + more
        sizes = np.array([room.layer_bytes(self.rows, layers) for room in rooms])
        multipliers, beside_s = self._multipliers[some], self._beside_s[some]

        def least_s(at: NDArray[np.int64]) -> Floats:
            worth = np.take_along_axis(multipliers, at, axis=1)[:, :, None, None]
            weights = self.rows[:, SECONDS] + worth * sizes[:, None]
            each = more_of(self.fewest, weights.min(axis=-1))[:, :, more]
            found: Floats = each + np.take_along_axis(beside_s, at, axis=1)
            return found

        # A sum of least values is concave in multipliers: the best lies beside the best of a few.
        coarse = np.tile(np.arange(0, len(FINE), COARSE), (len(rooms), 1))
        best = least_s(coarse).argmax(axis=1) * COARSE
        near = best[:, None] + np.arange(-COARSE, COARSE + 1)
        seconds = least_s(np.clip(near, 0, len(FINE) - 1)).max(axis=1)
        needed = more_of(self.fewest, sizes.min(axis=-1))[:, more]
        left = np.array([room.left_bytes for room in rooms])
        return np.where(needed > left, np.inf, seconds)

"""A stage as a search sees it that asks how long the slowest takes at least: what is free, and what
its layers' choices come to there by what memory is worth."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.planning.loose import HELD, RESIDENT, SECONDS, TRANSIENT, moments
from autopar.planning.pareto import pareto

Floats = NDArray[np.float64]
FINE: tuple[float, ...] = tuple(2.0 ** (k / 8) for k in range(-64, 65))
"""Multipliers of memory that are tried for one stage as a whole, in mean seconds a byte."""
FACTORS = FINE[::8]
"""Those that are tried where each takes long."""
COARSE = 12
"""Of these, every so manieth is tried first."""


@dataclass(frozen=True, eq=False)
class Room:
    """A stage: seconds of a microbatch that it takes whatever is chosen, bytes that are then free,
    by part how many microbatches' activations it holds, and choices beside layers: the skeleton's
    regions' on it, with what is held by part. `counts_moment`: whether what its layers need for a
    moment is to be found in these bytes too, for one of them, which is no less than their mean;
    `freed`: by part, the bytes that are gone by then (() for none)."""

    own_s: float
    free_bytes: float
    in_flight: Floats
    skeleton: Sequence[Floats] = ()
    counts_moment: bool = False
    freed: Sequence[float] = ()

    def beside_s(self, multipliers: Floats) -> Floats:
        """By multiplier of memory (seconds a byte), what it takes at least beside layers, less what
        is free."""
        total: Floats = self.own_s - multipliers * self.free_bytes
        for costs in self.skeleton:
            total = total + (costs[:, SECONDS] + multipliers[:, None] * self._sizes(costs)).min(-1)
        return total

    @property
    def least_beside_s(self) -> float:
        """What it takes at least beside layers, whatever memory is worth."""
        return float(self.beside_s(np.zeros(1))[0])

    @property
    def left_bytes(self) -> float:
        """What is free for layers at most."""
        return self.free_bytes - sum(float(self._sizes(costs).min()) for costs in self.skeleton)

    def layer_bytes(
        self, rows: Floats, layers: int, low: float = 0.0, high: float = np.inf
    ) -> Floats:
        """[part, row]: what a layer's choices need on a stage with so many layers, spread evenly
        over its parts. For a moment those of the parts count that find least freed: what they need
        beyond `low`, where none needs more than `high` (inf for choices that do)."""
        sizes: Floats = rows[:, RESIDENT] + rows[:, HELD] * self.in_flight[:, None]
        if self.counts_moment:
            freed = np.array(self.freed or np.zeros(len(sizes)))
            counted = freed == self.least_freed
            among = min(layers, int(counted.sum()) * -(-layers // len(sizes)))
            needed = moments(rows, self.least_freed)
            beyond = np.where(needed <= high, np.maximum(needed - low, 0.0), np.inf)
            sizes = sizes + np.where(counted[:, None], beyond, 0.0) / max(among, 1)
        return sizes

    @property
    def least_freed(self) -> float:
        """The bytes that are gone by then in the part where these are least."""
        return float(min(self.freed, default=0.0))

    def part_bytes(self, rows: Floats, layers: int, part: int) -> Floats:
        """[row]: the same in a part that has so many by itself."""
        moment = self.moments(rows, part) / max(layers, 1) if self.counts_moment else 0.0
        sizes: Floats = rows[:, RESIDENT] + moment + rows[:, HELD] * self.in_flight[part]
        return sizes

    def moments(self, rows: Floats, part: int) -> Floats:
        """What each of a layer's choices needs for a moment in a part."""
        return moments(rows, self.freed[part] if self.freed else 0.0)

    def _sizes(self, costs: Floats) -> Floats:
        sizes: Floats = costs[:, RESIDENT] + costs[:, HELD:] @ self.in_flight
        return sizes


def room_of(
    own_s: float,
    free_bytes: float,
    in_flight: Floats,
    skeleton: Sequence[Floats],
    typical_bytes: float,
    freed: Sequence[float] = (),
) -> Room:
    """A stage whose layers need about so many bytes for a moment: theirs or the skeleton's count,
    whichever are likely to be more."""
    if sum(float(costs[:, TRANSIENT].min()) for costs in skeleton) > typical_bytes:
        return Room(own_s, free_bytes, in_flight, [with_moment(costs) for costs in skeleton])
    counts = typical_bytes > 0.0
    return Room(own_s, free_bytes, in_flight, skeleton, counts, freed)


def with_moment(costs: Floats) -> Floats:
    """The rows with transient bytes among the resident ones."""
    rows = costs.copy()
    rows[:, RESIDENT] += rows[:, TRANSIENT]
    return rows


def multipliers_of(rows: Floats, room: Room) -> Floats:
    """Seconds a byte that are tried as multipliers of a stage's memory."""
    sizes = room.layer_bytes(rows, 1)
    pace = float(rows[:, SECONDS].mean() / max(sizes.mean(), 1.0))
    return np.array([0.0, *(pace * factor for factor in FINE)])


def least_layer(
    rows: Floats, room: Room, multipliers: Floats, layers: int
) -> tuple[Floats, Floats]:
    """[multiplier, part]: the least seconds of a layer, with so much for each byte, on a stage with
    so many layers. [part]: its least bytes."""
    sizes = room.layer_bytes(rows, layers)
    kept = fastest(rows[:, SECONDS], sizes)
    rows, sizes = rows[kept], sizes[:, kept]
    weights = (rows[:, SECONDS] + multipliers[:, None, None] * sizes).min(axis=-1)
    return weights, sizes.min(axis=-1)


def fastest(seconds: Floats, sizes: Floats) -> NDArray[np.int64]:
    """Of rows with their sizes [part, row], those that no other is faster than and no larger."""
    return pareto(np.vstack([seconds, sizes]).T)


def best_of(rows: Floats, room: Room) -> NDArray[np.int64]:
    """The rows that are best in some part of a stage by some multiplier of memory, of what stays in
    it."""
    sizes = rows[:, RESIDENT] + rows[:, HELD] * room.in_flight[:, None]
    multipliers = multipliers_of(rows, room)
    weights = rows[:, SECONDS] + multipliers[:, None, None] * sizes
    return np.unique(weights.argmin(axis=-1))


def more_of(fewest: int, each: Floats) -> Floats:
    """What a stage's layers come to if none, one … of its parts have one more than `fewest`, from
    what a layer comes to in each (…, part)."""
    ordered = np.sort(each, axis=-1)
    found: Floats = fewest * ordered.sum(axis=-1, keepdims=True) + sums_of(1, each)
    return found


def sums_of(most: int, each: Floats) -> Floats:
    """What none, one … layers of a stage come to at least, of which a part has so many at most."""
    ordered = np.repeat(np.sort(each, axis=-1), most, axis=-1)
    none = np.zeros((*ordered.shape[:-1], 1))
    return np.concatenate([none, np.cumsum(ordered, axis=-1)], axis=-1)

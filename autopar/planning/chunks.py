"""How long the slowest stage takes at least where each has several parts, which differ by one layer
at most: layers don't divide, and those of one kind take longer than those of another."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.planning.columns import pareto
from autopar.planning.loose import BRIEF, HELD, RESIDENT, SECONDS, TRANSIENT, moments

Floats = NDArray[np.float64]
FINE: tuple[float, ...] = tuple(2.0 ** (k / 8) for k in range(-64, 65))
"""Multipliers of memory that are tried for one stage as a whole, in mean seconds a byte."""
FACTORS = FINE[::8]
"""Those that are tried where each takes long."""
COARSE = 12
"""Of these, every so manieth is tried first."""
FEW = 4
"""So many kinds are taken apart into lighter and heavier ones in every way; more in the middle."""


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

    def layer_bytes(self, rows: Floats, layers: int) -> Floats:
        """[part, row]: what a layer's choices need on a stage with so many layers, spread evenly
        over its parts. For a moment those of the parts count that find least freed."""
        sizes: Floats = rows[:, RESIDENT] + rows[:, HELD] * self.in_flight[:, None]
        if self.counts_moment:
            freed = np.array(self.freed or np.zeros(len(sizes)))
            counted = freed == freed.min()
            among = min(layers, int(counted.sum()) * -(-layers // len(sizes)))
            sizes = sizes + counted[:, None] * moments(rows, float(freed.min())) / max(among, 1)
        return sizes

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


def slowest_of_chunks(kinds: Sequence[int], rows: Sequence[Floats], rooms: Sequence[Room]) -> float:
    """Seconds that the slowest stage takes at least; inf where no way to give stages layers fits.
    `kinds`: by layer, in which of `rows` its choices are."""
    counts_moment = any(room.counts_moment for room in rooms)
    numbers = [SECONDS, RESIDENT, HELD, *([TRANSIENT, BRIEF] if counts_moment else [])]
    rows = [row[pareto(row[:, numbers])] for row in rows]
    found = [_of_equal(np.concatenate(rows), len(kinds), rooms)]
    order = sorted(range(len(rows)), key=lambda kind: float(rows[kind][:, SECONDS].min()))
    for cut in range(1, len(order)) if len(order) <= FEW else (len(order) // 2,):
        light, heavy = ([rows[kind] for kind in some] for some in (order[:cut], order[cut:]))
        are_light = np.isin(np.array(kinds), order[:cut])
        found.append(_of_two(np.concatenate(light), np.concatenate(heavy), are_light, rooms))
    return max(found)


def _of_equal(rows: Floats, count: int, rooms: Sequence[Room]) -> float:
    """As if each layer could do what any other can. Each further layer goes where the stage would
    be fastest with it: with one layer less no stage takes longer."""
    fewest = count // _parts(rooms)
    stages = [_Equal(rows, room, fewest) for room in rooms]
    least, most = stages[0].least, stages[0].least + len(rooms[0].in_flight)
    further = count - least * len(rooms)
    if not further:
        return max(stage.with_layers(least) for stage in stages)
    queue = [(stage.with_layers(least + 1), i, least + 1) for i, stage in enumerate(stages)]
    heapq.heapify(queue)
    slowest = 0.0
    for _ in range(further):
        after, i, layers = heapq.heappop(queue)
        slowest = max(slowest, after)
        if slowest == np.inf:
            break
        if layers < most:
            heapq.heappush(queue, (stages[i].with_layers(layers + 1), i, layers + 1))
    return slowest


@dataclass(frozen=True, eq=False)
class _Equal:
    """A stage whose layers may all do the same."""

    rows: Floats
    room: Room
    fewest: int

    @property
    def least(self) -> int:
        """So many layers it has at least."""
        return self.fewest * len(self.room.in_flight)

    @cached_property
    def _multipliers(self) -> Floats:
        return multipliers_of(self.rows, self.room)

    @cached_property
    def _beside_s(self) -> Floats:
        return self.room.beside_s(self._multipliers)

    def with_layers(self, layers: int) -> float:
        """Seconds that it takes at least with so many; inf where they don't fit."""
        sizes, more = self.room.layer_bytes(self.rows, layers), layers - self.least

        def least_s(some: slice) -> Floats:
            weights = self.rows[:, SECONDS] + self._multipliers[some, None, None] * sizes
            each = _more(self.fewest, weights.min(axis=-1))[:, more]
            found: Floats = each + self._beside_s[some]
            return found

        if _more(self.fewest, sizes.min(axis=-1))[more] > self.room.left_bytes:
            return np.inf
        # A sum of least values is concave in multipliers: the best lies beside the best of a few.
        best = int(least_s(slice(None, None, COARSE)).argmax()) * COARSE
        return float(least_s(slice(max(best - COARSE, 0), best + COARSE + 1)).max())


def _rising(each: Floats) -> Floats:
    """With no more than any that follows has along the last dim: fewer layers never take longer."""
    found: Floats = np.minimum.accumulate(each[..., ::-1], axis=-1)[..., ::-1]
    return found


def _parts(rooms: Sequence[Room]) -> int:
    return len(rooms) * len(rooms[0].in_flight)


def _of_two(
    light: Floats, heavy: Floats, are_light: NDArray[np.bool_], rooms: Sequence[Room]
) -> float:
    """As if all of the lighter layers could do the same, and all of the heavier ones."""
    lights, heavies = int(are_light.sum()), int((~are_light).sum())
    fewest = len(are_light) // _parts(rooms)
    most = _most_light(are_light, len(rooms), _parts(rooms))
    every = [_of_stage(light, heavy, room, fewest) for room in rooms]
    for each, few in zip(every, most, strict=True):
        each[few + 1 :] = np.inf
    values = np.unique(np.concatenate([each[np.isfinite(each)] for each in every]))
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if _hold([each <= values[middle] for each in every], lights, heavies):
            high = middle
        else:
            low = middle + 1
    return float(values[low]) if low < len(values) else np.inf


def _most_light(are_light: NDArray[np.bool_], stages: int, parts: int) -> list[int]:
    """By stage, how many of the lighter layers can lie in it: each part begins within a few."""
    count = len(are_light)
    fewest = count // parts
    most = [0] * stages
    for part in range(parts):
        rest = parts - part
        first = max(part * fewest, count - rest * (fewest + 1))
        last = min(part * (fewest + 1), count - rest * fewest) + fewest
        most[part % stages] += min(int(are_light[first : last + 1].sum()), fewest + 1)
    return most


def _of_stage(light: Floats, heavy: Floats, room: Room, fewest: int) -> Floats:
    """[lighter, heavier]: seconds that a stage takes at least with so many of each; inf where they
    don't fit, or parts have no place for them."""
    chunks = len(room.in_flight)
    number = np.arange((fewest + 1) * chunks + 1)
    layers = number[:, None] + number[None, :]
    found = np.full(layers.shape, np.inf)
    for count in range(fewest * chunks, len(number)):
        # With fewer than each part has, none is: as if they were as many.
        some = layers <= count if count == fewest * chunks else layers == count
        found[some] = _of_pair(light, heavy, room, fewest, count)[some]
    return _rising(_rising(found).T).T


def _of_pair(light: Floats, heavy: Floats, room: Room, fewest: int, layers: int) -> Floats:
    """The same as if the stage had so many layers together."""
    multipliers = multipliers_of(np.concatenate([light, heavy]), room)
    (own, own_bytes), (more, more_bytes) = (
        [_sums(fewest + 1, each) for each in least_layer(rows, room, multipliers, layers)]
        for rows in (light, heavy)
    )
    least_s = own[:, :, None] + more[:, None, :] + room.beside_s(multipliers)[:, None, None]
    fits = own_bytes[:, None] + more_bytes[None, :] <= room.left_bytes
    return np.where(fits, least_s.max(axis=0), np.inf)


def _hold(may: Sequence[NDArray[np.bool_]], lights: int, heavies: int) -> bool:
    """Whether stages that may have so many lighter and heavier layers can have all."""
    most = np.full(lights + 1, -1)  # by how many lighter ones are placed, of the heavier ones
    most[0] = 0
    for own in may:
        # With one more, what may be isn't more: the first that may not ends it.
        heavier = own.cumprod(axis=1).sum(axis=1) - 1
        after = np.full_like(most, -1)
        for n, more in enumerate(heavier[: lights + 1]):
            before = most[: lights + 1 - n]
            reached = np.where((before >= 0) & (more >= 0), before + more, -1)
            after[n:] = np.maximum(after[n:], reached)
        most = after
    return bool(most[lights] >= heavies)


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
    weights = (rows[:, SECONDS] + multipliers[:, None, None] * sizes).min(axis=-1)
    return weights, sizes.min(axis=-1)


def best_of(rows: Floats, room: Room) -> NDArray[np.int64]:
    """The rows that are best in some part of a stage by some multiplier of memory, of what stays in
    it."""
    sizes = rows[:, RESIDENT] + rows[:, HELD] * room.in_flight[:, None]
    multipliers = multipliers_of(rows, room)
    weights = rows[:, SECONDS] + multipliers[:, None, None] * sizes
    return np.unique(weights.argmin(axis=-1))


def _more(fewest: int, each: Floats) -> Floats:
    """What a stage's layers come to if none, one … of its parts have one more than `fewest`, from
    what a layer comes to in each (…, part)."""
    ordered = np.sort(each, axis=-1)
    found: Floats = fewest * ordered.sum(axis=-1, keepdims=True) + _sums(1, each)
    return found


def _sums(most: int, each: Floats) -> Floats:
    """What none, one … layers of a stage come to at least, of which a part has so many at most."""
    ordered = np.repeat(np.sort(each, axis=-1), most, axis=-1)
    none = np.zeros((*ordered.shape[:-1], 1))
    return np.concatenate([none, np.cumsum(ordered, axis=-1)], axis=-1)

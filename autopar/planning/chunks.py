"""How long the slowest stage takes at least where each has several parts, which differ by one layer
at most: layers don't divide, and those of one kind take longer than those of another."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.planning.columns import pareto
from autopar.planning.loose import HELD, RESIDENT, SECONDS

Floats = NDArray[np.float64]
FACTORS = tuple(2.0**k for k in range(-8, 9))
"""Multipliers of memory that are tried, in mean seconds a byte."""
FINE = tuple(2.0 ** (k / 8) for k in range(-64, 65))
"""The same for one stage as a whole, where they are cheap."""
FEW = 4
"""So many kinds are taken apart into lighter and heavier ones in every way; more in the middle."""


@dataclass(frozen=True)
class Room:
    """A stage: seconds of a microbatch that it takes beside layers, bytes that are free for them,
    and by part how many microbatches' activations it holds."""

    own_s: float
    free_bytes: float
    in_flight: Floats


def slowest_of_chunks(kinds: Sequence[int], rows: Sequence[Floats], rooms: Sequence[Room]) -> float:
    """Seconds that the slowest stage takes at least; inf where no way to give stages layers fits.
    `kinds`: by layer, in which of `rows` its choices are."""
    rows = [row[pareto(row[:, [SECONDS, RESIDENT, HELD]])] for row in rows]
    found = [_of_equal(np.concatenate(rows), len(kinds), rooms)]
    order = sorted(range(len(rows)), key=lambda kind: float(rows[kind][:, SECONDS].min()))
    for cut in range(1, len(order)) if len(order) <= FEW else (len(order) // 2,):
        light, heavy = ([rows[kind] for kind in some] for some in (order[:cut], order[cut:]))
        are_light = np.isin(np.array(kinds), order[:cut])
        found.append(_of_two(np.concatenate(light), np.concatenate(heavy), are_light, rooms))
    return max(found)


def _of_equal(rows: Floats, count: int, rooms: Sequence[Room]) -> float:
    """As if each layer could do what any other can."""
    fewest, each = count // _parts(rooms), []
    for room in rooms:
        multipliers = multipliers_of(rows, room)
        weights, sizes = least_layer(rows, room, multipliers)
        least_s = _more(fewest, weights) - multipliers[:, None] * room.free_bytes
        fits = _more(fewest, sizes) <= room.free_bytes
        each.append(np.where(fits, least_s.max(axis=0) + room.own_s, np.inf))
    least = fewest * len(rooms[0].in_flight)
    for slowest in sorted({float(x) for row in each for x in row if np.isfinite(x)}):
        most = [int((row <= slowest).sum()) - 1 for row in each]
        if min(most) >= 0 and sum(least + more for more in most) >= count:
            return slowest
    return np.inf


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
    multipliers = multipliers_of(np.concatenate([light, heavy]), room)
    (own, own_bytes), (more, more_bytes) = (
        [_sums(fewest + 1, each) for each in least_layer(rows, room, multipliers)]
        for rows in (light, heavy)
    )
    least_s = own[:, :, None] + more[:, None, :] - multipliers[:, None, None] * room.free_bytes
    number = np.arange(own.shape[-1])
    has_place = number[:, None] + number[None, :] < len(number)
    fits = own_bytes[:, None] + more_bytes[None, :] <= room.free_bytes
    return np.where(has_place & fits, least_s.max(axis=0) + room.own_s, np.inf)


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
    sizes = rows[:, RESIDENT] + rows[:, HELD] * room.in_flight[:, None]
    pace = float(rows[:, SECONDS].mean() / max(sizes.mean(), 1.0))
    return np.array([0.0, *(pace * factor for factor in FINE)])


def least_layer(rows: Floats, room: Room, multipliers: Floats) -> tuple[Floats, Floats]:
    """[multiplier, part]: the least seconds of a layer, with so much for each byte. [part]: its
    least bytes."""
    sizes = rows[:, RESIDENT] + rows[:, HELD] * room.in_flight[:, None]
    weights = (rows[:, SECONDS] + multipliers[:, None, None] * sizes).min(axis=-1)
    return weights, sizes.min(axis=-1)


def best_of(rows: Floats, room: Room) -> NDArray[np.int64]:
    """The rows that are best in some part of a stage by some multiplier of memory."""
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

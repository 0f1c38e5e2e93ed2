"""How long the slowest stage takes at least where each has several parts, which differ by one layer
at most: layers don't divide, and those of one kind take longer than those of another."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.planning.equal_layers import slowest_of_equal
from autopar.planning.loose import BRIEF, HELD, RESIDENT, SECONDS, TRANSIENT
from autopar.planning.pareto import pareto
from autopar.planning.rooms import Room, least_layer, multipliers_of, sums_of

Floats = NDArray[np.float64]
FEW = 4
"""So many kinds are taken apart into lighter and heavier ones in every way; more in the middle."""


def slowest_of_chunks(kinds: Sequence[int], rows: Sequence[Floats], rooms: Sequence[Room]) -> float:
    """Seconds that the slowest stage takes at least; inf where no way to give stages layers fits.
    `kinds`: by layer, in which of `rows` its choices are."""
    counts_moment = any(room.counts_moment for room in rooms)
    numbers = [SECONDS, RESIDENT, HELD, *([TRANSIENT, BRIEF] if counts_moment else [])]
    rows = [row[pareto(row[:, numbers])] for row in rows]
    found = [slowest_of_equal(np.concatenate(rows), len(kinds), rooms)]
    order = sorted(range(len(rows)), key=lambda kind: float(rows[kind][:, SECONDS].min()))
    for cut in range(1, len(order)) if len(order) <= FEW else (len(order) // 2,):
        light, heavy = ([rows[kind] for kind in some] for some in (order[:cut], order[cut:]))
        are_light = np.isin(np.array(kinds), order[:cut])
        found.append(_of_two(np.concatenate(light), np.concatenate(heavy), are_light, rooms))
    return max(found)


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
        [sums_of(fewest + 1, each) for each in least_layer(rows, room, multipliers, layers)]
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

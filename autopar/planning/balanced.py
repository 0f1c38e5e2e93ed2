"""A cut of the layers where each stage has several parts, which differ by one layer at most: one
whose slowest stage is about as fast as it can be, by what layers take at least in their memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.planning.rooms import Room, least_layer, multipliers_of

Floats = NDArray[np.float64]
ROUNDS = 100
"""How often a layer is moved at most."""


def balanced(
    kinds: Sequence[int], rows: Sequence[Floats], rooms: Sequence[Room]
) -> tuple[int, ...]:
    """How many layers each part has. `kinds`: by layer, in which of `rows` its choices are.

    First the stage with the least is given the next layer, of its parts the last, which have the
    fewest microbatches in flight; then layers are moved while that makes the slowest stage faster,
    or of equally slow ones fewer.
    """
    loads = _loads(kinds, rows, rooms)
    parts = len(rooms) * len(rooms[0].in_flight)
    fewest = len(kinds) // parts
    counts = np.full(parts, fewest)
    for _ in range(len(kinds) - counts.sum()):
        spare = np.flatnonzero(counts == fewest)
        each = loads.of(counts)[spare % len(rooms)]
        counts[spare[np.flatnonzero(each == each.min())[-1]]] += 1
    for _ in range(ROUNDS):
        more, less = (np.flatnonzero(counts == n) for n in (fewest + 1, fewest))
        now = _slowness(loads.of(counts))
        moves = [(int(a), int(b)) for a in more for b in less]
        best = min(((_slowness(loads.of(_moved(counts, *m))), m) for m in moves), default=None)
        if best is None or best[0] >= now:
            break
        counts = _moved(counts, *best[1])
    return tuple(map(int, counts))


def _moved(counts: NDArray[np.int64], start: int, end: int) -> NDArray[np.int64]:
    moved = counts.copy()
    moved[start] -= 1
    moved[end] += 1
    return moved


def _slowness(loads: Floats) -> tuple[float, ...]:
    """What is compared: the slowest stage, then the next."""
    return tuple(np.sort(loads)[::-1])


@dataclass(frozen=True, eq=False)
class _Loads:
    """What stages take at least with the layers that a cut gives them. `before`: [layers before a
    cut, kind], how many; `weights`: [stage, kind, multiplier of memory, part] of a layer;
    `beside_s`: [stage, multiplier] of what there is beside layers."""

    before: Floats
    weights: Floats
    beside_s: Floats

    def of(self, counts: NDArray[np.int64]) -> Floats:
        """Seconds of a microbatch by stage."""
        ends = np.concatenate([[0], np.cumsum(counts)])
        layers = self.before[ends[1:]] - self.before[ends[:-1]]
        by_stage = layers.reshape(-1, len(self.beside_s), layers.shape[1])  # [part, stage, kind]
        sums = np.einsum("psk,skmp->sm", by_stage, self.weights)
        found: Floats = (sums + self.beside_s).max(axis=1)
        return found


def _loads(kinds: Sequence[int], rows: Sequence[Floats], rooms: Sequence[Room]) -> _Loads:
    of_kind = np.array(kinds)[:, None] == np.arange(len(rows))
    before = np.concatenate([np.zeros((1, len(rows))), np.cumsum(of_kind, axis=0)])
    layers = round(len(kinds) / len(rooms))
    multipliers = [multipliers_of(np.concatenate(rows), room) for room in rooms]
    weights = [
        [least_layer(one, room, each, layers)[0] for one in rows]
        for room, each in zip(rooms, multipliers, strict=True)
    ]
    beside_s = [room.beside_s(each) for room, each in zip(rooms, multipliers, strict=True)]
    return _Loads(before, np.array(weights), np.array(beside_s))

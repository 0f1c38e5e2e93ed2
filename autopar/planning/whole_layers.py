"""What a stage takes at least with so many whole layers: a layer does one thing, not a mixture.

A stage's layers share its memory. By dynamic programming over how much of it is taken: the least
seconds of so many layers, each with one of its choices, in every amount of memory. What a layer
takes is rounded down to cells of memory, so the least is a bound.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.planning.pareto import pareto

Floats = NDArray[np.float64]
CELLS = 4_096
"""So finely memory is told apart."""


@dataclass(frozen=True, eq=False)
class Few:
    """What a layer of a kind may do in some place: cells and seconds of each choice that no other
    beats in both bytes and seconds, and which it is."""

    kind: int
    cells: NDArray[np.int64]
    seconds: Floats
    which: NDArray[np.int64]


Group = tuple[int, int]
"""Layers that may do the same, by their number (`Memory.group`), and how many."""


@dataclass(frozen=True, eq=False)
class Memory:
    """Layers in the memory of stages that have at most so many bytes. `every`: what layers of each
    group may do, as far as it was asked for; `known`: by what one group alone is filled with, the
    least seconds."""

    most_bytes: float
    every: list[Few] = field(default_factory=list)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    known: dict[Group, Floats] = field(default_factory=dict)

    def group(self, kind: int, sizes: Floats, seconds: Floats) -> int:
        """The number of layers of a kind whose choices need so many bytes (inf: they may not be
        taken), and these seconds."""
        name = kind, sizes.tobytes()
        if name not in self.numbers:
            self.numbers[name] = len(self.every)
            kept = pareto(np.stack([sizes, seconds], axis=1))
            kept = kept[np.isfinite(sizes[kept])]
            cells = np.floor(sizes[kept] / self.most_bytes * CELLS).astype(np.int64)
            self.every.append(Few(kind, cells, seconds[kept], kept))
        return self.numbers[name]

    def least_s(self, groups: Sequence[Group], free_bytes: float) -> float:
        """Seconds of these layers at least, in so many bytes; inf where they don't fit."""
        if free_bytes < 0:
            return np.inf
        seconds = self._one_group(groups[0]) if groups else _nothing()
        for number, count in groups[1:]:
            for _ in range(count):
                seconds = _least_with(seconds, self.every[number])
        return float(seconds[: self._cells(free_bytes)].min())

    def choices(self, groups: Sequence[Group], free_bytes: float) -> Mapping[int, set[int]]:
        """By kind, what its layers do that take so little; nothing where they don't fit."""
        seconds, picks = _nothing(), []
        for number, count in groups:
            for _ in range(count):
                seconds, pick = _with_one(seconds, self.every[number])
                picks.append((self.every[number], pick))
        found: dict[int, set[int]] = {}
        cells = self._cells(max(free_bytes, 0.0))
        at = int(seconds[:cells].argmin())
        for few, pick in reversed(picks) if np.isfinite(seconds[at]) else ():
            choice = int(pick[at])
            found.setdefault(few.kind, set()).add(int(few.which[choice]))
            at -= int(few.cells[choice])
        return found

    def _cells(self, free_bytes: float) -> int:
        """How many of the amounts of memory are at most so many bytes."""
        return min(int(free_bytes / self.most_bytes * CELLS), CELLS) + 1

    def _one_group(self, group: Group) -> Floats:
        number, count = group
        if group not in self.known:
            before = self._one_group((number, count - 1)) if count > 1 else _nothing()
            self.known[group] = _least_with(before, self.every[number])
        return self.known[group]


def _nothing() -> Floats:
    """By cells that are taken, the seconds of no layers."""
    empty = np.full(CELLS + 1, np.inf)
    empty[0] = 0.0
    return empty


def _least_with(before: Floats, few: Few) -> Floats:
    """With one layer more."""
    after = np.full(CELLS + 1, np.inf)
    for cells, own_s in zip(few.cells.tolist(), few.seconds.tolist(), strict=True):
        if cells <= CELLS:
            rest = after[cells:]
            np.minimum(rest, before[: CELLS + 1 - cells] + own_s, out=rest)
    return after


def _with_one(before: Floats, few: Few) -> tuple[Floats, NDArray[np.int16]]:
    """The same, and which of its choices the layer takes."""
    after, picks = np.full(CELLS + 1, np.inf), np.full(CELLS + 1, -1, np.int16)
    for pick, (cells, own_s) in enumerate(zip(few.cells.tolist(), few.seconds, strict=True)):
        if cells <= CELLS:
            more = before[: CELLS + 1 - cells] + own_s
            better = more < after[cells:]
            after[cells:][better] = more[better]
            picks[cells:][better] = pick
    return after, picks

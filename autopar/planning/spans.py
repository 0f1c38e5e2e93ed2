"""What a part takes and needs at least, for every run of layers that it may have."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.planning.chunks import FACTORS
from autopar.planning.loose import HELD, RESIDENT, SECONDS, STEP, TRANSIENT

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Spans:
    """[part, first layer, layer after the last]: seconds of a microbatch that the part takes at
    least with these layers (inf where they don't fit, or there are none), what it takes once a step
    at least, and by how many bytes at least they are over the limit."""

    seconds: Floats
    step_seconds: Floats
    over_bytes: Floats


@dataclass(frozen=True, eq=False)
class Beside:
    """What a part has beside layers: the `skeleton`'s choices, what is there anyway, how many
    microbatches each of its stage's chunks holds, and which of them it is."""

    skeleton: Sequence[Floats]
    base: Floats
    in_flight: Floats
    chunk: int


FEW = 8
"""With so many kinds of layers runs are told apart by how many they have of each."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Every run of layers, of which those that have as many of each kind are one: `place` says
    which, by the first layer and the one after the last. `kinds`: by layer; `counts`: [run, kind],
    None where there are many kinds and each run is told apart."""

    kinds: Sequence[int]
    place: NDArray[np.int64]
    counts: Floats | None

    def sums(self, each: Floats) -> Floats:
        """By run, what its layers come to, from what one of each kind does."""
        if self.counts is not None:
            few: Floats = self.counts @ each
            return few
        before = np.concatenate([[0.0], np.cumsum(each[list(self.kinds)])])
        every: Floats = (before[None, :] - before[:, None]).ravel()
        return every


def runs_of(kinds: Sequence[int]) -> Runs:
    """The runs of layers of these kinds."""
    number, count = max(kinds) + 1, len(kinds) + 1
    if number > FEW:
        return Runs(kinds, np.arange(count * count).reshape(count, count), None)
    own = np.array(kinds)[:, None] == np.arange(number)
    before = np.concatenate([np.zeros((1, number)), np.cumsum(own, axis=0)])
    every = (before[None, :, :] - before[:, None, :]).reshape(-1, number)
    counts, place = np.unique(every, axis=0, return_inverse=True)
    return Runs(kinds, place.reshape(count, count), counts)


def span_of(
    runs: Runs, rows: Sequence[Floats], beside: Beside, limit_bytes: int
) -> tuple[Floats, Floats, Floats]:
    """Of one part, by run: the most seconds that some multiplier of memory proves, the least once a
    step, and the least bytes over the limit. The runs' kinds are places in `rows`, which have their
    choices."""
    base, in_flight = beside.base, beside.in_flight
    moment, skeleton = counted_moment(beside.skeleton, float(base[TRANSIENT]))
    free = limit_bytes - moment - float(base[RESIDENT] + base[HELD:] @ in_flight)
    every = np.concatenate(rows)
    starts = np.cumsum([0, *map(len, rows[:-1])])
    own_sizes = [costs[:, RESIDENT] + costs[:, HELD:] @ in_flight for costs in skeleton]
    sizes = every[:, RESIDENT] + every[:, HELD] * in_flight[beside.chunk]

    def total(layers: Floats, own: Sequence[Floats]) -> Floats:
        """Of each run, if layers and the skeleton's regions take the least of these."""
        least = np.minimum.reduceat(layers, starts)
        span: Floats = runs.sums(least) + sum(float(one.min()) for one in own)
        return span

    bounds = [*starts[1:], len(every)]
    pace = max(
        float(every[a:b, SECONDS].mean() / max(sizes[a:b].mean(), 1.0))
        for a, b in zip(starts, bounds, strict=True)
    )
    best = np.zeros(1)
    for multiplier in (0.0, *(pace * factor for factor in FACTORS)):
        own = [
            costs[:, SECONDS] + multiplier * size
            for costs, size in zip(skeleton, own_sizes, strict=True)
        ]
        found = total(every[:, SECONDS] + multiplier * sizes, own)
        best = np.maximum(best, found + base[SECONDS] - multiplier * free)
    once = total(every[:, STEP], [costs[:, STEP] for costs in skeleton]) + base[STEP]
    return best, once, total(sizes, own_sizes) - free


def counted_moment(skeleton: Sequence[Floats], layers_bytes: float) -> tuple[float, list[Floats]]:
    """What is needed for a moment is the layers' or the skeleton's: the larger one counts, as bytes
    of the layers or among the skeleton's."""
    if sum(float(costs[:, TRANSIENT].min()) for costs in skeleton) > layers_bytes:
        return 0.0, [with_moment(costs) for costs in skeleton]
    return layers_bytes, list(skeleton)


def with_moment(costs: Floats) -> Floats:
    """The rows with transient bytes among the resident ones."""
    rows = costs.copy()
    rows[:, RESIDENT] += rows[:, TRANSIENT]
    return rows

"""What a part takes and needs at least, for every run of layers that it may have."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.planning.loose import BRIEF, HELD, RESIDENT, SECONDS, STEP, TRANSIENT
from autopar.planning.pareto import pareto
from autopar.planning.rooms import FACTORS, FINE, Room, fastest

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Spans:
    """[part, first layer, layer after the last]: seconds of a microbatch that the part takes at
    least with these layers (inf where they don't fit, or there are none), what it takes once a step
    at least, and by how many bytes at least they are over the limit."""

    seconds: Floats
    step_seconds: Floats
    over_bytes: Floats


FEW, MANY = 8, 2_000
"""With so many kinds of layers runs are told apart by how many they have of each, unless there are
so many runs."""
LENGTHS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 2**62])
"""What is needed for a moment by one of some layers is no less than their mean: of so many."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Every run of layers, of which those that have as many of each kind are one: `place` says
    which, by the first layer and the one after the last. `kinds`: by layer; `counts`: [run, kind],
    None where there are many and each run is told apart; `length`: by run, which of LENGTHS it has
    no more layers than."""

    kinds: Sequence[int]
    place: NDArray[np.int64]
    counts: Floats | None
    length: NDArray[np.int64]

    def sums(self, each: Floats) -> Floats:
        """[…, run]: what its layers come to, from what one of each kind does: [length, …, kind], or
        [1, …, kind] where that is the same for all lengths."""
        if self.counts is not None:
            lengths = self.length if len(each) > 1 else np.zeros_like(self.length)
            few: Floats = np.einsum("r...k,rk->...r", each[lengths], self.counts)
            return few
        own = each[0][..., list(self.kinds)]
        before = np.concatenate([np.zeros((*own.shape[:-1], 1)), np.cumsum(own, -1)], -1)
        every: Floats = before[..., None, :] - before[..., :, None]
        return every.reshape(*own.shape[:-1], -1)


def runs_of(kinds: Sequence[int]) -> Runs:
    """The runs of layers of these kinds."""
    number, count = max(kinds) + 1, len(kinds) + 1
    place = np.arange(count * count)
    apart = Runs(kinds, place.reshape(count, count), None, np.zeros_like(place))
    if number > FEW:
        return apart
    own = np.array(kinds)[:, None] == np.arange(number)
    before = np.concatenate([np.zeros((1, number)), np.cumsum(own, axis=0)])
    every = (before[None, :, :] - before[:, None, :]).reshape(-1, number)
    counts, place = np.unique(every, axis=0, return_inverse=True)
    if len(counts) > MANY:
        return apart
    length = np.searchsorted(LENGTHS, counts.sum(axis=1))
    return Runs(kinds, place.reshape(count, count), counts, length)


@dataclass(frozen=True, eq=False)
class Layers:
    """What layers may do, by the kinds of `runs`: `rows` of costs of all kinds, those of each from
    `starts`, without such as are worse than another in all that a part's memory and seconds see;
    `once_s`: by kind, the least that is paid once a step."""

    runs: Runs
    rows: Floats
    starts: NDArray[np.int64]
    once_s: Floats

    def least(self, values: Floats) -> Floats:
        """[…, kind], of values of each row."""
        found: Floats = np.minimum.reduceat(values, self.starts, axis=-1)
        return found

    @property
    def step_s(self) -> Floats:
        """By run, what is paid once a step at least."""
        return self.runs.sums(self.once_s[None, :])


def layers_of(runs: Runs, rows: Sequence[Floats]) -> Layers:
    """The layers of runs whose kinds are places in `rows`."""
    kept = [row[pareto(row[:, [SECONDS, RESIDENT, TRANSIENT, BRIEF, HELD]])] for row in rows]
    starts = np.cumsum([0, *map(len, kept[:-1])])
    once_s = np.array([float(row[:, STEP].min()) for row in rows])
    return Layers(runs, np.concatenate(kept), starts, once_s)


def span_of(layers: Layers, room: Room, chunk: int) -> tuple[Floats, Floats]:
    """Of a stage's part, by run: the most seconds that some multiplier of memory proves, and the
    least bytes over the limit."""
    rows, runs, left = layers.rows, layers.runs, room.left_bytes
    if not room.counts_moment:
        lengths, more = LENGTHS[:1], 0.0  # all the same
    elif runs.counts is not None:
        lengths, more = LENGTHS, 0.0
    else:  # no run's length is known, but that there is one layer
        lengths, more = LENGTHS[-1:], float(room.moments(rows, chunk).min())
    sizes = np.array([room.part_bytes(rows, length, chunk) for length in lengths.tolist()])
    over = runs.sums(layers.least(sizes)) + more - left
    best, (own, own_sizes) = np.zeros(1), _fastest(layers, sizes)
    for multipliers in _multipliers(layers, sizes[0]):
        values = own.rows[:, SECONDS] + multipliers[None, :, None] * own_sizes[:, None, :]
        beside_s = room.beside_s(multipliers) + multipliers * more
        best = np.maximum(best, (runs.sums(own.least(values)) + beside_s[:, None]).max(axis=0))
    return best, over


def _fastest(layers: Layers, sizes: Floats) -> tuple[Layers, Floats]:
    """Without choices that others are faster than and no larger, of few kinds of layers. Between
    the least and the most layers sizes are between those with as many."""
    if layers.runs.counts is None:
        return layers, sizes
    seconds, ends = layers.rows[:, SECONDS], [*layers.starts[1:], len(layers.rows)]
    kept = [
        a + fastest(seconds[a:b], sizes[[0, -1], a:b])
        for a, b in zip(layers.starts, ends, strict=True)
    ]
    rows, starts = np.concatenate(kept), np.cumsum([0, *map(len, kept[:-1])])
    return replace(layers, rows=layers.rows[rows], starts=starts), sizes[:, rows]


def _multipliers(layers: Layers, sizes: Floats) -> Iterator[Floats]:
    """Seconds a byte that are tried as multipliers of a part's memory; of many kinds of layers one
    by one, which take room."""
    ends = [*layers.starts[1:], len(sizes)]
    pace = max(
        float(layers.rows[a:b, SECONDS].mean() / max(sizes[a:b].mean(), 1.0))
        for a, b in zip(layers.starts, ends, strict=True)
    )
    if layers.runs.counts is not None:
        yield np.array([0.0, *(pace * factor for factor in FINE[::2])])
        return
    yield from (np.array([factor * pace]) for factor in (0.0, *FACTORS))

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


def span_of(
    kinds: Sequence[int], rows: Sequence[Floats], beside: Beside, limit_bytes: int
) -> tuple[Floats, Floats, Floats]:
    """Of one part, by its first layer and the one after its last: the most seconds that some
    multiplier of memory proves, the least once a step, and the least bytes over the limit. `kinds`:
    by layer, in which of `rows` its choices are."""
    base, in_flight = beside.base, beside.in_flight
    moment, skeleton = counted_moment(beside.skeleton, float(base[TRANSIENT]))
    free = limit_bytes - moment - float(base[RESIDENT] + base[HELD:] @ in_flight)
    every = np.concatenate(rows)
    starts = np.cumsum([0, *map(len, rows[:-1])])
    own_sizes = [costs[:, RESIDENT] + costs[:, HELD:] @ in_flight for costs in skeleton]
    sizes = every[:, RESIDENT] + every[:, HELD] * in_flight[beside.chunk]

    def total(layers: Floats, own: Sequence[Floats]) -> Floats:
        """Of each run, if layers and the skeleton's regions take the least of these."""
        least = np.minimum.reduceat(layers, starts)[list(kinds)]
        sums = np.concatenate([[0.0], np.cumsum(least)])
        span: Floats = sums[None, :] - sums[:, None] + sum(float(one.min()) for one in own)
        return span

    bounds = [*starts[1:], len(every)]
    pace = max(
        float(every[a:b, SECONDS].mean() / max(sizes[a:b].mean(), 1.0))
        for a, b in zip(starts, bounds, strict=True)
    )
    best = np.zeros((len(kinds) + 1, len(kinds) + 1))
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

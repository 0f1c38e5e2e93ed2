"""How layers are shared out: among stages, and among the parts of one."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Layers = tuple[int, ...]
"""How many of each kind."""
Values = Sequence[Mapping[Layers, float]]
"""By stage and its layers, seconds."""
Place = tuple[int | None, ...]
"""Alike parts of a stage: by kind, something where layers of it may lie there."""


def split(
    values: Values, totals: Layers, pace: float, per_stage: float
) -> tuple[float, tuple[Layers, ...]]:
    """The least of pace · slowest + per_stage · Σ over all ways to give stages their layers, of
    each kind as many as there are; and how many layers each stage then has (() where there is no
    way)."""
    slowest = _joined(values, totals, np.maximum, np.inf)
    best: tuple[float, tuple[Layers, ...]] = (np.inf, ())
    least_s = _joined(values, totals, np.add, np.inf)[0]
    for limit_s in sorted({v for row in values for v in row.values() if v >= slowest[0]}):
        if pace * limit_s + per_stage * least_s >= best[0]:
            break
        total_s, layers = _joined(values, totals, np.add, limit_s)
        if pace * limit_s + per_stage * total_s < best[0]:
            best = pace * limit_s + per_stage * total_s, layers
    return best


def _joined(
    values: Values, totals: Layers, join: np.ufunc, limit_s: float
) -> tuple[float, tuple[Layers, ...]]:
    """The least that values of all stages come to, joined, of those within a limit; and the stages'
    layers."""
    shape = tuple(total + 1 for total in totals)
    best = np.full(shape, np.inf)
    best[(0,) * len(shape)] = -np.inf if join is np.maximum else 0.0
    picks: list[NDArray[np.int64]] = []
    for row in values:
        after, pick = np.full(shape, np.inf), np.full(shape, -1)
        for k, (layers, value) in enumerate(row.items()):
            if value <= limit_s:
                here = tuple(slice(n, None) for n in layers)
                before = tuple(slice(0, size - n) for n, size in zip(layers, shape, strict=True))
                ways = join(best[before], value)
                better = ways < after[here]
                after[here][better] = ways[better]
                pick[here][better] = k
        best, picks = after, [*picks, pick]
    at, found = tuple(totals), list[Layers]()
    if not np.isfinite(best[at]):
        return np.inf, ()
    for row, pick in zip(reversed(values), reversed(picks), strict=True):
        layers = list(row)[int(pick[at])]
        found.append(layers)
        at = tuple(n - k for n, k in zip(at, layers, strict=True))
    return float(best[tuple(totals)]), tuple(reversed(found))


def laid(
    places: Sequence[tuple[Place, int]], layers: Layers, least: int, most: int
) -> Iterator[tuple[Layers, ...]]:
    """By place and kind, so many layers: each place is so many parts, which have `least` to `most`
    layers, of kinds that may lie there."""
    if not places:
        if not any(layers):
            yield ()
        return
    (may, parts), rest = places[0], places[1:]
    tops = [n if number is not None else 0 for number, n in zip(may, layers, strict=True)]
    for own in itertools.product(*(range(top + 1) for top in tops)):
        left = tuple(n - k for n, k in zip(layers, own, strict=True))
        others = sum(count for _, count in rest)
        fits = least * parts <= sum(own) <= most * parts
        if fits and least * others <= sum(left) <= most * others:
            for more in laid(rest, left, least, most):
                yield (own, *more)

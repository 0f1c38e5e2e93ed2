"""How layers are shared out: among stages, and among the parts of one."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Layers = tuple[int, ...]
"""How many of each kind."""
Values = Sequence[Mapping[Layers, float]]
"""By stage and its layers, seconds."""
Place = tuple[int | None, ...]
"""Alike parts of a stage: by kind, something where layers of it may lie there."""


@dataclass(frozen=True)
class Order:
    """Layers in order, by their kinds, which lie in parts of `least` to `most` layers, of which
    each stage has `chunks`. What it says of a stage's layers holds in every cut; of several parts a
    stage it knows the order of those that come first alone."""

    kinds: tuple[int, ...]
    stages: int
    chunks: int
    least: int
    most: int

    @cached_property
    def totals(self) -> Layers:
        """How many there are of each kind."""
        counts = Counter(self.kinds)
        return tuple(counts[kind] for kind in range(max(self.kinds) + 1))

    @cached_property
    def _firsts(self) -> NDArray[np.bool_]:
        """By how many of each kind, whether the first layers are so many."""
        found, here = np.zeros([n + 1 for n in self.totals], bool), [0] * len(self.totals)
        found[tuple(here)] = True
        for kind in self.kinds:
            here[kind] += 1
            found[tuple(here)] = True
        return found

    def may_follow(self, layers: Layers) -> NDArray[np.bool_]:
        """By how many layers of each kind the stages before have, whether the next may have these:
        as far as there are so many."""
        shape = tuple(total + 1 - n for total, n in zip(self.totals, layers, strict=True))
        if self.chunks == 1:
            before = tuple(slice(0, size) for size in shape)
            after = tuple(slice(n, None) for n in layers)
            return self._firsts[before] & self._firsts[after]
        first = self.kinds[0]
        run = next((i for i, kind in enumerate(self.kinds) if kind != first), len(self.kinds))
        if run < self.totals[first] or run > self.stages * self.least:
            return np.ones(shape, bool)
        own = [self._may_begin(sum(layers), layers[first], run - n) for n in range(shape[first])]
        along = [size if kind == first else 1 for kind, size in enumerate(shape)]
        return np.broadcast_to(np.array(own).reshape(along), shape)

    def _may_begin(self, layers: int, firsts: int, left: int) -> bool:
        """Whether so many layers may lie in a stage whose first part begins when so many are left
        of those that come first, and which has so many of them."""
        parts = self.chunks - 1
        return any(
            firsts == min(own, left) and self.least * parts <= layers - own <= self.most * parts
            for own in range(self.least, self.most + 1)
        )


def split(
    values: Values, order: Order, pace: float, per_stage: float
) -> tuple[float, tuple[Layers, ...]]:
    """The least of pace · slowest + per_stage · Σ over all ways to give stages their layers, as far
    as their order is known; and how many layers each stage then has (() where there is no way)."""
    slowest = _joined(values, order, np.maximum, np.inf)
    best: tuple[float, tuple[Layers, ...]] = (np.inf, ())
    least_s = _joined(values, order, np.add, np.inf)[0]
    for limit_s in sorted({v for row in values for v in row.values() if v >= slowest[0]}):
        if pace * limit_s + per_stage * least_s >= best[0]:
            break
        total_s, layers = _joined(values, order, np.add, limit_s)
        if pace * limit_s + per_stage * total_s < best[0]:
            best = pace * limit_s + per_stage * total_s, layers
    return best


def _joined(
    values: Values, order: Order, join: np.ufunc, limit_s: float
) -> tuple[float, tuple[Layers, ...]]:
    """The least that values of all stages come to, joined, of those within a limit; and the stages'
    layers."""
    totals = order.totals
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
                ways = np.where(order.may_follow(layers), join(best[before], value), np.inf)
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

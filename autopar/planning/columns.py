"""All ways to run one layer that no other way beats: a layer's regions joined into one choice.

A layer meets the rest of the model only where values cross its boundary. So its regions are chosen
together beforehand, once for all identical layers: of those combinations that look alike from
outside, only the ones on the Pareto front of their costs can be in an optimum. The programme then
has one slot a layer, and a far better relaxation: each choice is integral inside the layer.
"""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autopar.planning.pareto import pareto
from autopar.planning.problem import Edge

Costs = NDArray[np.float64]
"""One row a choice: seconds a microbatch, seconds a step, resident, held and transient bytes, of
these those that aren't there for what runs again. A part's costs also have those for what runs
again by itself: only the largest of all parts counts, as transient bytes."""
EACH_S, ONCE_S, RESIDENT, HELD, TRANSIENT, BRIEF, ALONE = range(7)
WIDTH = ALONE + 1


Facts = frozenset[tuple[Hashable, ...]]
"""What is seen of a choice from outside, as ("word", …)."""


@dataclass(frozen=True)
class Part:
    """One region of a layer: its choices' costs, and what is seen of each."""

    costs: Costs
    seen: tuple[Facts, ...]


Sizes = tuple[int, ...]
"""Bytes of some calls."""


@dataclass(frozen=True)
class Joined:
    """Calls that the same choices take part in: `takes[part][choice]` are its bytes in each (None:
    in none); `cost`: what calls of so many bytes take, each microbatch and once a step, beyond what
    is among the parts' own costs."""

    takes: Sequence[Sequence[Sizes | None]]
    cost: Callable[[Sizes], tuple[float, float]]


@dataclass(frozen=True)
class Columns:
    """The combinations that are left: their costs, what is seen of all their parts together, and
    which choice of each part it is."""

    costs: Costs
    seen: tuple[Facts, ...]
    picks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Front:
    """Combinations of the first parts that look alike to all that is still to come."""

    costs: Costs
    picks: NDArray[np.int32]


Crossing = tuple[int | None, frozenset[int]]
"""The layout in which an edge's value is made, and those in which it is needed, so far."""

_Touch = tuple[int, tuple[int | None] | None, frozenset[int]]
"""An edge; if the part makes its value, in which layout; in which layouts it needs it."""


@dataclass(frozen=True)
class _State:
    """What of the first parts still matters: on the edges that are open, in calls, and outside."""

    crossings: tuple[Crossing | None, ...]
    seen: Facts
    sums: tuple[Sizes | None, ...] = ()


def columns(
    parts: Sequence[Part], edges: Sequence[Edge], counted: Costs, joined: Sequence[Joined] = ()
) -> Columns:
    """The Pareto front of all combinations. `edges` join parts, by index; their seconds are those
    of a microbatch. `counted`: the sums of costs that matter, one a row. `joined`: calls that parts
    share."""
    start = _State((None,) * len(edges), frozenset(), (None,) * len(joined))
    fronts = {start: _Front(np.zeros((1, WIDTH)), np.zeros((1, 0), np.int32))}
    ends = [max([edge.source.slot, *(use.slot for use in edge.uses)]) for edge in edges]
    for p, part in enumerate(parts):
        closing = [e for e, end in enumerate(ends) if end == p]
        fronts = _extended(fronts, p, part, edges, closing, counted, joined)
    whole: dict[_State, list[_Front]] = {}
    for state, front in fronts.items():
        alike = _State(state.crossings, state.seen)
        whole.setdefault(alike, []).append(_whole(front, _called(state, joined)))
    return _collected(
        {state: _best(some, counted[:, :ALONE]) for state, some in whole.items()}, len(parts)
    )


def _extended(
    fronts: dict[_State, _Front],
    p: int,
    part: Part,
    edges: Sequence[Edge],
    closing: Sequence[int],
    counted: Costs,
    joined: Sequence[Joined],
) -> dict[_State, _Front]:
    found: dict[_State, list[_Front]] = {}
    classes = _classes(p, part, edges, counted, joined)
    near = {
        e: edge
        for e, edge in enumerate(edges)
        if p in (edge.source.slot, *(use.slot for use in edge.uses))
    }
    touches = {c: _touches(p, c, near) for c, _ in classes}
    for (before, front), (c, own) in product(fronts.items(), classes):
        crossings = list(before.crossings)
        for e, makes, needs in touches[c]:
            made, needed = crossings[e] or (None, frozenset())
            crossings[e] = (made if makes is None else makes[0], needed | needs)
        paid = _paid([(edges[e], crossings[e]) for e in closing])
        if paid is None:
            continue
        for e in closing:
            crossings[e] = None
        sums = tuple(map(_sum, before.sums, (calls.takes[p][c] for calls in joined)))
        state = _State(tuple(crossings), before.seen | part.seen[c], sums)
        count, more = len(front.costs), len(own.costs)
        costs = (front.costs[:, None, :] + own.costs[None, :, :]).reshape(-1, WIDTH) + paid
        most = np.maximum(front.costs[:, None, ALONE], own.costs[None, :, ALONE])
        costs[:, ALONE] = most.reshape(-1)
        picks = np.hstack([np.repeat(front.picks, more, axis=0), np.tile(own.picks, (count, 1))])
        found.setdefault(state, []).append(_Front(costs, picks))
    return {state: _best(some, counted) for state, some in found.items()}


def _sum(before: Sizes | None, more: Sizes | None) -> Sizes | None:
    if before is None or more is None:
        return more if before is None else before
    return tuple(map(operator.add, before, more))


def _called(state: _State, joined: Sequence[Joined]) -> tuple[float, float]:
    """What the calls of a combination take beyond its parts' own costs."""
    found = [one.cost(sizes) for one, sizes in zip(joined, state.sums, strict=True) if sizes]
    return sum(each for each, _ in found), sum(once for _, once in found)


def _touches(p: int, choice: int, edges: Mapping[int, Edge]) -> list[_Touch]:
    """What a choice of a part makes and needs on its edges."""
    found: list[_Touch] = []
    for e, edge in edges.items():
        makes = (edge.source.layouts[choice],) if edge.source.slot == p else None
        uses = [use.layouts[choice] for use in edge.uses if use.slot == p]
        found.append((e, makes, frozenset(n for n in uses if n is not None)))
    return found


def _classes(
    p: int, part: Part, edges: Sequence[Edge], counted: Costs, joined: Sequence[Joined]
) -> list[tuple[int, _Front]]:
    """The part's choices by what is seen of them: one that stands for its class, and its best."""
    uses = [use for edge in edges for use in (edge.source, *edge.uses) if use.slot == p]
    rows = [*(use.layouts for use in uses), *(one.takes[p] for one in joined)]
    groups: dict[Hashable, list[int]] = {}
    for c, seen in enumerate(part.seen):
        groups.setdefault((tuple(row[c] for row in rows), seen), []).append(c)
    return [
        (
            members[0],
            _best([_Front(part.costs[members], np.array(members, np.int32)[:, None])], counted),
        )
        for members in groups.values()
    ]


def _paid(crossings: Sequence[tuple[Edge, Crossing | None]]) -> tuple[float, ...] | None:
    """What the edges cost, or None where one is impossible."""
    paid = [0.0] * WIDTH
    for edge, crossing in crossings:
        assert crossing is not None, edge.name
        made, needed = crossing
        for n in sorted(needed) if made is not None else ():
            if edge.seconds[made][n] is None:  # type: ignore[index]
                return None
            each_s, once_s = edge.costs(made, n)  # type: ignore[arg-type]
            paid[EACH_S] += each_s
            paid[ONCE_S] += once_s
            paid[HELD if edge.is_held else RESIDENT] += edge.resident_bytes[made][n]  # type: ignore[index]
    return tuple(paid)


def _best(fronts: Sequence[_Front], counted: Costs) -> _Front:
    """Without what something else is no worse than in every cost; of equals the first stays."""
    costs = np.concatenate([front.costs for front in fronts])
    picks = np.concatenate([front.picks for front in fronts])
    kept = pareto(costs @ counted.T)
    return _Front(costs[kept], picks[kept])


def moment_bytes(
    costs: Costs, freed_bytes: float, transient: int = TRANSIENT, brief: int = BRIEF
) -> NDArray[np.float64]:
    """What each choice needs for a moment in a part where so much has been freed when the backward
    comes to it, of what counts throughout: the first to run again finds it gone. `transient`,
    `brief`: where these bytes are in `costs`."""
    found: NDArray[np.float64] = np.maximum(costs[:, brief], costs[:, transient] - freed_bytes)
    return found


def _whole(front: _Front, called: tuple[float, float]) -> _Front:
    """With what its calls take, and without the column that parts have."""
    costs = front.costs[:, :ALONE].copy()
    costs[:, EACH_S] += called[0]
    costs[:, ONCE_S] += called[1]
    costs[:, TRANSIENT] += front.costs[:, ALONE]
    return _Front(costs, front.picks)


def _collected(fronts: dict[_State, _Front], count: int) -> Columns:
    if not fronts:
        return Columns(np.zeros((0, ALONE)), (), ())
    seen = [state.seen for state, front in fronts.items() for _ in front.costs]
    picks = [tuple(map(int, row)) for front in fronts.values() for row in front.picks]
    assert all(len(row) == count for row in picks)
    return Columns(np.concatenate([f.costs for f in fronts.values()]), tuple(seen), tuple(picks))

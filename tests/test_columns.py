"""A layer's columns against all combinations of its regions' choices."""

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from autopar.planning.columns import (
    ALONE,
    BRIEF,
    EACH_S,
    HELD,
    ONCE_S,
    RESIDENT,
    TRANSIENT,
    WIDTH,
    Facts,
    Part,
    columns,
)
from autopar.planning.pareto import pareto
from autopar.planning.problem import Edge, Use

EVERY = np.eye(WIDTH)
SUMS = np.zeros((5, WIDTH))
SUMS[0, [EACH_S, ONCE_S]] = 3.0, 1.0
SUMS[1, [RESIDENT, HELD]] = 1.0
SUMS[2, TRANSIENT] = SUMS[3, BRIEF] = SUMS[4, ALONE] = 1.0


def drawn(seed: int) -> tuple[list[Part], list[Edge]]:
    """Two to four parts, with edges between any of them: some shared by several, some once a step,
    some with pairs that are impossible, some that a choice doesn't need."""
    rng = random.Random(seed)
    parts = []
    for _ in range(rng.randint(2, 4)):
        count = rng.randint(1, 5)
        drawn_costs = [[rng.randint(0, 4) for _ in range(WIDTH)] for _ in range(count)]
        costs = np.array(drawn_costs, np.float64)
        seen: list[Facts] = [
            frozenset({("uses", rng.choice("ab"))} if rng.random() < 0.5 else ())
            for _ in range(count)
        ]
        parts.append(Part(costs, tuple(seen)))
    edges = []
    for e in range(rng.randint(0, 3)):
        joined = rng.sample(range(len(parts)), rng.randint(2, len(parts)))

        def layouts(p: int) -> tuple[int | None, ...]:
            return tuple(rng.choice((0, 1, 0, 1, None)) for _ in parts[p].seen)

        source, *uses = [Use(p, layouts(p)) for p in joined]
        seconds = ((0.0, float(rng.randint(1, 3))), (rng.choice((None, 2.0)), 0.0))
        sizes = ((0, rng.randint(0, 2)), (0, 0))
        late = ((0.0, rng.choice((-1.0, 0.0, 2.0))), (rng.choice((-1.0, 0.0, 2.0)), 0.0))
        edges.append(Edge(f"e{e}", source, tuple(uses), seconds, sizes, step_seconds=late))
    return parts, edges


def cost(parts: list[Part], edges: list[Edge], picks: tuple[int, ...]) -> list[float] | None:
    """Written down anew: the costs of one combination, or None where it is impossible."""
    rows = [part.costs[c] for part, c in zip(parts, picks, strict=True)]
    total = [float(sum(row[k] for row in rows)) for k in range(ALONE)]
    total[TRANSIENT] += max(float(row[ALONE]) for row in rows)  # one at a time
    for edge in edges:
        made = edge.source.layouts[picks[edge.source.slot]]
        needed = {use.layouts[picks[use.slot]] for use in edge.uses}
        for layout in needed:
            if made is None or layout is None:
                continue
            seconds = edge.seconds[made][layout]
            if seconds is None:
                return None
            late = edge.step_seconds[made][layout]
            assert late is not None
            total[0] += seconds
            total[1] += late
            total[2] += edge.resident_bytes[made][layout]
    return total


def combinations(
    parts: list[Part], edges: list[Edge]
) -> Iterator[tuple[tuple[int, ...], Facts, list[float]]]:
    for picks in itertools.product(*(range(len(part.seen)) for part in parts)):
        found = cost(parts, edges, picks)
        if found is not None:
            seen = frozenset().union(*(p.seen[c] for p, c in zip(parts, picks, strict=True)))
            yield picks, seen, found


@pytest.mark.parametrize("counted", [EVERY, SUMS], ids=["every", "sums"])
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_nothing_beats_the_columns(first: int, counted: np.ndarray) -> None:
    """Each combination has a column that looks the same and costs no more; each column is one."""
    smaller, whole = 0, counted[:, :ALONE]
    for seed in range(first, first + 50):
        parts, edges = drawn(seed)
        found = columns(parts, edges, counted)
        every = {picks: (seen, costs) for picks, seen, costs in combinations(parts, edges)}
        for row, seen, picks in zip(found.costs, found.seen, found.picks, strict=True):
            assert every[picks] == (seen, list(row)), seed
        for seen, costs in every.values():
            mine = whole @ np.array(costs)
            assert any(
                other == seen and bool((whole @ row <= mine + 1e-9).all())
                for row, other in zip(found.costs, found.seen, strict=True)
            ), seed
        smaller += len(found.picks) < len(every)
    assert smaller > 25


def test_pareto_keeps_the_first_of_equals() -> None:
    costs = np.array([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0], [2.0, 2.0]])
    assert sorted(pareto(costs)) == [0, 2]


def test_no_combination_is_possible() -> None:
    part = Part(np.zeros((1, WIDTH)), (frozenset(),))
    edge = Edge("e", Use(0, (0,)), (Use(1, (0,)),), ((None,),), ((0,),))
    assert columns([part, part], [edge], EVERY).picks == ()

"""Where each stage has several parts: no cut's slowest stage is below the bound, and the cut that
is taken is about the best."""

import itertools
import math
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar.planning.balanced import balanced
from autopar.planning.chunks import slowest_of_chunks
from autopar.planning.loose import BRIEF, HELD, RESIDENT, SECONDS, TRANSIENT
from autopar.planning.rooms import Room, best_of

STAGES, CHUNKS, COLUMNS = 2, 2, 3
Case = tuple[list[int], list[NDArray[np.float64]], list[Room]]


def drawn(seed: int, kinds: int, tight: bool) -> Case:
    """Layers of some kinds, in runs, and stages with little memory or much."""
    rng = random.Random(seed)
    layers = sorted(rng.randrange(kinds) for _ in range(rng.randint(4, 7)))
    if rng.random() < 0.5:
        layers.reverse()
    rows = []
    for _ in range(kinds):
        row = np.zeros((COLUMNS, BRIEF + 1))
        row[:, SECONDS] = sorted(rng.uniform(1.0, 8.0) for _ in range(COLUMNS))
        row[:, RESIDENT] = [rng.randint(0, 3) for _ in range(COLUMNS)]
        row[:, HELD] = sorted((rng.randint(1, 9) for _ in range(COLUMNS)), reverse=True)
        row[:, TRANSIENT] = [rng.randint(0, 12) for _ in range(COLUMNS)]
        row[:, BRIEF] = [rng.randint(0, int(most)) for most in row[:, TRANSIENT]]
        rows.append(row)
    free = rng.uniform(15.0, 45.0) if tight else 1e9
    in_flight = [np.array([rng.randint(1, 3) for _ in range(CHUNKS)], float) for _ in range(STAGES)]
    moment = rng.random() < 0.5
    own = [[beside(rng)] * rng.randint(0, 1) for _ in range(STAGES)]
    return (
        layers,
        rows,
        [
            Room(
                rng.uniform(0.0, 4.0),
                free,
                each,
                skeleton,
                moment,
                rng.choices((0.0, 5.0), k=CHUNKS),
            )
            for each, skeleton in zip(in_flight, own, strict=True)
        ],
    )


def beside(rng: random.Random) -> NDArray[np.float64]:
    """Two choices of a region of the skeleton."""
    row = np.zeros((2, HELD + CHUNKS))
    row[:, SECONDS] = [1.0, rng.uniform(1.0, 6.0)]
    row[:, RESIDENT] = [rng.randint(2, 9), 1.0]
    row[:, HELD] = [1.0, 0.0]
    return row


def stage_s(case: Case, counts: tuple[int, ...], stage: int) -> float:
    """By brute force, what a stage of a cut takes at least; inf where nothing fits."""
    layers, rows, rooms = case
    ends = [0, *itertools.accumulate(counts)]
    mine = [
        (rows[layers[layer]], part // STAGES)
        for part in range(stage, STAGES * CHUNKS, STAGES)
        for layer in range(ends[part], ends[part + 1])
    ]
    room, best = rooms[stage], math.inf
    own = [
        (room.own_s + row[SECONDS], room.free_bytes - row[RESIDENT] - row[HELD:] @ room.in_flight)
        for row in (room.skeleton[0] if room.skeleton else np.zeros((1, HELD + CHUNKS)))
    ]
    for columns in itertools.product(range(COLUMNS), repeat=len(mine)):
        taken = [(row[c], chunk) for (row, chunk), c in zip(mine, columns, strict=True)]
        need = sum(row[RESIDENT] + row[HELD] * room.in_flight[chunk] for row, chunk in taken)
        moments = [max(row[BRIEF], row[TRANSIENT] - room.freed[chunk]) for row, chunk in taken]
        need += max(moments) if room.counts_moment else 0.0
        layers_s = sum(float(row[SECONDS]) for row, _ in taken)
        best = min([best, *(own_s + layers_s for own_s, free in own if need <= free)])
    return best


def every_cut(layers: int) -> list[tuple[int, ...]]:
    """Those whose parts differ by one layer at most."""
    fewest = layers // (STAGES * CHUNKS)
    sizes = itertools.product((fewest, fewest + 1), repeat=STAGES * CHUNKS)
    return [counts for counts in sizes if sum(counts) == layers]


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_no_cut_is_below_the_bound_and_the_chosen_one_is_near_the_best(
    kinds: int, tight: bool
) -> None:
    exact = far = 0
    for seed in range(40):
        case = drawn(seed, kinds, tight)
        slowest = {
            counts: max(stage_s(case, counts, stage) for stage in range(STAGES))
            for counts in every_cut(len(case[0]))
        }
        best = min(slowest.values())
        bound = slowest_of_chunks(*case)
        assert bound <= best * (1 + 1e-9), seed
        exact += bound >= best * (1 - 1e-9)
        if math.isfinite(best):
            chosen = balanced(*case)
            assert chosen in slowest, seed
            far += slowest[chosen] > best * (1 + 1e-9)
    if not tight and kinds < 3:
        assert exact >= 30 and far <= 4
    assert exact >= 2


def test_the_best_columns_are_those_that_no_worth_of_memory_makes_worse() -> None:
    case = drawn(0, 1, tight=True)
    row, room = case[1][0], case[2][0]
    found = set(best_of(row, room).tolist())
    assert int(row[:, SECONDS].argmin()) in found
    worse = np.vstack([row, row[:1] + 1.0])
    assert len(row) not in best_of(worse, room)

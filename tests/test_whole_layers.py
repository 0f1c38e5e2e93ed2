"""Whole layers in a stage's memory, and in all stages, against exhaustive search."""

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from clusters import cluster
from models import Job, gpt2, llama
from numpy.typing import NDArray
from test_outline import space

from autopar.cluster import resolve_cluster
from autopar.layouts.stages import make_cut
from autopar.planning.ilp import solve
from autopar.planning.outer import Dropped
from autopar.planning.problem import Solution
from autopar.planning.settle import settle_whole
from autopar.planning.shared_out import split
from autopar.planning.stage_price import StagePricer
from autopar.planning.tried import Tried, relax
from autopar.planning.unopened import Unopened
from autopar.planning.whole_bound import whole_bound
from autopar.planning.whole_layers import CELLS, Memory

Floats = NDArray[np.float64]


def drawn(rng: random.Random) -> tuple[list[tuple[Floats, Floats, int]], float]:
    """Groups of layers: bytes and seconds of each choice, and how many; and what is free."""
    groups = []
    for _ in range(rng.randint(1, 2)):
        choices = rng.randint(1, 5)
        sizes = np.array([rng.uniform(0.0, 30.0) for _ in range(choices)])
        seconds = np.array([rng.uniform(-1.0, 8.0) for _ in range(choices)])
        groups.append((sizes, seconds, rng.randint(1, 3)))
    return groups, rng.uniform(5.0, 60.0)


def least_s(groups: list[tuple[Floats, Floats, int]], free: float) -> float:
    """By exhaustive search."""
    layers = [(sizes, seconds) for sizes, seconds, count in groups for _ in range(count)]
    found = [np.inf]
    for choices in itertools.product(*(range(len(sizes)) for sizes, _ in layers)):
        taken = [
            (sizes[c], seconds[c]) for (sizes, seconds), c in zip(layers, choices, strict=True)
        ]
        if sum(size for size, _ in taken) <= free:
            found.append(sum(own_s for _, own_s in taken))
    return min(found)


def test_layers_in_memory() -> None:
    """Never above the least, and no less than with one cell more a layer; what is taken is that."""
    tight = 0
    for seed in range(200):
        groups, free = drawn(random.Random(seed))
        memory = Memory(100.0)
        numbered = [(memory.group(k, *one[:2]), one[2]) for k, one in enumerate(groups)]
        found, layers = memory.least_s(numbered, free), sum(one[2] for one in groups)
        exact, looser = least_s(groups, free), least_s(groups, free + (layers + 1) * 100.0 / CELLS)
        assert looser - 1e-9 <= found <= exact + 1e-9, seed
        tight += least_s(groups, 1e9) < exact < np.inf
        chosen = memory.choices(numbered, free)
        if np.isfinite(found):
            few = [
                (s[list(chosen[k])], t[list(chosen[k])], n) for k, (s, t, n) in enumerate(groups)
            ]
            assert least_s(few, free + (layers + 1) * 100.0 / CELLS) <= found + 1e-9, seed
        else:
            assert not chosen
    assert tight > 40


def test_stages_are_given_their_layers() -> None:
    """As many of each kind as there are, by the slowest stage and the sum."""
    feasible = 0
    for seed in range(200):
        rng = random.Random(seed)
        kinds = rng.randint(1, 2)
        values: list[Mapping[tuple[int, ...], float]] = [
            {
                layers: rng.uniform(1.0, 9.0)
                for layers in itertools.product(range(4), repeat=kinds)
                if rng.random() < 0.7
            }
            for _ in range(3)
        ]
        totals = tuple(rng.randint(1, 7) for _ in range(kinds))
        pace, per_stage = rng.choice((0.0, 1.0, 9.0)), rng.choice((0.25, 1.0))
        best = np.inf
        for some in itertools.product(*values):
            if tuple(map(sum, zip(*some, strict=True))) == totals:
                each = [row[layers] for row, layers in zip(values, some, strict=True)]
                best = min(best, pace * max(each) + per_stage * sum(each))
        seconds, layers = split(values, totals, pace, per_stage)
        assert seconds == pytest.approx(best), seed
        if np.isfinite(best):
            feasible += 1
            assert tuple(map(sum, zip(*layers, strict=True))) == totals
    assert feasible > 100


JOBS = {"gpt2": lambda: gpt2(layers=6), "llama": lambda: llama(layers=5)}


@pytest.mark.parametrize(
    ("name", "more"),
    [("gpt2", 1_200_000), ("gpt2", 2_200_000), ("llama", 800_000), ("llama", 1_200_000)],
)
def test_no_cut_is_below_the_bound(name: str, more: int) -> None:
    """The optimum of every cut, in little memory; where layers are few, other bounds are lower."""
    job: Job = JOBS[name]()
    limit = space(job, resolve_cluster(cluster())).works.prices.overhead_bytes() + more
    found = space(job, resolve_cluster(cluster()), limit, pin={"pp": 2, "tp": 2})
    options, compared, higher = replace(found.options, limit_bytes=limit), 0, 0
    for unopened in found.settings():
        if not isinstance(unopened, Unopened) or unopened.asked.microbatches not in (2, 4):
            continue
        for tried in found.open(unopened):
            low = relax(tried, options) if isinstance(tried, Tried) else None
            if low is None or isinstance(low, Dropped) or low.anywhere is None:
                continue
            if low.result is not None:
                continue
            spread, layers = low.anywhere.spread, len(low.layered.kinds)
            skeleton, least = low.layered.pricer.model.skeleton, np.inf
            for counts in itertools.product(*(range(a, b + 1) for a, b in spread)):
                if sum(counts) == layers:
                    pricer = StagePricer((low.layered,), make_cut(skeleton, counts))
                    one = solve(pricer.problem(limit), gap=0.0)
                    least = min(least, one.seconds if isinstance(one, Solution) else np.inf)
            whole = whole_bound(low.anywhere, 2.0 * low.bound_s)
            assert whole is not None
            assert whole.seconds <= least * (1 + 1e-9), low.outer.asked
            compared += np.isfinite(least)
            higher += bool(low.bound_s * (1 + 1e-6) < whole.seconds < 1.99 * low.bound_s)
            done = settle_whole(low, options, 2.0 * low.bound_s)
            assert done.is_whole and done.bound_s >= low.bound_s
            if done.answer is not None:
                assert done.answer.solution.memory_bytes <= limit
                assert done.answer.solution.seconds >= least * (1 - 1e-9)
    assert compared >= 3 and higher >= 1

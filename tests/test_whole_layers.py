"""Whole layers in a stage's memory, and in all stages, against exhaustive search."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
from clusters import cluster
from models import Job, gpt2, llama
from numpy.typing import NDArray
from test_outline import space

from autopar.cluster import resolve_cluster
from autopar.layouts.stages import make_cut
from autopar.planning.cuts import every_cut
from autopar.planning.ilp import solve
from autopar.planning.outer import Dropped
from autopar.planning.problem import Solution
from autopar.planning.settle import settle_whole
from autopar.planning.shared_out import Order, split
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
    """As many of each kind as some cut gives them, by the slowest stage and the sum: of one part a
    stage the best cut exactly, of several never above it."""
    feasible = close = 0
    for seed in range(300):
        rng = random.Random(seed)
        kinds, chunks = rng.randint(1, 2), rng.randint(1, 2)
        layers = [rng.randrange(kinds) for _ in range(rng.randint(3 * chunks, 9) - kinds)]
        layers += range(kinds)
        if rng.random() < 0.6:
            layers.sort()
        least = 1 if chunks == 1 else len(layers) // 6
        most = len(layers) if chunks == 1 else -(-len(layers) // 6)
        order = Order(tuple(layers), 3, chunks, least, most)
        values = [drawn_values(rng, order) for _ in range(3)]
        pace, per_stage = rng.choice((0.0, 1.0, 9.0)), rng.choice((0.25, 1.0))
        best = np.inf
        for own in of_cuts(order):
            each = [row.get(one, np.inf) for row, one in zip(values, own, strict=True)]
            best = min(best, pace * max(each) + per_stage * sum(each))
        seconds, found = split(values, order, pace, per_stage)
        exact = chunks == 1
        assert seconds == pytest.approx(best) if exact else seconds <= best * (1 + 1e-9), seed
        if np.isfinite(best):
            feasible += 1
            close += seconds == pytest.approx(best)
            assert tuple(map(sum, zip(*found, strict=True))) == order.totals
    assert feasible > 150 and close > 0.8 * feasible


def drawn_values(rng: random.Random, order: Order) -> Mapping[tuple[int, ...], float]:
    """Seconds of a stage by its layers; of some there are none."""
    least, most = order.least * order.chunks, order.most * order.chunks
    every = itertools.product(*(range(total + 1) for total in order.totals))
    some = [layers for layers in every if least <= sum(layers) <= most and rng.random() < 0.9]
    return {layers: rng.uniform(1.0, 9.0) for layers in some}


def of_cuts(order: Order) -> Iterator[tuple[tuple[int, ...], ...]]:
    """By stage, how many layers of each kind it has, in every cut."""
    parts, count = order.stages * order.chunks, len(order.kinds)
    for sizes in itertools.product(range(order.least, order.most + 1), repeat=parts):
        if sum(sizes) == count:
            ends = [0, *itertools.accumulate(sizes)]
            own = [Counter[int]() for _ in range(order.stages)]
            for part, (first, last) in enumerate(itertools.pairwise(ends)):
                own[part % order.stages].update(order.kinds[first:last])
            yield tuple(tuple(c[kind] for kind in range(len(order.totals))) for c in own)


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


def test_cuts_of_many_layers_in_several_parts_are_not_looked_at_one_by_one() -> None:
    """A single cut of 48 layers: the solver would take minutes to prove what it finds."""
    every = {}
    for layers in (24, 48):
        job = gpt2(layers=layers)
        pin = {"pp": 2, "dp": 2, "microbatches": 4, "zero": False, "recompute": False}
        found = space(job, resolve_cluster(cluster()), pin=pin)
        (unopened,) = (one for one in found.settings() if isinstance(one, Unopened))
        for tried in found.open(unopened):
            assert isinstance(tried, Tried)
            brief = tried.layered.schedule.brief
            if brief.chunks > 1 and layers % brief.parts == 0 and layers not in every:
                low = relax(tried, found.options)
                assert isinstance(low, Tried) and low.anywhere is not None
                every[layers] = every_cut(low.anywhere)
    assert every[24] is not None and len(every[24]) == 1 and every[48] is None

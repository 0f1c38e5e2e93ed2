"""Three hundred random planning problems, by both solvers, against every choice that there is.

A problem has four or five layers in one to three stages, three strategies for each layer (fast and
large, in between, slow and small), values that go to the next layer and some that skip ahead,
conversions where strategies differ, and a memory limit under which the fastest doesn't fit.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
from test_stage_problem import stages_of

from autopar.planning.evaluate import evaluate
from autopar.planning.ilp import solve
from autopar.planning.problem import (
    Choice,
    Edge,
    PlanningProblem,
    Share,
    Slot,
    Solution,
    Use,
)
from autopar.planning.staged import base_sums
from autopar.runtime.schedules import interleaved, one_forward_one_backward

CASES, LOTS = 300, 10
STRATEGIES = ((1.0, 8.0), (1.6, 4.0), (2.6, 1.0))
"""Seconds and bytes of each, in units of the layer's own."""


@dataclass(frozen=True)
class Case:
    """A problem, what every choice that is possible costs, and the least of what fits."""

    problem: PlanningProblem
    fastest_s: float
    best: tuple[int, ...]


def drawn(seed: int) -> PlanningProblem:
    """One problem without a limit."""
    draw = random.Random(seed)
    stages, layers = draw.choice([1, 2, 2, 3]), draw.choice([4, 5])
    chunks = draw.choice([1, 2]) if stages > 1 else 1
    microbatches = draw.choice([2, 3, 4])
    table = (
        interleaved(stages, microbatches, chunks)
        if chunks > 1
        else one_forward_one_backward(stages, microbatches)
    )
    slots = tuple(_layer(draw, s, s * stages // layers, chunks) for s in range(layers))
    edges = []
    for s in range(layers - 1):
        ahead = {s + 1, draw.randrange(s + 1, layers)} if draw.random() < 0.4 else {s + 1}
        seconds = [[0.0 if a == b else draw.randint(1, 8) / 64 for b in range(3)] for a in range(3)]
        row = tuple(range(3))
        uses = tuple(Use(t, row) for t in sorted(ahead))
        at, sizes = s * stages // layers, ((0, 1, 1), (1, 0, 1), (1, 1, 0))
        table_s = tuple(tuple(row) for row in seconds)
        late = draw.choice((0.0, 0.0, 0.0, 1.0, -0.5))
        late_s = tuple(tuple(late * x for x in row) for row in seconds)
        edges.append(Edge(f"e{s}", Use(s, row), uses, table_s, sizes, at, late_s))
    base = tuple(Share(i, 0.1, 0.2, 5, (1,) * chunks, 2) for i in range(stages))
    return PlanningProblem(slots, tuple(edges), 10**9, stages=stages_of(table), base_shares=base)


def _layer(draw: random.Random, place: int, stage: int, chunks: int) -> Slot:
    size, chunk = draw.choice([1.0, 1.0, 2.0]), draw.randrange(chunks)
    choices = []
    for seconds, nbytes in STRATEGIES:
        own_s = seconds * size * draw.randint(90, 110) / 100
        held = tuple(int(nbytes * size * 3) if c == chunk else 0 for c in range(chunks))
        sizes = int(nbytes * 4), held, int(nbytes), draw.choice((0, int(3 * nbytes)))
        share = Share(stage, own_s, draw.randint(0, 3) / 8, *sizes, draw.choice((0, 0, 1)))
        choices.append(Choice(own_s, 0, 0, (share,)))
    return Slot(f"layer {place}", tuple(choices), f"layer {place}")


@cache
def case(seed: int) -> Case:
    """A problem whose limit lies between what the fastest and the smallest choice need."""
    problem = drawn(seed)
    costs = {
        choices: cost
        for choices in itertools.product(range(3), repeat=len(problem.slots))
        if (cost := evaluate(problem, choices)) is not None
    }
    least = min(nbytes for _, nbytes in costs.values())
    most = min(costs.values())[1]
    limit = least + int((most - least) * random.Random(seed).choice([0.2, 0.4, 0.6, 0.8]))
    fitting = {choices: cost for choices, cost in costs.items() if cost[1] <= limit}
    best = min(fitting, key=lambda choices: fitting[choices])
    return Case(replace(problem, limit_bytes=limit), fitting[best][0], best)


def tight_stages(problem: PlanningProblem, choices: Sequence[int]) -> int:
    """How many stages use nine tenths of the limit, or more."""
    assert problem.stages is not None
    sums = base_sums(problem)
    for slot, c in zip(problem.slots, choices, strict=True):
        for share in slot.choices[c].shares:
            sums[share.stage].add(share, slot.group)
    needs = [s.memory_bytes(f) for s, f in zip(sums, problem.stages.in_flight, strict=True)]
    return sum(need >= 0.9 * problem.limit_bytes for need in needs)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize("lot", range(LOTS))
def test_the_optimum_is_that_of_exhaustive_search(lot: int, solver: str) -> None:
    for seed in range(lot, CASES, LOTS):
        one = case(seed)
        found = solve(one.problem, solver=solver, gap=1e-9)
        assert isinstance(found, Solution), seed
        assert found.seconds == pytest.approx(one.fastest_s, rel=1e-9), seed
        assert evaluate(one.problem, found.choices) == (found.seconds, found.memory_bytes), seed
        assert found.memory_bytes <= one.problem.limit_bytes, seed
        slack = 1e-5 if solver == "cbc" else 1e-9  # what CBC doesn't look for
        assert found.seconds * (1 - 2 * slack) <= found.bound_seconds <= found.seconds, seed


def test_the_problems_are_hard() -> None:
    """In nine of ten the optimum mixes strategies, or fills two stages; a fifth have values that
    skip."""
    mixed = skipping = 0
    for seed in range(CASES):
        one = case(seed)
        mixed += len(set(one.best)) > 1 or tight_stages(one.problem, one.best) > 1
        skipping += any(len(edge.uses) > 1 for edge in one.problem.edges)
    assert mixed >= 0.9 * CASES, mixed
    assert skipping >= 0.2 * CASES, skipping

"""Planning with layers in stages: the programme against brute force, the cut against all cuts."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from autopar.planning.cuts import least_cut
from autopar.planning.ilp import solve
from autopar.planning.problem import (
    Choice,
    Edge,
    Infeasible,
    PlanningProblem,
    Share,
    Slot,
    Solution,
    Stages,
    Use,
)
from autopar.runtime.schedules import interleaved, one_forward_one_backward
from autopar.schedule import Table


def stages_of(table: Table) -> Stages:
    held = tuple(table.in_flight(stage) for stage in range(table.stages))
    return Stages(table.per_slowest, table.per_stage, held)


def drawn(seed: int) -> PlanningProblem:
    """A chain of slots over the stages, some in two; two layouts, conversions that cost time."""
    rng = random.Random(seed)
    count, chunks = rng.choice([2, 3]), rng.choice([1, 2])
    table = (
        one_forward_one_backward(count, rng.choice([1, 2, 5]))
        if chunks == 1
        else interleaved(count, rng.choice([2, 3]), 2)
    )
    slots = []
    for s in range(5):
        where = sorted(rng.sample(range(count), rng.choice([1, 1, 2])))
        choices = tuple(
            Choice(
                1.0,
                10,
                0,
                tuple(
                    Share(
                        stage,
                        rng.randint(1, 9) / 8,
                        rng.randint(0, 3) / 4,
                        rng.randint(0, 20),
                        tuple(rng.randint(0, 9) for _ in range(chunks)),
                        rng.randint(0, 12),
                        rng.choice((0, 0, 8, 16)),
                        rng.choice((0, 0, 6)),
                    )
                    for stage in where
                ),
            )
            for _ in range(3)
        )
        slots.append(Slot(f"s{s}", choices, f"g{s // 2}"))
    edges = []
    for s in range(4):
        made, needed = [tuple(rng.randint(0, 1) for _ in range(3)) for _ in range(2)]
        table_s: tuple[tuple[float | None, ...], ...] = (
            (0.0, rng.randint(1, 4) / 8),
            (None if seed % 5 == 0 else 0.5, 0.0),
        )
        uses = (Use(s + 1, needed),)
        sizes = ((0, 3), (2, 0))
        # Once a step more, or less by a part of what it takes each microbatch.
        late = rng.choice((-0.5, 0.0, 1.0))
        late_s = tuple(tuple(None if x is None else late * x for x in row) for row in table_s)
        at = rng.randrange(count)
        edges.append(Edge(f"e{s}", Use(s, made), uses, table_s, sizes, at, late_s))
    base = tuple(Share(i, 0.25, 0.5, 7, (1,) * chunks, 3) for i in range(count))
    limit = rng.choice([40, 70, 110, 10_000])
    return PlanningProblem(
        tuple(slots), tuple(edges), limit, stages=stages_of(table), base_shares=base
    )


def cost(problem: PlanningProblem, choices: Sequence[int]) -> tuple[float, int] | None:
    """Written down anew: seconds and bytes of one choice per slot."""
    stages = problem.stages
    assert stages is not None
    paid = [(share, "") for share in problem.base_shares]
    for slot, c in zip(problem.slots, choices, strict=True):
        paid += [(share, slot.group) for share in slot.choices[c].shares]
    for edge in problem.edges:
        made = edge.source.layouts[choices[edge.source.slot]]
        needed = edge.uses[0].layouts[choices[edge.uses[0].slot]]
        assert made is not None and needed is not None
        seconds = edge.seconds[made][needed]
        if seconds is None:
            return None
        once_s = edge.step_seconds[made][needed]
        assert once_s is not None
        paid.append((Share(edge.stage, seconds, once_s, edge.resident_bytes[made][needed]), ""))
    each, late, most = [], [], 0
    for i, in_flight in enumerate(stages.in_flight):
        mine = [(share, group) for share, group in paid if share.stage == i]
        each.append(sum(share.seconds for share, _ in mine))
        late.append(sum(share.step_seconds for share, _ in mine))
        names = {group for _, group in mine}
        brief = [sum(s.transient_bytes for s, g in mine if g == name) for name in names]
        again = [
            sum(s.transient_bytes + s.again_bytes for s, g in mine if g == name) for name in names
        ]
        moment = max(0, *brief, max(again) - sum(s.freed_bytes for s, _ in mine))
        for counts in in_flight:
            held = sum(
                n * size
                for share, _ in mine
                for n, size in zip(counts, share.held_bytes)  # noqa: B905
            )
            whole = sum(share.resident_bytes for share, _ in mine) + moment
            most = max(most, whole + held)
    spare = max(0.0, 1.0 - stages.per_stage)
    longest = max(o - spare * (max(each) - e) for e, o in zip(each, late, strict=True))
    step = stages.per_slowest * max(each) + stages.per_stage * sum(each) + longest
    return step, most


@pytest.mark.parametrize("seed", range(40))
def test_programme_against_brute_force(seed: int) -> None:
    problem = drawn(seed)
    every = [cost(problem, c) for c in itertools.product(range(3), repeat=len(problem.slots))]
    fit = [one[0] for one in every if one is not None and one[1] <= problem.limit_bytes]
    found = solve(problem, gap=1e-9)
    if not fit:
        assert isinstance(found, Infeasible)
        possible = [one[1] for one in every if one is not None]
        assert found.impossible == (not possible)
        assert not possible or found.short_bytes == min(possible) - problem.limit_bytes
        return
    assert isinstance(found, Solution)
    assert found.seconds == pytest.approx(min(fit), rel=1e-9)
    assert cost(problem, found.choices) == pytest.approx((found.seconds, found.memory_bytes))


# ---------------------------------------------------------------- the cut


def all_cuts(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    for ends in itertools.combinations(range(1, count), parts - 1):
        edges = (0, *ends, count)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


@pytest.mark.parametrize("seed", range(20))
def test_cut_against_all_cuts(seed: int) -> None:
    rng = random.Random(seed)
    count, parts = rng.randint(3, 9), rng.randint(2, 3)
    times = [rng.randint(1, 9) for _ in range(count)]
    own = [rng.randint(0, 9) for _ in range(parts)]
    most = rng.choice([math.inf, 25])

    def part_cost(part: int, i: int, j: int) -> float:
        total = sum(times[i:j]) + own[part]
        return math.inf if total > most else total

    def slowest(counts: Sequence[int]) -> float:
        starts = [sum(counts[:p]) for p in range(parts)]
        return max(part_cost(p, starts[p], starts[p] + counts[p]) for p in range(parts))

    best = min(slowest(counts) for counts in all_cuts(count, parts))
    costs = np.full((parts, count + 1, count + 1), np.inf)
    for p, i in itertools.product(range(parts), range(count)):
        for j in range(i + 1, count + 1):
            costs[p, i, j] = part_cost(p, i, j)
    found = least_cut(costs, np.maximum)
    if math.isinf(best):
        assert found is None
    else:
        assert found is not None and slowest(found[1]) == best == found[0]

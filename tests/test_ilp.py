"""The ILP against brute force, under both solvers; nothing here knows a model or a strategy."""

import dataclasses
import functools
import itertools
import math
import random
import time

import highspy
import pulp  # noqa: TID251 (a programme for the solvers alone)
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.planning import sieve
from autopar.planning.evaluate import evaluate
from autopar.planning.ilp import solve, undominated
from autopar.planning.problem import (
    Choice,
    Cover,
    Edge,
    Infeasible,
    PlanningProblem,
    Share,
    Shared,
    Slot,
    Solution,
    Use,
)
from autopar.planning.rows import Rows, limit_memory
from autopar.planning.solvers import run

SOLVERS = ("highs", "cbc")
INSTANCES = 150


def random_problem(seed: int) -> PlanningProblem:
    """Three to six slots in a chain with skip edges; every fourth is in microseconds and kilobytes,
    every fourth in minutes and gigabytes. The limit lies between the least and the most memory."""
    rng = random.Random(seed)
    second, byte = ((1.0, 1), (1e-6, 1024), (60.0, 10**9 + 7), (1e-3, 2**20))[seed % 4]
    slots = tuple(
        Slot(f"slot{s}", random_choices(rng, second, byte), rng.choice(("a", "b")))
        for s in range(rng.randint(3, 6))
    )
    edges = [random_edge(rng, slots, s, second, byte) for s in range(len(slots) - 1)]
    base_s, base_bytes = rng.choice((0.0, 3.0)) * second, rng.randint(0, 20) * byte
    covers = random_covers(random.Random(seed), slots) if seed % 5 == 2 else ()
    shared = random_shared(random.Random(seed), slots, byte) if seed % 3 == 1 else ()
    free = PlanningProblem(slots, tuple(edges), 0, base_s, base_bytes, covers, shared=shared)
    sizes = sorted(memory for _, memory in possible(free).values())
    if not sizes:
        return free
    limit = sizes[int(len(sizes) * 0.6 * rng.random() ** 2)] + rng.choice((0, 0, 1, -1))
    return dataclasses.replace(free, limit_bytes=limit)


def random_shared(rng: random.Random, slots: tuple[Slot, ...], byte: int) -> tuple[Shared, ...]:
    """One or two things that some choices take, and that are there once."""
    return tuple(
        Shared(
            f"table{k}",
            {
                s: frozenset(c for c in range(len(slot.choices)) if rng.random() < 0.5)
                for s, slot in enumerate(slots)
                if rng.random() < 0.7
            },
            Share(0, resident_bytes=rng.randint(1, 15) * byte),
        )
        for k in range(rng.randint(1, 2))
    )


def random_covers(rng: random.Random, slots: tuple[Slot, ...]) -> tuple[Cover, ...]:
    """One or two things that at least one slot must use; mostly the slower choices do."""
    return tuple(
        Cover(
            f"axis{k}",
            tuple(
                tuple(c for c in range(len(slot.choices)) if rng.random() < 0.3) for slot in slots
            ),
        )
        for k in range(rng.randint(1, 2))
    )


def random_choices(rng: random.Random, second: float, byte: int) -> tuple[Choice, ...]:
    """Mostly the slower one is the smaller one; some cost no time or no memory."""
    ranks = rng.sample(range(10), rng.randint(2, 4))
    return tuple(
        Choice(
            rng.choice((0.0, 1.0, 1.0)) * (rank + rng.random()) * second,
            rng.choice((0, 6, 6)) * (10 - rank) * byte,
            rng.choice((0, 10, 30)) * byte,
            again_bytes=rng.choice((0, 0, 20, 40)) * byte,
            freed_bytes=rng.choice((0, 0, 0, 15)) * byte,
        )
        for rank in ranks
    )


def random_edge(
    rng: random.Random, slots: tuple[Slot, ...], source: int, second: float, byte: int
) -> Edge:
    """Used by the next slot, by up to two later ones, and at times twice by one slot."""
    later = range(source + 1, len(slots))
    users = [source + 1, *(rng.choice(later) for _ in range(rng.choice((0, 0, 1, 2))))]
    layouts = rng.randint(2, 3)

    def use(slot: int) -> Use:
        options = (*range(layouts), *range(layouts), None)
        return Use(slot, tuple(rng.choice(options) for _ in slots[slot].choices))

    def price(made: int, needed: int) -> float | None:
        if made == needed:
            return 0.0
        return None if rng.random() < 0.15 else rng.choice((0.0, rng.uniform(0.5, 5))) * second

    table = tuple(tuple(price(m, n) for n in range(layouts)) for m in range(layouts))
    sizes = tuple(
        tuple(0 if m == n else rng.choice((0, 7, 25)) * byte for n in range(layouts))
        for m in range(layouts)
    )
    return Edge(f"value{source}", use(source), tuple(map(use, users)), table, sizes)


def possible(problem: PlanningProblem) -> dict[tuple[int, ...], tuple[float, int]]:
    """Every choice that the edges admit, with its cost."""
    every = itertools.product(*(range(len(slot.choices)) for slot in problem.slots))
    costs = ((choices, evaluate(problem, choices)) for choices in every)
    return {choices: cost for choices, cost in costs if cost is not None}


@functools.cache
def brute_force(seed: int) -> float | Infeasible:
    problem = random_problem(seed)
    costs = list(possible(problem).values())
    if not costs:
        return Infeasible(0, impossible=True)
    fitting = [seconds for seconds, memory in costs if memory <= problem.limit_bytes]
    if not fitting:
        return Infeasible(min(memory for _, memory in costs) - problem.limit_bytes)
    return min(fitting)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("first", range(0, INSTANCES, 30))
def test_equals_brute_force(first: int, solver: str) -> None:
    for seed in range(first, first + 30):
        problem, expected = random_problem(seed), brute_force(seed)
        found = solve(problem, solver=solver, gap=1e-9)
        if isinstance(expected, Infeasible):
            assert found == expected, seed
            continue
        assert isinstance(found, Solution), seed
        assert found.seconds == pytest.approx(expected, rel=1e-6, abs=1e-15), seed
        assert found.memory_bytes <= problem.limit_bytes
        assert (found.seconds, found.memory_bytes) == evaluate(problem, found.choices)
        assert found.bound_seconds <= expected * (1 + 1e-9), seed
        assert found.bound_seconds == pytest.approx(expected, rel=1e-6, abs=1e-15), seed


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_presolve_that_was_wrong(solver: str) -> None:
    """HiGHS 1.15's presolve found nothing that fits here."""
    problem = random_problem(3245)
    solution = solve(problem, solver=solver)
    assert isinstance(solution, Solution)
    fitting = [s for s, size in possible(problem).values() if size <= problem.limit_bytes]
    assert solution.seconds == pytest.approx(min(fitting), rel=1e-6)


def test_instances_are_worth_solving() -> None:
    """At least half have a binding limit; sharing and forbidden pairs decide some; some fail."""
    kinds = {"binding": 0, "free": 0, "short": 0, "shared": 0, "forbidden": 0}
    for seed in range(INSTANCES):
        problem, best = random_problem(seed), brute_force(seed)
        if isinstance(best, Infeasible):
            kinds["short"] += not best.impossible
            continue
        unlimited = min(seconds for seconds, _ in possible(problem).values())
        kinds["binding" if best > unlimited else "free"] += 1
        kinds["shared"] += any(len(set(e.uses)) > 1 for e in problem.edges)
        kinds["forbidden"] += any(s is None for e in problem.edges for r in e.seconds for s in r)
    assert kinds["binding"] >= INSTANCES / 2, kinds
    assert min(kinds.values()) >= 5, kinds


def two_uses(needed: tuple[int, int], seconds: float | None = 2.0) -> PlanningProblem:
    """One value, made in layout 0, that two slots need: the first may take `needed[0]` only."""
    slot = (Choice(1.0, 10, 0),)
    uses = tuple(Use(1 + k, (layout,)) for k, layout in enumerate(needed))
    table = ((0.0, seconds, seconds), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    sizes = ((0, 5, 5), (0, 0, 0), (0, 0, 0))
    slots = tuple(Slot(name, slot, name) for name in "abc")
    return PlanningProblem(slots, (Edge("v", Use(0, (0,)), uses, table, sizes),), 100)


@pytest.mark.parametrize("solver", SOLVERS)
def test_shared_conversion_counts_once(solver: str) -> None:
    once, twice = (solve(two_uses(n), solver=solver) for n in ((1, 1), (1, 2)))
    assert isinstance(once, Solution) and isinstance(twice, Solution)
    assert (once.seconds, once.memory_bytes) == (5.0, 35)
    assert (twice.seconds, twice.memory_bytes) == (7.0, 40)
    tight = dataclasses.replace(two_uses((1, 1)), limit_bytes=35)
    assert isinstance(solve(tight, solver=solver), Solution)
    assert solve(dataclasses.replace(tight, limit_bytes=34), solver=solver) == Infeasible(1)


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_is_shared_counts_once_among_slots_that_are_counted(solver: str) -> None:
    """Three alike slots, told apart by nothing: any number of them may take it."""
    choices = (Choice(1.0, 3, 0), Choice(2.0, 4, 0))
    slots = tuple(Slot(name, choices, name) for name in "abc")
    once = Shared("table", dict.fromkeys(range(3), frozenset({0})), Share(0, resident_bytes=6))
    problem = PlanningProblem(slots, (), 15, shared=(once,))
    every = solve(problem, solver=solver)
    assert isinstance(every, Solution) and (every.seconds, every.memory_bytes) == (3.0, 15)
    none = solve(dataclasses.replace(problem, limit_bytes=14), solver=solver)
    assert isinstance(none, Solution) and (none.seconds, none.memory_bytes) == (6.0, 12)
    assert solve(dataclasses.replace(problem, limit_bytes=11), solver=solver) == Infeasible(1)


@pytest.mark.parametrize("solver", SOLVERS)
def test_impossible(solver: str) -> None:
    problem = two_uses((1, 1), seconds=None)
    assert evaluate(problem, (0, 0, 0)) is None
    assert solve(problem, solver=solver) == Infeasible(0, impossible=True)


@pytest.mark.parametrize("solver", SOLVERS)
def test_transients_add_up_within_a_group_only(solver: str) -> None:
    def problem(*groups: str) -> PlanningProblem:
        slots = tuple(Slot(g, (Choice(1.0, 3, 10), Choice(2.0, 3, 4)), g) for g in groups)
        return PlanningProblem(slots, (), 19)

    apart, together = solve(problem("a", "b"), solver=solver), solve(problem("a", "a"))
    assert isinstance(apart, Solution) and isinstance(together, Solution)
    assert (apart.seconds, apart.memory_bytes) == (2.0, 16)
    assert evaluate(problem("a", "a"), (0, 1)) == (3.0, 20)
    assert (together.seconds, together.memory_bytes) == (4.0, 14)


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_byte_decides_among_80_gigabytes(solver: str) -> None:
    sizes = (80 * 10**9 // 8 + 1, 80 * 10**9 // 8 - 1)
    slots = tuple(
        Slot(f"s{k}", (Choice(1.0 + k / 8, sizes[0], 0), Choice(2.0, sizes[1], 0)))
        for k in range(8)
    )
    problem = PlanningProblem(slots, (), 80 * 10**9)
    exact = solve(problem, solver=solver, gap=0.0)
    below = solve(dataclasses.replace(problem, limit_bytes=80 * 10**9 - 1), solver=solver, gap=0.0)
    assert isinstance(exact, Solution) and isinstance(below, Solution)
    assert exact.choices == (0, 0, 0, 0, 1, 1, 1, 1)
    assert below.choices == (0, 0, 0, 1, 1, 1, 1, 1)
    none = solve(dataclasses.replace(problem, limit_bytes=80 * 10**9 - 9), solver=solver)
    assert none == Infeasible(1)


def test_no_slots() -> None:
    problem = PlanningProblem((), (), 10, 1.5, 7)
    assert solve(problem) == Solution((), 1.5, 7, 1.5)
    assert solve(dataclasses.replace(problem, limit_bytes=5)) == Infeasible(2)


@pytest.mark.parametrize("solver", SOLVERS)
def test_cutoff(solver: str) -> None:
    problem = next(p for p in map(random_problem, range(INSTANCES)) if len(possible(p)) > 50)
    best = solve(problem, solver=solver)
    assert isinstance(best, Solution)
    assert solve(problem, solver=solver, cutoff_s=best.seconds * 0.999) == Infeasible(0)
    again = solve(problem, solver=solver, cutoff_s=best.seconds * 1.001)
    assert isinstance(again, Solution) and again.seconds == pytest.approx(best.seconds)


def layers(count: int) -> PlanningProblem:
    """Identical layers of three regions, each in 3 layouts × recompute or not. Half the memory
    that the choices differ by is there; each value goes on to the next region."""
    rng = random.Random(7)
    kinds = [
        tuple(
            Choice(
                (5 + r) * 1e-3 * (1.3 if c % 2 else 1.0) * rng.uniform(0.9, 1.1),
                int(6e8 * (0.3 if c % 2 else 1.0) * rng.uniform(0.8, 1.2)) // 512 * 512,
                rng.randint(1, 4) * 2**27,
            )
            for c in range(6)
        )
        for r in range(3)
    ]
    slots = tuple(
        Slot(f"{layer}/{r}", kinds[r], str(layer)) for layer in range(count) for r in range(3)
    )
    table = tuple(tuple(abs(m - n) * 4e-4 for n in range(3)) for m in range(3))
    sizes = tuple(tuple(abs(m - n) * 2**22 for n in range(3)) for m in range(3))
    of = tuple(c // 2 for c in range(6))
    edges = tuple(
        Edge(f"h{s}", Use(s, of), (Use(s + 1, of),), table, sizes) for s in range(len(slots) - 1)
    )
    totals = [f(c.resident_bytes for c in slot.choices) for slot in slots for f in (min, max)]
    return PlanningProblem(slots, edges, sum(totals) // 2)


@pytest.mark.parametrize("solver", SOLVERS)
def test_many_identical_layers(solver: str) -> None:
    problem, gap = layers(48), {"highs": 1e-3, "cbc": 3e-3}[solver]
    found = solve(problem, solver=solver, gap=gap)
    assert isinstance(found, Solution)
    assert found.memory_bytes <= problem.limit_bytes
    assert 0 <= found.seconds - found.bound_seconds <= 1.001 * gap * found.seconds
    unlimited = solve(dataclasses.replace(problem, limit_bytes=10**15), solver=solver)
    assert isinstance(unlimited, Solution) and unlimited.seconds < found.bound_seconds


@pytest.mark.parametrize("solver", SOLVERS)
def test_same_problem_same_answer(solver: str) -> None:
    for problem in (layers(4), *map(random_problem, range(10))):
        first, second = (solve(problem, solver=solver, gap=1e-3) for _ in range(2))
        assert first == second


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_time_limit_leaves_a_true_bound(solver: str) -> None:
    problem = layers(16)
    exact = solve(problem, gap=1e-3)
    assert isinstance(exact, Solution)
    started = time.monotonic()
    try:
        stopped = solve(problem, solver=solver, gap=0.0, time_limit_s=0.2)
    except AutoparError as error:
        assert "time_limit_s" in str(error)
        return
    assert time.monotonic() - started < 10
    assert isinstance(stopped, Solution)
    assert stopped.memory_bytes <= problem.limit_bytes
    assert stopped.bound_seconds <= exact.seconds


def test_bytes_hidden_by_a_tolerance_are_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that lets a choice through which is over the limit gets a tighter row."""
    problem = layers(2)
    honest = solve(problem)

    def loose(rows: Rows, headroom_bytes: int) -> None:
        limit_memory(rows, headroom_bytes + 2**24)

    monkeypatch.setattr(sieve, "limit_memory", loose)
    found = solve(problem)
    assert isinstance(found, Solution) and isinstance(honest, Solution)
    assert found.memory_bytes <= problem.limit_bytes
    assert found.bound_seconds <= honest.seconds <= found.seconds


def test_highs_runs_after_others_used_it_with_more_threads() -> None:
    """HiGHS refuses another number of threads than the process first used."""
    highspy.Highs.resetGlobalScheduler(True)
    other = highspy.Highs()  # type: ignore[no-untyped-call]
    other.setOptionValue("output_flag", False)
    other.setOptionValue("threads", 2)
    other.addVar(0.0, 1.0)
    assert other.run() == highspy.HighsStatus.kOk
    assert isinstance(solve(two_uses((1, 1))), Solution)


def test_unknown_solver() -> None:
    with pytest.raises(AutoparError, match='no solver is called \'scip\': choose "highs" or "cbc"'):
        solve(two_uses((1, 1)), solver="scip")


def test_dominated_choices_go() -> None:
    costs = ((2.0, 5, 1), (1.0, 5, 1), (1.0, 5, 1), (1.0, 6, 1), (3.0, 4, 9))
    slot = Slot("s", tuple(Choice(*cost) for cost in costs))
    alone = PlanningProblem((slot,), (), 100)
    assert undominated(alone) == ((1, 4),)
    edge = Edge("v", Use(0, (0, 1, 1, 1, 1)), (), ((0.0,), (0.0,)), ((0,), (0,)))
    assert undominated(dataclasses.replace(alone, edges=(edge,))) == ((0, 1, 4),)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(1000, 10**6), solver=st.sampled_from(SOLVERS))
def test_no_random_choice_is_better(seed: int, solver: str) -> None:
    problem, rng = random_problem(seed), random.Random(seed)
    found = solve(problem, solver=solver)
    if isinstance(found, Solution):
        assert found.memory_bytes <= problem.limit_bytes
    best = found.seconds if isinstance(found, Solution) else math.inf
    for _ in range(200):
        cost = evaluate(problem, [rng.randrange(len(slot.choices)) for slot in problem.slots])
        if cost is not None and cost[1] <= problem.limit_bytes:
            assert best <= cost[0] * (1 + 1e-6)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_a_limit_of_nodes_leaves_a_solution_and_a_bound(solver: str) -> None:
    """Of a programme that one node doesn't settle."""

    def covering() -> pulp.LpProblem:
        draw = random.Random(3)
        model = pulp.LpProblem("covering", pulp.LpMinimize)
        taken = [model.add_variable(f"x_{i:02}", 0, 1, pulp.LpInteger) for i in range(40)]
        for row in range(6):
            sizes = [draw.randint(100, 999) for _ in taken]
            need = pulp.LpAffineExpression(list(zip(taken, sizes, strict=True)))
            half = sum(sizes) / 2 + 0.5
            model.addConstraint(pulp.LpConstraint(need, pulp.LpConstraintGE, f"row_{row}", half))
        model.setObjective(pulp.LpAffineExpression([(x, draw.randint(500, 600)) for x in taken]))
        return model

    stopped, whole = covering(), covering()
    short = run(stopped, solver, gap=0.0, most_nodes=1)
    full = run(whole, solver, gap=0.0)
    assert (short.status, short.has_values, full.status) == ("stopped", True, "solved")
    best, found = pulp.value(whole.objective), pulp.value(stopped.objective)
    assert short.bound < best <= found
    assert full.bound == pytest.approx(best, rel=1e-6)

"""The relaxation against brute force: its bound, its excesses, and what is solved with them."""

import dataclasses
import itertools
import random

import pytest
from test_ilp import SOLVERS, brute_force, random_problem
from test_stage_problem import drawn

from autopar.planning import loose, sieve
from autopar.planning.evaluate import evaluate
from autopar.planning.ilp import least_bytes, over_bytes, solve
from autopar.planning.loose import least_bytes_of
from autopar.planning.problem import Choice, Infeasible, PlanningProblem, Slot, Solution
from autopar.planning.relaxed import alike_slots as alike
from autopar.planning.relaxed import loosened, relaxed


def costs(problem: PlanningProblem) -> dict[tuple[int, ...], tuple[float, int]]:
    """Every choice that is possible, with its seconds and bytes."""
    every = itertools.product(*(range(len(slot.choices)) for slot in problem.slots))
    found = ((choices, evaluate(problem, choices)) for choices in every)
    return {choices: cost for choices, cost in found if cost is not None}


def without_freed(problem: PlanningProblem) -> PlanningProblem:
    """The same where nothing is freed for what runs again: of that the relaxation takes the most
    that there may be, so that it is less close."""

    def kept(choice: Choice) -> Choice:
        shares = tuple(dataclasses.replace(share, freed_bytes=0) for share in choice.shares)
        return dataclasses.replace(choice, freed_bytes=0, shares=shares)

    known = {id(slot.choices): tuple(map(kept, slot.choices)) for slot in problem.slots}
    slots = [dataclasses.replace(s, choices=known[id(s.choices)]) for s in problem.slots]
    return dataclasses.replace(problem, slots=tuple(slots))


@pytest.mark.parametrize("bins", [None, 2])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("first", range(0, 48, 24))
def test_bound_and_excess(
    first: int, solver: str, bins: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No choice that fits is faster than the bound, nor than the bound and its excess; where the
    relaxation says that nothing fits, nothing does. `bins`: so few kinds of slots stand for all."""
    if bins is not None:
        monkeypatch.setattr(loose, "FEW", 0)
        monkeypatch.setattr(loose, "BINS", bins)
    every = tight = 0
    for seed in range(first, first + 24):
        problem = random_problem(seed) if seed % 2 else drawn(seed)
        low = relaxed(problem, solver)
        fitting = {c: s for c, (s, size) in costs(problem).items() if size <= problem.limit_bytes}
        if not low.feasible:
            assert not fitting, seed
            continue
        for choices, seconds in fitting.items():
            excess = max(float(row[c]) for row, c in zip(low.excess_s, choices, strict=True))
            assert seconds >= (low.bound_s + excess) * (1 - 1e-9) - 1e-12, seed
        if problem.shared:
            continue  # a relaxation leaves it out
        plain = without_freed(problem)
        plain_s = [s for s, size in costs(plain).values() if size <= plain.limit_bytes]
        every += bool(plain_s)
        tight += bool(plain_s) and relaxed(plain, solver).bound_s > 0.7 * min(plain_s)
    assert every >= 10 and tight >= 0.4 * every


def test_least_bytes() -> None:
    for seed in range(40):
        problem = random_problem(seed) if seed % 2 else drawn(seed)
        sizes = [size for _, size in costs(problem).values()]
        least = least_bytes_of(loosened(problem, alike(problem)))
        assert not sizes or least <= min(sizes), seed


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_choice_is_over_the_limit_by_fewer_bytes(solver: str) -> None:
    """Than the multipliers say, who come close to it, and closer than each slot's least alone."""
    near = far = 0
    for seed in range(40):
        problem = random_problem(seed) if seed % 2 else drawn(seed)
        sizes = [size for _, size in costs(problem).values()]
        if not sizes:
            continue
        tight = dataclasses.replace(problem, limit_bytes=min(sizes) // 2)
        over = over_bytes(tight, solver)
        assert over <= min(sizes) - tight.limit_bytes + 1e-6 * min(sizes), seed
        plain = without_freed(tight)
        own = min(size for _, size in costs(plain).values()) - plain.limit_bytes
        near += over_bytes(plain, solver) >= 0.8 * own
        far += least_bytes(tight) - tight.limit_bytes > over + 1e-6 * min(sizes)
        roomy = dataclasses.replace(problem, limit_bytes=min(sizes))
        assert over_bytes(roomy, solver) <= 1e-6 * min(sizes), seed
    assert near >= 20 and far == 0


@pytest.mark.parametrize("solver", SOLVERS)
def test_sieve(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Solved from few choices at first, the answers are the same."""
    monkeypatch.setattr(sieve, "SMALL", 0)
    for seed in range(20):
        expected = brute_force(seed)
        found = solve(random_problem(seed), solver=solver, gap=1e-9)
        if isinstance(expected, Infeasible):
            assert found == expected, seed
            continue
        assert isinstance(found, Solution), seed
        assert found.seconds == pytest.approx(expected, rel=1e-6, abs=1e-15), seed
        assert found.bound_seconds <= expected * (1 + 1e-9), seed
    for seed in range(12):
        staged = drawn(seed)
        fitting = [s for s, size in costs(staged).values() if size <= staged.limit_bytes]
        found = solve(staged, solver=solver, gap=1e-9)
        if not fitting:
            assert isinstance(found, Infeasible), seed
        else:
            assert isinstance(found, Solution), seed
            assert found.seconds == pytest.approx(min(fitting), rel=1e-6), seed


def twins(seed: int) -> PlanningProblem:
    """Two classes of alike slots: only how often each choice is taken matters."""
    rng = random.Random(seed)

    def some() -> tuple[Choice, ...]:
        return tuple(
            Choice(rng.randint(1, 20) / 4, rng.randint(0, 30), rng.randint(0, 15))
            for _ in range(rng.randint(2, 4))
        )

    choices = some(), some()
    slots = tuple(Slot(f"s{s}", choices[s % 2], f"g{s}") for s in range(6))
    free = PlanningProblem(slots, (), 0, 1.0, 5)
    sizes = sorted(size for _, size in costs(free).values())
    return dataclasses.replace(free, limit_bytes=sizes[len(sizes) // rng.choice((2, 5, 20))])


@pytest.mark.parametrize("solver", SOLVERS)
def test_alike_slots_are_counted(solver: str) -> None:
    for seed in range(15):
        problem = twins(seed)
        best = min(s for s, size in costs(problem).values() if size <= problem.limit_bytes)
        found = solve(problem, solver=solver, gap=1e-9)
        assert isinstance(found, Solution), seed
        assert found.seconds == pytest.approx(best, rel=1e-7), seed
        assert found.memory_bytes <= problem.limit_bytes


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_fits_though_it_is_the_least_in_nothing(solver: str) -> None:
    """Two alike slots: neither the choice with the least resident bytes, nor that with the least
    transient ones, nor that with the least of both together fits, but one between them does."""
    choices = Choice(1.0, 0, 100), Choice(1.0, 45, 5), Choice(2.0, 20, 40)
    problem = PlanningProblem((Slot("a", choices, "a"), Slot("b", choices, "b")), (), 85)
    assert relaxed(problem, solver).feasible
    found = solve(problem, solver=solver, gap=1e-9)
    assert isinstance(found, Solution) and found.choices == (2, 2) and found.memory_bytes == 80

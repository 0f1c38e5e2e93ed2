"""The planner against its own accounting: what the search optimises is what a plan then states."""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
from clusters import cluster
from models import MODELS

from autopar import InfeasibleError
from autopar.capture import capture
from autopar.cluster import ClusterSpec, resolve_cluster
from autopar.graph.analyse import analyse
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.convert import ImpossibleError
from autopar.layouts.program import Program
from autopar.layouts.state_ratio import StateRatio
from autopar.planning.account import account, books_by_stage, spent_in_step
from autopar.planning.books import one_call
from autopar.planning.evaluate import evaluate
from autopar.planning.joined import Late, empty_call, late_rates, whole_calls
from autopar.planning.layered import Layered
from autopar.planning.meshes import axes_in_order, settings
from autopar.planning.outer import Dropped, open_setting
from autopar.planning.pins import read_pins
from autopar.planning.price import Pricer
from autopar.planning.prices import Prices
from autopar.planning.problem import PlanningProblem
from autopar.planning.program_effects import program_effects
from autopar.planning.search import Found, search
from autopar.planning.separable import why_inseparable
from autopar.planning.space import space_of
from autopar.planning.tried import SearchOptions
from autopar.planning.weights import WINDOWS, Row, Weights, beside, seconds_of, sharpest
from autopar.planning.whole_price import whole_problem
from autopar.planning.works import Works
from autopar.plugin import BUCKET, Candidate, Collective, Effect
from autopar.registry import select_cost_models, select_strategies

RATIO = StateRatio(2.0)
"""AdamW keeps two numbers for each of a parameter."""
ROOMY = 10**12
STRATEGIES = ("data", "sequence", "tensor", "zero")
RANDOM_CHOICES = 30
CALL_S = 6e-5
"""An all-reduce of nothing: a ring of four takes six hops of 10 µs."""


@dataclass(frozen=True)
class Case:
    """One setting of one model, as the search sees it."""

    model: ModelGraph
    layered: Layered
    prices: Prices
    problem: PlanningProblem

    def program(self, choices: tuple[int, ...]) -> Program:
        """The program of one choice per slot."""
        return self.layered.program(choices)

    def random_choices(self, count: int) -> Iterator[tuple[int, ...]]:
        """As many choices, from a fixed seed."""
        draw = random.Random(0)
        for _ in range(count):
            yield tuple(draw.randrange(len(slot.choices)) for slot in self.problem.slots)

    def random_programs(self, count: int) -> Iterator[Program]:
        """As many programs, with any candidate in each region, from a fixed seed."""
        draw = random.Random(0)
        for _ in range(count):
            yield self._of(draw.choice(some) for some in self.layered.pricer.candidates.values())

    def all_programs(self) -> Iterator[Program]:
        """Every program that there is."""
        return map(self._of, itertools.product(*self.layered.pricer.candidates.values()))

    def _of(self, taken: Iterable[Candidate]) -> Program:
        chosen: dict[str, dict[str, Candidate]] = {}
        for (path, region), candidate in zip(self.layered.pricer.candidates, taken, strict=True):
            chosen.setdefault(path, {})[region] = candidate
        return Program(self.model, self.layered.pricer.setting, chosen)

    def cost(self, program: Program) -> tuple[float, int] | None:
        """Seconds and bytes of a program, counted from what will run; None where it can't, or an
        axis lies idle."""
        every = [c for regions in program.choices.values() for c in regions.values()]
        axes = [axis for axis, size in program.setting.mesh.axes if size > 1]
        if not all(any(c.uses(axis) for c in every) for axis in axes):
            return None
        try:
            predicted = account(program, self.prices, RATIO, 1).predicted
        except ImpossibleError:
            return None
        return predicted.step_s, predicted.memory_bytes


def spec() -> ClusterSpec:
    return resolve_cluster(cluster())


@cache
def graph_of(model: str) -> ModelGraph:
    job = MODELS[model]()
    return analyse(capture(job.model, job.batch, job.loss))


@cache
def cases(model: str) -> Mapping[str, Case]:
    """Every legal setting of a model on four devices, by its name."""
    graph, strategies = graph_of(model), select_strategies(STRATEGIES)
    pins, inseparable = read_pins(None, (), strategies), why_inseparable(graph)
    found = {}
    for setting in settings(axes_in_order(strategies), 4, {}, None, graph.batch_size, 0):
        outer = open_setting(graph, setting, strategies, pins, inseparable)
        assert not isinstance(outer, Dropped), outer
        prices = Prices(select_cost_models(), outer.setting.mesh, spec())
        pricer = Pricer(graph, outer.setting, prices, outer.candidates, RATIO, Works(prices))
        name = f"{setting.mesh}, {setting.microbatches} microbatches"
        layered = Layered(pricer)
        found[name] = Case(graph, layered, prices, whole_problem(layered, ROOMY))
    return found


def outside_s(case: Case, program: Program) -> float:
    """What a plan's step has on top of the programme's objective: buckets that aren't full, and
    units that don't have all bytes that their layer's could have."""
    every = [(path, effect) for path, effect in program_effects(program, RATIO)]
    outside = 0.0
    for path, effect, calls in whole_calls(every):
        if isinstance(effect, Collective) and effect.unit:
            times = 1 if effect.per == "step" else program.setting.microbatches
            account_s = calls * case.prices.cost(one_call(effect, calls)) * times
            shares = [e for p, e in every if _joins(effect, path, p, e)]
            own_s = sum(case.prices.bill([e], 1).communication_s for e in shares)
            if effect.unit != BUCKET:
                rates = rates_of(case, path)
                empty = empty_call(effect)
                own_s += case.prices.cost(empty) + effect.bytes * sum(rates[empty])
            outside += account_s - own_s * times
    return outside


def _joins(whole: Collective, path: str, other: str, effect: Effect) -> bool:
    if not isinstance(effect, Collective) or empty_call(effect) != empty_call(whole):
        return False
    return whole.unit == BUCKET or path == other


def rates_of(case: Case, path: str) -> Mapping[Collective, Late]:
    """What a byte of each unit of a layer costs beyond its full rate."""
    pricer = case.layered.pricer
    regions = {r: some for (p, r), some in pricer.candidates.items() if p == path}
    rows = [[pricer.bill(path, c).units for c in some] for some in regions.values()]
    return late_rates(rows, pricer.prices.seconds)


def searched(model: str, limit_bytes: int) -> Found:
    """The whole search, to the optimum."""
    strategies = select_strategies(STRATEGIES)
    pins = read_pins(None, (), strategies)
    options = SearchOptions(limit_bytes, 0.0, None, RATIO)
    args = (graph_of(model), spec(), strategies, select_cost_models(), pins, options)
    return search(space_of(*args))


# ---------------------------------------------------------------- prices and accounts


@pytest.mark.parametrize("model", MODELS)
def test_every_setting_is_open(model: str) -> None:
    """dp × tp = 4, with every number of microbatches that leaves each rank whole samples."""
    names = [f"{mesh}, {n} microbatches" for mesh in ("tp4",) for n in (1, 2, 4, 8)]
    names += [f"dp2 · tp2, {n} microbatches" for n in (1, 2, 4)]
    names += [f"dp4, {n} microbatches" for n in (1, 2)]
    assert list(cases(model)) == names


def test_microbatches_are_all_that_divide_the_batch() -> None:
    found = settings(axes_in_order(select_strategies(["data"])), 4, {}, None, 48, 0)
    assert [one.microbatches for one in found] == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize("model", MODELS)
def test_objective_is_the_account(model: str) -> None:
    """Seconds (but for `outside_s`, never below 0) and bytes of random choices, as the search sums
    them up from regions and edges, are those counted from the finished program."""
    possible = 0
    for name, case in cases(model).items():
        for choices in case.random_choices(RANDOM_CHOICES):
            # An axis may lie idle here: what is compared is what things cost.
            anything = replace(case.problem, covers=())
            program, cost = case.program(choices), evaluate(anything, choices)
            if cost is None:
                with pytest.raises(ImpossibleError):
                    program.flows  # noqa: B018 (made on first use)
                continue
            possible += 1
            seconds, memory_bytes = cost
            predicted = account(program, case.prices, RATIO, 1).predicted
            assert predicted.memory_bytes == memory_bytes, (name, choices)
            more_s = outside_s(case, program)
            assert more_s >= -1e-9 * seconds, (name, choices)
            expected_s = seconds + more_s
            assert predicted.step_s == pytest.approx(expected_s, rel=1e-9), (name, choices)
    assert possible >= RANDOM_CHOICES * len(cases(model)) // 2


def overlapping() -> ClusterSpec:
    """Four devices whose hosts run ahead and whose network runs beside compute."""
    four = resolve_cluster("a100:4")
    assert four.device.kernels is not None
    kernels = replace(four.device.kernels, overlap_slowdown=0.25, collective_s=1e-5)
    return replace(four, device=replace(four.device, kernels=kernels))


def drawn_weights(draw: random.Random, rows: Sequence[Row]) -> Weights:
    """In each window any row, or a mixture of two."""
    windows = []
    for _ in WINDOWS:
        share, one, other = draw.choice([0.0, 0.3, 1.0]), draw.choice(rows), draw.choice(rows)
        device, host, network = (
            share * a + (1 - share) * b for a, b in zip(one, other, strict=True)
        )
        windows.append((device, host, network))
    return Weights(tuple(windows))


def choices_of(layered: Layered, program: Program) -> tuple[int, ...] | None:
    """A program as one choice a slot; None where a layer's columns lack it."""
    found = []
    for path, region in layered.keys:
        chosen = program.choices[path]
        if not path:
            found.append(layered.pricer.candidates[path, region].index(chosen[region]))
            continue
        kind = layered.kinds[path]
        picks = tuple(some.index(chosen[name]) for name, some in kind.regions.items())
        if picks not in kind.columns.picks:
            return None
        found.append(kind.columns.picks.index(picks))
    return tuple(found)


def priced_anew(case: Case, cluster: ClusterSpec) -> tuple[Pricer, Prices]:
    """The case's candidates on another cluster."""
    prices = Prices(select_cost_models(), case.prices.mesh, cluster)
    old = case.layered.pricer
    args = (case.model, old.setting, prices, old.candidates, RATIO, Works(prices))
    return Pricer(*args), prices


@pytest.mark.parametrize("model", MODELS)
def test_no_weights_count_more_than_the_account(model: str) -> None:
    """By any row of the overlap model in each window, and any mixture of rows, no program costs
    more than the account says; by the sharpest rows it costs as much, but for calls that aren't
    full."""
    draw, rows = random.Random(1), beside(select_cost_models()).rows(overlapping())
    assert len(set(rows)) > 10
    compared = sharply = 0
    for case in cases(model).values():
        pricer, prices = priced_anew(case, overlapping())
        for choices in case.random_choices(3):
            program = case.program(choices)
            try:
                (books,) = books_by_stage(program, prices, RATIO)
            except ImpossibleError:
                continue
            spent = spent_in_step([books], program.setting)
            sharp = sharpest(rows, [spent], "highs")
            assert seconds_of(spent, [sharp]) == pytest.approx(books.step_s, rel=1e-9)
            for weights in (*(drawn_weights(draw, rows) for _ in range(3)), sharp):
                layered = Layered(pricer.weighing(weights))
                taken = choices_of(layered, program)
                if taken is None:
                    continue  # another program is no worse in anything, by these weights
                cost = evaluate(replace(whole_problem(layered, ROOMY), covers=()), taken)
                assert cost is not None and cost[0] <= books.step_s * (1 + 1e-9), (weights, choices)
                compared += 1
                if weights == sharp:
                    assert cost[0] >= books.step_s * 0.9
                    sharply += 1
    assert compared >= 3 * len(cases(model)) and sharply >= len(cases(model)) // 2


# ---------------------------------------------------------------- the search


@cache
def random_costs(model: str) -> tuple[tuple[float, int], ...]:
    """Seconds and bytes of random programs on every setting."""
    return tuple(
        cost
        for case in cases(model).values()
        for program in case.random_programs(RANDOM_CHOICES)
        if (cost := case.cost(program)) is not None
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tightness", [1, 4, 20])
def test_no_random_program_is_better_than_the_plan(model: str, tightness: int) -> None:
    """Under memory limits that all, and that some of them reach."""
    sizes = sorted(size for _, size in random_costs(model))
    limit_bytes = ROOMY if tightness == 1 else sizes[len(sizes) // tightness]
    found = searched(model, limit_bytes)
    assert found.answer.solution.memory_bytes <= limit_bytes
    fitting = [seconds for seconds, size in random_costs(model) if size <= limit_bytes]
    assert fitting and min(fitting) >= found.answer.step_s * (1 - 1e-9)


@cache
def brute_force() -> tuple[tuple[float, int], ...]:
    """Seconds and bytes of every program of the MLP on every setting."""
    return tuple(
        cost
        for case in cases("mlp").values()
        for program in case.all_programs()
        if (cost := case.cost(program)) is not None
    )


def test_search_equals_brute_force() -> None:
    """The optimum under every memory limit at which another choice becomes possible."""
    front: list[tuple[float, int]] = []
    for seconds, memory_bytes in sorted(brute_force(), key=lambda cost: (cost[1], cost[0])):
        if not front or seconds < front[-1][0] * (1 - 1e-9):
            front.append((seconds, memory_bytes))
    assert len(front) >= 4
    for seconds, memory_bytes in front:
        found = searched("mlp", memory_bytes)
        assert found.answer.step_s == pytest.approx(seconds, rel=1e-9)
        # The programme leaves out that the one bucket isn't full: a call's latency, at most.
        assert seconds - CALL_S <= found.bound_s <= seconds * (1 + 1e-9)
        assert found.answer.solution.memory_bytes <= memory_bytes


def test_shortage_equals_brute_force() -> None:
    least = min(size for _, size in brute_force())
    for limit_bytes in (least - 1, least // 2):
        with pytest.raises(InfeasibleError) as caught:
            searched("mlp", limit_bytes)
        assert caught.value.short_bytes == least - limit_bytes
    answer = searched("mlp", least).answer
    assert answer.solution.memory_bytes == least and math.isfinite(answer.step_s)

"""Bounds of settings that nothing was priced of yet: prices are subadditive, or refused."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from clusters import cluster
from hypothesis import given
from hypothesis import strategies as st
from models import MODELS

from autopar.capture import capture
from autopar.cluster import ClusterSpec, resolve_cluster
from autopar.cost_models.compute import ComputeCost
from autopar.errors import AutoparError
from autopar.graph.analyse import analyse
from autopar.layouts.state_ratio import StateRatio
from autopar.planning import search as search_module
from autopar.planning.deadline import Deadline
from autopar.planning.outer import Dropped
from autopar.planning.pins import read_pins
from autopar.planning.search import search
from autopar.planning.space import Space, space_of
from autopar.planning.tried import SearchOptions, Tried, relax
from autopar.planning.unopened import Unopened
from autopar.planning.watch import Progress
from autopar.plugin import Compute, CostModel, Effect, Mesh
from autopar.registry import select_cost_models, select_strategies

GPU = resolve_cluster("h100:8")
LENGTHS = st.sampled_from([1, 3, 8, 17, 64, 96, 128, 200, 384, 1000, 1024, 4096, 14336, 50257])
PARTS = st.sampled_from([2, 3, 4, 8])
OPTIONS = SearchOptions(8 * 10**9, 1e-3, None, StateRatio(2.0))


def space(
    models: Sequence[CostModel], model: str = "gpt2", spec: ClusterSpec | None = None
) -> Space:
    job = MODELS[model]()
    graph = analyse(capture(job.model, job.batch, job.loss))
    strategies = select_strategies()
    pins = read_pins(None, (), strategies)
    spec = spec or resolve_cluster(cluster())
    return space_of(graph, spec, strategies, models, pins, OPTIONS)


@given(sizes=st.tuples(*[LENGTHS] * 4), parts=PARTS, cut=st.integers(0, 3))
def test_a_part_of_a_product_costs_at_least_its_share(
    sizes: tuple[int, int, int, int], parts: int, cut: int
) -> None:
    """Cut along products, rows, columns or the length that is summed over."""
    whole = list(sizes)
    whole[cut] *= parts

    def seconds(shape: Sequence[int]) -> float:
        products, m, n, k = shape
        moved = 2 * products * (m * k + k * n + m * n)
        effect = Compute(
            "matmul", 2 * products * m * n * k, moved, "bfloat16", "forward", (*shape,)
        )
        return ComputeCost().cost(effect, Mesh(()), GPU)

    assert seconds(whole) <= parts * seconds(sizes) * (1 + 1e-9)


@given(heads=LENGTHS, length=LENGTHS, width=st.sampled_from([32, 64, 128]), parts=PARTS)
def test_a_part_of_attention_costs_at_least_its_share(
    heads: int, length: int, width: int, parts: int
) -> None:
    def seconds(heads: int, queries: int, keys: int) -> float:
        flops, moved = (
            4 * heads * queries * keys * width,
            2 * heads * width * (2 * keys + 2 * queries),
        )
        shape = (heads, queries, keys, width, width)
        effect = Compute("attention", flops, moved, "bfloat16", "forward", shape, 0.5)
        return ComputeCost().cost(effect, Mesh(()), GPU)

    share = parts * seconds(heads, length, length) * (1 + 1e-9)
    assert seconds(heads * parts, length, length) <= share


@pytest.mark.parametrize("spec", [None, resolve_cluster("h100:4")], ids=["in sequence", "beside"])
@pytest.mark.parametrize("model", MODELS)
def test_no_bound_is_above_what_comes_of_the_setting(model: str, spec: ClusterSpec | None) -> None:
    """Before it is opened, when it is open, when it is relaxed, with all that was learnt before."""
    found, opened = space(select_cost_models(), model, spec), 0
    for unopened in found.settings():
        if isinstance(unopened, Dropped):
            continue
        before_s = found.bound_s(unopened)
        assert before_s > 0
        for one in found.open(unopened):
            if isinstance(one, Tried):
                assert before_s <= one.bound_s * (1 + 1e-9)
                more = relax(one, OPTIONS)
                assert isinstance(more, Dropped) or one.bound_s <= more.bound_s
                opened += 1
    assert opened >= 9


@dataclass(frozen=True)
class Steep(ComputeCost):
    """An op costs the more for each flop the larger it is."""

    name: ClassVar[str] = "steep"

    def cost(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> float:
        assert isinstance(effect, Compute)
        return super().cost(effect, mesh, cluster) + 1e-12 * effect.flops**2


def test_prices_that_fall_by_cutting_are_refused() -> None:
    models = [Steep() if model.name == "compute" else model for model in select_cost_models()]
    found = space(models)
    with pytest.raises(AutoparError, match=r"a part of an op must cost at least its share"):
        search(found)


def test_what_is_learnt_raises_bounds() -> None:
    found = space(select_cost_models())
    every = [one for one in found.settings() if isinstance(one, Unopened)]
    first = next(one for one in every if one.asked.mesh.size("tp") == 4)
    later = [one for one in every if one.asked.mesh == first.asked.mesh and one is not first]
    before = [found.bound_s(one) for one in later]
    list(found.open(first))
    after = [found.bound_s(one) for one in later]
    assert len(later) == 3 and all(a > b * 1.1 for a, b in zip(after, before, strict=True))
    assert replace(found, known={}).bound_s(later[0]) == before[0]


def test_without_time_one_setting_goes_all_the_way_to_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others aren't looked at: each look takes it a step further, or says that nothing of it
    fits."""
    whole, looks = space(select_cost_models(), spec=GPU), 0
    monkeypatch.setattr(search_module, "after", lambda _: Deadline(0.0))

    def watch(progress: Progress) -> None:
        nonlocal looks
        looks += 1

    found = search(replace(whole, options=replace(OPTIONS, time_limit_s=100.0)), watch)
    assert sum(seen.solved for seen in found.tried) == 1
    assert looks <= 9 < len(found.tried)

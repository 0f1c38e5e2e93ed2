"""The registry: discovery by entry point, the contract, and what a selection must add up to."""

import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.collectives import CollectiveCost
from autopar.cost_models.compute import ComputeCost
from autopar.cost_models.memory import MemoryCost
from autopar.cost_models.overlap import OverlapCost
from autopar.errors import AutoparError
from autopar.plugin import (
    AxisSpec,
    Candidate,
    ClusterSpec,
    CostModel,
    Effect,
    Mesh,
    Refusal,
    Region,
    Strategy,
)
from autopar.registry import COST_MODELS, STRATEGIES, select_cost_models, select_strategies
from autopar.strategies.data import Data
from autopar.strategies.zero import Zero


class Silent(Strategy):
    """A strategy with nothing to say, for the plugins below to be made from."""

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        return ()


@dataclass(frozen=True)
class Stranger(Silent):
    strength: int = 2
    name: ClassVar[str] = "stranger"


@dataclass(frozen=True)
class Rival(Silent):
    name: ClassVar[str] = "rival"

    def axes(self) -> tuple[AxisSpec, ...]:
        return (AxisSpec("dp", splits_batch=True, locality=0),)


@dataclass(frozen=True)
class Misnamed(Silent):
    name: ClassVar[str] = "else"


class Undecorated(Silent):
    name: ClassVar[str] = "plugin"


@dataclass(frozen=True)
class Unfinished(Strategy):
    name: ClassVar[str] = "plugin"


@dataclass(frozen=True)
class Demanding(Silent):
    strength: int
    name: ClassVar[str] = "plugin"


@dataclass(frozen=True)
class Greedy(CostModel):
    name: ClassVar[str] = "greedy"
    prices: ClassVar[frozenset[str]] = frozenset({"compute", "resident"})

    def cost(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> float:
        return 1.0


PLUGINS = (Stranger, Rival, Misnamed, Undecorated, Unfinished, Demanding, Greedy)


@pytest.fixture(autouse=True, scope="module")
def plugin_module() -> Iterator[None]:
    """A module that entry points can name, with the plugins above and a number."""
    module = types.ModuleType("stranger_plugins")
    for plugin in PLUGINS:
        setattr(module, plugin.__name__, plugin)
    module.__dict__["number"] = 3
    sys.modules[module.__name__] = module
    yield
    del sys.modules[module.__name__]


def point(name: str, attribute: str, group: str = STRATEGIES) -> EntryPoint:
    return EntryPoint(name, f"stranger_plugins:{attribute}", group)


BUILT_IN = (
    EntryPoint("zero", "autopar.strategies.zero:Zero", STRATEGIES),
    EntryPoint("data", "autopar.strategies.data:Data", STRATEGIES),
    EntryPoint("tensor", "autopar.strategies.tensor:Tensor", STRATEGIES),
    EntryPoint("sequence", "autopar.strategies.sequence:Sequence", STRATEGIES),
)
MODELS = (
    EntryPoint("memory", "autopar.cost_models.memory:MemoryCost", COST_MODELS),
    EntryPoint("compute", "autopar.cost_models.compute:ComputeCost", COST_MODELS),
    EntryPoint("collectives", "autopar.cost_models.collectives:CollectiveCost", COST_MODELS),
    EntryPoint("overlap", "autopar.cost_models.overlap:OverlapCost", COST_MODELS),
)


# ---------------------------------------------------------------- selecting


@given(
    st.permutations((*BUILT_IN, EntryPoint("stranger", "stranger_plugins:Stranger", STRATEGIES)))
)
def test_all_installed_in_any_order_of_discovery(points: list[EntryPoint]) -> None:
    names = [strategy.name for strategy in select_strategies(None, points)]
    assert names == ["data", "sequence", "stranger", "tensor", "zero"]


def test_names_and_instances() -> None:
    mine = Stranger(strength=5)
    assert select_strategies(["zero", mine, "data"], BUILT_IN) == (Data(), mine, Zero())


def test_an_instance_replaces_nothing_silently() -> None:
    with pytest.raises(AutoparError, match="'zero' is chosen twice"):
        select_strategies(["zero", Zero(stage=3)], BUILT_IN)


def test_nothing_chosen_is_no_strategy() -> None:
    assert select_strategies((), BUILT_IN) == ()


def test_unknown_name_lists_the_installed() -> None:
    message = "no Strategy plugin 'tensors' is installed: there are data, sequence, tensor, zero"
    with pytest.raises(AutoparError, match=message):
        select_strategies(["tensors"], BUILT_IN)


def test_neither_name_nor_plugin() -> None:
    with pytest.raises(AutoparError, match="3 is neither a name nor a Strategy"):
        select_strategies([3], BUILT_IN)  # type: ignore[list-item]


def test_two_owners_of_an_axis() -> None:
    with pytest.raises(AutoparError, match="axis 'dp' is owned by both 'data' and 'rival'"):
        select_strategies([Rival(), "data"], BUILT_IN)


# ---------------------------------------------------------------- the contract


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_claimed_twice(order: int) -> None:
    points = (*BUILT_IN, point("data", "Stranger"))[::order]
    with pytest.raises(AutoparError) as error:
        select_strategies(["zero"], points)
    assert str(error.value) == (
        "the name 'data' is claimed by 'autopar.strategies.data:Data' of an unknown distribution "
        "and 'stranger_plugins:Stranger' of an unknown distribution: uninstall one of them"
    )


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("number", "is 3, not a subclass of Strategy"),
        ("Greedy", "Greedy'>, not a subclass of Strategy"),
        ("Undecorated", r"Undecorated'>, which isn't decorated with @dataclass\(frozen=True\)"),
        ("Misnamed", "has the name 'else', not that of its entry point"),
        ("Unfinished", "lacks the method refine"),
        ("Demanding", "has no default for its option strength"),
        ("Absent", "can't be loaded: AttributeError"),
    ],
)
def test_a_plugin_that_breaks_the_contract(attribute: str, message: str) -> None:
    start = f"plugin 'plugin', 'stranger_plugins:{attribute}' of an unknown distribution, .*"
    with pytest.raises(AutoparError, match=start + message):
        select_strategies(["plugin"], [point("plugin", attribute)])


def test_a_broken_plugin_that_is_not_chosen_is_not_loaded() -> None:
    assert select_strategies(["data"], (*BUILT_IN, point("plugin", "Absent"))) == (Data(),)


# ---------------------------------------------------------------- cost models


def test_all_cost_models() -> None:
    assert select_cost_models(None, MODELS) == (
        CollectiveCost(),
        ComputeCost(),
        MemoryCost(),
        OverlapCost(),
    )


def test_a_kind_without_a_price() -> None:
    with pytest.raises(
        AutoparError, match=r"'collective' are priced by no cost model: .*compute, memory"
    ):
        select_cost_models(["memory", "compute", "overlap"], MODELS)


def test_a_kind_with_two_prices() -> None:
    with pytest.raises(AutoparError, match="'compute' are priced by 'compute' and 'greedy'"):
        select_cost_models(["compute", "collectives", "overlap", Greedy()], MODELS)


def test_the_environment_has_the_built_in_plugins() -> None:
    names = {strategy.name for strategy in select_strategies()}
    assert {"data", "zero", "tensor", "sequence"} <= names
    assert {"collectives", "compute", "memory", "overlap"} <= {m.name for m in select_cost_models()}

"""All that a plan follows from, as one value: to plan again with one thing changed."""

from dataclasses import dataclass

from autopar.batch_spec import BatchSpec
from autopar.cluster import ClusterSpec, Spec
from autopar.collector import collector_paused
from autopar.graph.model_graph import ModelGraph
from autopar.plan import Plan
from autopar.planning.decide import decide
from autopar.planning.pins import Pins
from autopar.planning.search import Found, search
from autopar.planning.space import space_of
from autopar.planning.tried import SearchOptions
from autopar.planning.watch import Watch, unwatched
from autopar.plugin import CostModel, Strategy


@dataclass(frozen=True)
class Request:
    """A model's graphs, a cluster, the plugins at hand, what is pinned, and the search's limits.
    `batch`, `assumptions`: what the plan says of its batch. `asked`: the cluster as the user said
    it."""

    model: ModelGraph
    cluster: ClusterSpec
    strategies: tuple[Strategy, ...]
    cost_models: tuple[CostModel, ...]
    pins: Pins
    options: SearchOptions
    batch: BatchSpec
    assumptions: tuple[str, ...]
    asked: Spec


def find(request: Request, watch: Watch = unwatched) -> Found:
    """The search alone. Errors: those of `search`."""
    space = space_of(
        request.model,
        request.cluster,
        request.strategies,
        request.cost_models,
        request.pins,
        request.options,
    )
    # It makes millions of objects that stay, and no cycles: the collector would only look on.
    with collector_paused():
        return search(space, watch)


def make_plan(request: Request, watch: Watch = unwatched) -> Plan:
    """Search and decide. Errors: those of `search`."""
    return decide(
        request.model,
        find(request, watch),
        request.cluster,
        request.options,
        request.batch,
        request.assumptions,
    )

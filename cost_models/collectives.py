"""The time of collectives: α-β costs of the cheapest algorithm that topology and library offer."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from autopar.cost_models.collective_algorithms import ranks
from autopar.cost_models.collective_compositions import hierarchical, hierarchical_sharded
from autopar.cost_models.collective_libraries import (
    ALGORITHMS,
    IN_TREES,
    LIBRARIES,
    STANDS_FOR,
)
from autopar.cost_models.topology import Level, Route, route
from autopar.plugin import (
    AutoparError,
    ClusterSpec,
    Collective,
    CostModel,
    Effect,
    Fit,
    Mesh,
    Protocol,
    split_size,
)


@dataclass(frozen=True)
class CollectiveCost(CostModel):
    """The cheapest algorithm for each size, on the links that the group uses with its share.

    `algorithms`: the names of those to choose from; left out, those that the backend's library has
    (`LIBRARIES`), or all that the topology offers for a backend that isn't listed.
    """

    algorithms: tuple[str, ...] | None = None
    name: ClassVar[str] = "collectives"
    prices: ClassVar[frozenset[str]] = frozenset({"collective"})

    def cost(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> float:
        """Seconds. Errors: AutoparError for an unknown collective, for a group that needs more
        devices than the cluster has, and where no algorithm is left."""
        return self._priced(effect, mesh, cluster)[0]

    def explain(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> str:
        """The algorithm that `cost` took."""
        return self._priced(effect, mesh, cluster)[1]

    def _priced(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> tuple[float, str]:
        assert isinstance(effect, Collective)
        if effect.op not in ALGORITHMS:
            raise AutoparError(f"no price for collective {effect.op!r} of {effect.what}")
        levels = route(effect.axes, mesh, cluster)
        if not levels:
            return 0.0, "none"
        backend = cluster.device.backend
        seconds, name = cheapest(effect.op, levels, effect.bytes, backend, self.algorithms)
        if not name:
            raise AutoparError(
                f"no algorithm for {effect.op} of {effect.what} over {ranks(levels)} ranks: "
                f"the topology offers none of {', '.join(self.algorithms or ())}"
            )
        return seconds, name

    def apart(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> tuple[float, float]:
        """Its seconds, with `collective_s`: beside other work it starts later than by itself. Where
        ranks wait for their hosts, these come at different times, the later the more they are."""
        assert isinstance(effect, Collective)
        kernels = cluster.device.kernels
        start_s = kernels.collective_s if kernels is not None else 0.0
        late_s = start_s * split_size(effect.axes)
        return self.cost(effect, mesh, cluster) + start_s, late_s


@functools.lru_cache(maxsize=65536)
def cheapest(
    op: str, levels: Route, nbytes: float, backend: str, allowed: tuple[str, ...] | None
) -> tuple[float, str]:
    """(seconds, algorithm) of the cheapest; (inf, "") where none is offered.

    A link that was measured for this op goes by that.
    """
    if _fits(op, levels[-1]):
        return _measured(op, levels, nbytes, backend)
    done = STANDS_FOR.get((backend, op), op)
    names = LIBRARIES.get(backend, {}).get(done) if allowed is None else allowed
    offers = _offers(done, levels, nbytes, backend, names)
    return min(offers, default=(math.inf, ""))


def _offers(
    op: str, levels: Route, nbytes: float, backend: str, names: tuple[str, ...] | None
) -> Iterator[tuple[float, str]]:
    """(seconds, algorithm) of each that the topology offers, under each protocol of the links."""
    protocols: tuple[Protocol | None, ...] = levels[-1].link.protocols or (None,)
    for protocol in protocols:
        for name, algorithm in ALGORITHMS[op].items():
            if names is None or name in names:
                used = _under(levels, protocol, name in IN_TREES)
                seconds = algorithm(used, nbytes)
                if seconds is not None:
                    yield seconds + (protocol.call_s if protocol else 0.0), name

    def best(part: str, inner: Route, size: float) -> float:
        return cheapest(part, inner, size, backend, names)[0]

    for name in ("hierarchical", "hierarchical_sharded"):
        if names is None or name in names:
            composed = (
                hierarchical(op, levels, nbytes, best)
                if name == "hierarchical"
                else hierarchical_sharded(levels, nbytes, best)
                if op == "all_reduce"
                else None
            )
            if composed is not None and math.isfinite(composed):
                yield composed, name


def _under(levels: Route, protocol: Protocol | None, tree: bool) -> Route:
    return levels if protocol is None else tuple(one.under(protocol, tree) for one in levels)


# ---------------------------------------------------------------- measured links


def _fits(op: str, level: Level) -> tuple[Fit, ...]:
    """The measurements of the op on one level's link, by size."""
    own = [fit for fit in level.link.fits if fit.op == op]
    return tuple(sorted(own, key=lambda fit: fit.up_to_bytes or math.inf))


def _measured(op: str, levels: Route, nbytes: float, backend: str) -> tuple[float, str]:
    """The algorithm that was measured on the outermost link, each level with the α and β measured
    for this size; never less than what a smaller size takes, whose figures may be others."""
    done = STANDS_FOR.get((backend, op), op)
    name = _fits(op, levels[-1])[0].algorithm
    limits = {fit.up_to_bytes for level in levels for fit in _fits(op, level)}
    seconds = 0.0
    for size in (*sorted(limit for limit in limits if 0 < limit < nbytes), nbytes):
        used = tuple(_at_size(op, level, size) for level in levels)
        price = ALGORITHMS[done][name](used, size)
        assert price is not None, (name, levels)
        seconds = max(seconds, price)
    return seconds, name


def _at_size(op: str, level: Level, nbytes: float) -> Level:
    """The level with the α and β measured for this size, or its link's own where none were."""
    for fit in _fits(op, level):
        if not fit.up_to_bytes or nbytes <= fit.up_to_bytes:
            return level.fitted(fit)
    return level

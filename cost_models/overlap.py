"""What runs at the same time: a host ahead of its device, communication beside compute."""

import functools
from dataclasses import dataclass
from typing import ClassVar

from autopar.plugin import Alongside, ClusterSpec, Collective, CostModel, Effect, Mesh

RATIOS = (0.0, 0.15, 0.3, 0.5, 0.7, 0.85, 1.0)
"""Host over device time at which the curve of both together is touched, and the other way round."""


@dataclass(frozen=True)
class OverlapCost(CostModel):
    """max(compute, communication) + s · min(compute, communication), and the host beside both.

    s = `overlap_slowdown` of the device's kernels: a collective takes some of the device's units
    and of its memory's rate. Device and host times d and h come to (d^q + h^q)^(1/q), q =
    `host_exponent`: now the one waits, now the other. Without kernels everything is in sequence.

    Both are convex, so the price is the largest of a few weighted sums (`rows`): tangents of the
    curve, which lie below it by less than 1 %. The same sums are constraints of a linear programme.

    `hides_sums`: gradient sums at the end of a step count as hidden behind the last backward. This
    project's programs don't; others' do.
    """

    hides_sums: bool = False
    name: ClassVar[str] = "overlap"
    prices: ClassVar[frozenset[str]] = frozenset({"alongside"})

    def cost(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> float:
        """Seconds that all of it takes."""
        assert isinstance(effect, Alongside)
        work = (effect.device_s, effect.host_s, effect.network_s)
        return max(
            sum(weight * seconds for weight, seconds in zip(row, work, strict=True))
            for row in self.rows(cluster)
        )

    def hides(self, effect: Collective) -> bool:
        """Whether a collective counts as hidden."""
        return effect.hides or (self.hides_sums and effect.phase == "grad_sync")

    def rows(self, cluster: ClusterSpec) -> tuple[tuple[float, float, float], ...]:
        """Weights of device, host and network seconds; the largest sum is the price."""
        kernels = cluster.device.kernels
        if kernels is None:
            return ((1.0, 1.0, 1.0),)
        return _rows(kernels.overlap_slowdown, kernels.host_exponent)


@functools.lru_cache(maxsize=64)
def _rows(slowdown: float, exponent: float) -> tuple[tuple[float, float, float], ...]:
    shares = dict.fromkeys([*_tangents(exponent), *((b, a) for a, b in _tangents(exponent))])
    beside = ((1.0, slowdown), (slowdown, 1.0))
    return tuple((a * c, b, a * n) for a, b in shares for c, n in dict.fromkeys(beside))


def _tangents(exponent: float) -> tuple[tuple[float, float], ...]:
    """(a, b) of tangents a · d + b · h of (d^q + h^q)^(1/q), where h = ratio · d."""
    found = []
    for ratio in RATIOS:
        whole = (1 + ratio**exponent) ** (1 / exponent)
        found.append(((1 / whole) ** (exponent - 1), (ratio / whole) ** (exponent - 1)))
    return tuple(found)

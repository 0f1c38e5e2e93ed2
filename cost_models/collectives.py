"""The time of collectives: α-β costs of ring and tree algorithms.

Notation of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005), without their γ: n ranks, B bytes (the larger of a rank's input and output), α
seconds a message, β seconds a byte.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from autopar.plugin import AutoparError, ClusterSpec, Collective, CostModel, Effect, Mesh, Split

AS_ALL_REDUCE = frozenset({("gloo", "reduce_scatter")})
"""What a backend does by an all-reduce of which each rank keeps its part: torch's
ProcessGroupGloo.cpp, and benchmarks/measure_cpu.py measures the same time."""


@dataclass(frozen=True)
class CollectiveCost(CostModel):
    """Ring all-reduce, all-gather and reduce-scatter, pairwise all-to-all, and the broadcast that
    is faster for the size, on the slowest link that the group needs."""

    name: ClassVar[str] = "collectives"
    prices: ClassVar[frozenset[str]] = frozenset({"collective"})

    def cost(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> float:
        """Seconds. Errors: AutoparError for an unknown collective, and for a group that needs more
        devices than the cluster has."""
        assert isinstance(effect, Collective)
        alpha_s, bytes_per_s = group_link(effect.axes, mesh, cluster)
        n = math.prod(part.size for part in effect.axes)
        transfer_s = effect.bytes / bytes_per_s
        step_s = alpha_s + transfer_s / n
        as_all_reduce = (cluster.device.backend, effect.op) in AS_ALL_REDUCE
        match "all_reduce" if as_all_reduce else effect.op:
            case "all_reduce":
                return 2 * (n - 1) * step_s
            case "all_gather" | "reduce_scatter" | "all_to_all":
                return (n - 1) * step_s
            case "broadcast":
                # A binomial tree for short messages; scatter, then ring all-gather for long ones.
                rounds = math.ceil(math.log2(n))
                scatter_s = rounds * alpha_s + transfer_s * (n - 1) / n
                return min(rounds * (alpha_s + transfer_s), scatter_s + (n - 1) * step_s)
        raise AutoparError(f"no price for collective {effect.op!r} of {effect.what}")


def group_link(axes: Split, mesh: Mesh, cluster: ClusterSpec) -> tuple[float, float]:
    """α in seconds and bandwidth in bytes/s between neighbours of the slowest group along `axes`.

    Groups lie in aligned blocks of `extent` ranks, so they need every level up to the first whose
    blocks hold whole extents. A rank's own link counts once for each member that the group has
    inside one block of the level below: a ring that enters a node through one network card can
    enter it through each of its members' (as NCCL's channels do). The group goes at the pace of
    the slowest level that it needs.
    """
    spread = [(part.size, mesh.stride(part.axis) * part.stride) for part in axes if part.size > 1]
    extent = max((size * stride for size, stride in spread), default=1)
    if extent > cluster.devices:
        raise AutoparError(
            f"a group over {extent} ranks of the mesh {mesh} doesn't fit {cluster.devices} devices"
        )
    alpha_s, bytes_per_s, inside = 0.0, math.inf, 1
    for link in cluster.links:
        members = math.prod(min(size, max(1, inside // stride)) for size, stride in spread)
        alpha_s = max(alpha_s, link.latency_s)
        bytes_per_s = min(bytes_per_s, members * link.bytes_per_s)
        if link.devices % extent == 0:
            break
        inside = link.devices
    return alpha_s, bytes_per_s

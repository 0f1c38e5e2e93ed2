"""The bytes that one rank holds."""

from dataclasses import dataclass
from typing import ClassVar

from autopar.plugin import ClusterSpec, CostModel, Effect, Mesh, Resident

COMES_AND_GOES = frozenset({"saved", "transient"})
"""What is allocated anew in every step."""


@dataclass(frozen=True)
class MemoryCost(CostModel):
    """Bytes as the effects declare them; of those that come and go, with what the allocator loses
    to fragments (a share that the device states); and the device's overhead on every rank."""

    name: ClassVar[str] = "memory"
    prices: ClassVar[frozenset[str]] = frozenset({"resident"})

    def cost(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> float:
        """Bytes."""
        assert isinstance(effect, Resident)
        if effect.what in COMES_AND_GOES:
            return effect.bytes * (1 + cluster.device.fragmentation)
        return float(effect.bytes)

    def overhead_bytes(self, mesh: Mesh, cluster: ClusterSpec) -> int:
        """The device's context and workspaces, and a communicator for each axis with several ranks:
        numbers of the cluster's."""
        groups = sum(size > 1 for _, size in mesh.axes)
        return cluster.device.overhead_bytes + groups * cluster.device.communicator_bytes

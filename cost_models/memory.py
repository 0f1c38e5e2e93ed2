"""The bytes that one rank holds."""

from dataclasses import dataclass
from typing import ClassVar

from autopar.plugin import ClusterSpec, CostModel, Effect, Mesh, Resident


@dataclass(frozen=True)
class MemoryCost(CostModel):
    """Bytes as the effects declare them, and the device's overhead on every rank."""

    name: ClassVar[str] = "memory"
    prices: ClassVar[frozenset[str]] = frozenset({"resident"})

    def cost(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> float:
        """Bytes."""
        assert isinstance(effect, Resident)
        return float(effect.bytes)

    def overhead_bytes(self, mesh: Mesh, cluster: ClusterSpec) -> int:
        """The device's context and workspaces, a number of the cluster's."""
        return cluster.device.overhead_bytes

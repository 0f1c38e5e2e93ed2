"""The time of ops on one device: a roofline, and the host's time for each."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from autopar.plugin import AutoparError, ClusterSpec, Compute, CostModel, Effect, Mesh

OVERHEADS: Mapping[str, float] = MappingProxyType(
    {
        "matmul": 1.0,
        "attention": 2.0,
        "pointwise": 1.0,
        "normalisation": 1.0,
        "reduction": 1.0,
        "embedding": 1.0,
        "loss": 1.5,
        "optimizer": 6.0,  # one parameter's AdamW update, about a dozen kernels without autograd
        "copy": 1.0,
        "opaque": 1.0,  # an op or layer without a rule: assumed, not measured
        "view": 0.4,  # no kernel, but the host still records the op
    }
)
"""The host's time for one op of each class, as a multiple of a pointwise op's: measured with torch
2.13 on tensors of 64 numbers on a CPU, 2026-11-29, and rounded."""


@dataclass(frozen=True)
class ComputeCost(CostModel):
    """seconds = max(flops / rate, bytes / memory bandwidth) + host's time.

    The roofline of Williams, Waterman and Patterson (2009), one op at a time. The rate is the
    device's for the op's dtype; bytes are what the op reads and writes, none for a view. The host's
    time is the device's `op_overhead_s` times the multiple of the op's class.
    """

    name: ClassVar[str] = "compute"
    prices: ClassVar[frozenset[str]] = frozenset({"compute"})

    def cost(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> float:
        """Seconds. Errors: AutoparError for an unknown class of op, and for flops in a dtype that
        the device has no rate for (an op without flops, a copy of integers, needs none)."""
        assert isinstance(effect, Compute)
        if effect.op not in OVERHEADS:
            raise AutoparError(
                f"no price for op class {effect.op!r}: compute prices {', '.join(OVERHEADS)}"
            )
        device = cluster.device
        host_s = OVERHEADS[effect.op] * device.op_overhead_s
        if effect.op == "view":
            return host_s
        rates = dict(device.flops_per_s)
        if effect.flops and effect.dtype not in rates:
            raise AutoparError(
                f"device {device.name!r} has no rate for {effect.dtype}, only for "
                f"{', '.join(rates)}: add it to the cluster's flops_per_s"
            )
        flops_s = effect.flops / rates[effect.dtype] if effect.flops else 0.0
        return max(flops_s, effect.bytes / device.memory_bytes_per_s) + host_s

"""The time of ops on one device: a roofline, and the host's time for each."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from autopar.cost_models.matrix_products import attention_seconds, product_seconds
from autopar.plugin import AutoparError, ClusterSpec, Compute, CostModel, Device, Effect, Mesh

OVERHEADS: Mapping[str, float] = MappingProxyType(
    {
        "matmul": 1.0,
        "attention": 2.0,
        "pointwise": 1.0,
        "normalisation": 1.0,
        "reduction": 1.0,
        "sum": 0.5,  # of gradients: autograd's own, without Python
        "embedding": 1.0,
        "loss": 1.5,
        "sort": 3.0,
        "optimizer": 14.0,  # one parameter's clipping and AdamW update, a dozen kernels and Python
        "copy": 1.0,
        "opaque": 1.0,  # an op or layer without a rule: assumed, not measured
        "view": 0.4,  # no kernel, but the host still records the op
    }
)
"""The host's time for one op of each class, as a multiple of a pointwise op's: measured with torch
2.13 on tensors of 64 numbers on a CPU, 2026-11-29, and rounded."""


@dataclass(frozen=True)
class ComputeCost(CostModel):
    """seconds = max(flops / rate, bytes / memory bandwidth), and the host's time.

    The roofline of Williams, Waterman and Patterson (2009), one op at a time. The rate is the
    device's for the op's dtype; bytes are what the op reads and writes, none for a view. The host's
    time is the device's `op_overhead_s` times the multiple of the op's class; it adds to the
    device's. Where the cluster says how the device's kernels fare (`Kernels`), products go by their
    tiles, attention by its own rate, and the host runs ahead.
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
        return together(device_seconds(effect, device), host_seconds(effect, device), device)

    def apart(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> tuple[float, float]:
        """The device's seconds and the host's."""
        device, together_s = cluster.device, self.cost(effect, mesh, cluster)
        assert isinstance(effect, Compute)
        if device.kernels is None:
            return together_s, 0.0
        return device_seconds(effect, device), host_seconds(effect, device)


def host_seconds(effect: Compute, device: Device) -> float:
    """What the host takes to start the op."""
    ops = OVERHEADS[effect.op]
    if _joined(effect, device):
        return 0.0
    if device.kernels is not None and effect.op == "optimizer":
        ops = device.kernels.optimizer_ops
    elif device.kernels is not None and _gradient(effect):
        ops *= device.kernels.backward_ops
    return ops * device.op_overhead_s


def device_seconds(effect: Compute, device: Device) -> float:
    """What the device takes, once the op has started. Errors: AutoparError for flops in a dtype
    without a rate."""
    if effect.op == "view":
        return 0.0
    moved = effect.bytes - (effect.between if _joined(effect, device) else 0)
    moved_s = moved / device.memory_bytes_per_s
    special_s = effect.special / device.special_per_s if device.special_per_s else 0.0
    if not effect.flops:
        return moved_s + special_s
    rates, dtype = dict(device.flops_per_s), _dtype(effect, device)
    if dtype not in rates:
        raise AutoparError(
            f"device {device.name!r} has no rate for {dtype}, only for "
            f"{', '.join(rates)}: add it to the cluster's flops_per_s"
        )
    return max(_flops_seconds(effect, rates[dtype], device), moved_s) + special_s


def together(device_s: float, host_s: float, device: Device) -> float:
    """Device and host: one after the other, or the host ahead."""
    if device.kernels is None:
        return device_s + host_s
    q = device.kernels.host_exponent
    longer, shorter = max(device_s, host_s), min(device_s, host_s)
    if not longer:
        return 0.0
    return float(longer * (1 + (shorter / longer) ** q) ** (1 / q))


def _dtype(effect: Compute, device: Device) -> str:
    """The type that its products run in: those with a weight are one product, not one a head."""
    cast_to = "" if device.kernels is None else device.kernels.weight_products
    with_weight = effect.op == "matmul" and effect.shape[:1] == (1,)
    return cast_to if cast_to and with_weight else effect.dtype


def _gradient(effect: Compute) -> bool:
    """Whether it makes gradients."""
    return effect.phase == "backward" and not effect.again


def _joined(effect: Compute, device: Device) -> bool:
    """Whether another kernel does the op as well."""
    if device.kernels is None or not effect.between:
        return False
    return device.kernels.joins_sums if effect.op == "sum" else device.kernels.joins_pointwise


def _flops_seconds(effect: Compute, flops_per_s: float, device: Device) -> float:
    kernels, backward = device.kernels, _gradient(effect)
    if kernels is None or not effect.shape:
        return effect.flops / flops_per_s
    if effect.op == "attention":
        flops = effect.flops * (1 - effect.skipped)
        _, queries, _, head, _ = effect.shape
        return attention_seconds(flops, queries, head, backward, flops_per_s, kernels)
    count, m, n, k = effect.shape
    # The gradients of both operands: [m, n] by [n, k] and [k, m] by [m, n].
    shapes = ((m, k, n), (k, n, m)) if backward else ((m, n, k),)
    dtype = _dtype(effect, device)
    cast = kernels.cast_bytes * m * (n if backward else k) if dtype != effect.dtype else 0
    cast_s = cast / device.memory_bytes_per_s
    return cast_s + sum(
        product_seconds(count, *shape, dtype, flops_per_s, device.memory_bytes_per_s, kernels)
        for shape in shapes
    )

"""What is timed: matrix products, passes over memory, small ops, and collectives."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist

Product = tuple[int, int, int]
"""m, k, n of [m, k] by [k, n]."""

PRODUCTS: Mapping[str, Mapping[torch.dtype, Product]] = MappingProxyType(
    {
        # A small GPT-2's linear layer; few rows where the CPU has no fast kernel.
        "cpu": {
            torch.float32: (2048, 256, 1024),
            torch.float64: (2048, 256, 1024),
            torch.bfloat16: (2048, 256, 1024),
            torch.float16: (64, 256, 1024),
        },
        "cuda": {
            torch.float32: (4096, 4096, 4096),
            torch.float64: (2048, 2048, 2048),
            torch.bfloat16: (8192, 8192, 8192),
            torch.float16: (8192, 8192, 8192),
        },
    }
)
"""The products that stand for each dtype's rate, by type of device."""

BEFORE: Mapping[str, Product] = MappingProxyType(
    {"cpu": (256, 256, 1024), "cuda": (4096, 1024, 1024)}
)
"""The product before each collective."""

ADD_BYTES: Mapping[str, int] = MappingProxyType({"cpu": 32 * 2**20, "cuda": 512 * 2**20})
"""A tensor beyond a rank's share of cache."""


SPECIAL = 2**18
"""Elements of a tensor whose tangents are taken: 1 MiB, within a cache."""


@dataclass(frozen=True)
class Trial:
    """What every rank does at once: `work`, `calls` times between two barriers."""

    work: Callable[[], object]
    calls: int

    def seconds(self) -> float:
        """Seconds of one call, on the slowest rank."""
        dist.barrier()
        _finish()
        start = time.perf_counter()
        for _ in range(self.calls):
            self.work()
        _finish()
        dist.barrier()
        return (time.perf_counter() - start) / self.calls


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def product(shape: Product, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """A matrix product of that shape."""
    m, k, n = shape
    a = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(k, n, device=device).to(dtype)
    return lambda: a @ b


def addition(size_bytes: int, device: torch.device) -> Trial:
    """The sum of two tensors of that size into a third."""
    a, b, out = (torch.ones(size_bytes // 4, device=device) for _ in range(3))
    return Trial(lambda: torch.add(a, b, out=out), calls=3)


def tangents(elements: int, device: torch.device) -> Trial:
    """The hyperbolic tangent of so many numbers."""
    x = torch.linspace(-3, 3, elements, device=device)
    out = torch.empty_like(x)
    return Trial(lambda: torch.tanh(x, out=out), calls=8)


def small_op(op: Callable[[torch.Tensor], torch.Tensor], device: torch.device, calls: int) -> Trial:
    """An op on 64 numbers that autograd records."""
    x = torch.ones(8, 8, device=device, requires_grad=True)
    return Trial(lambda: op(x), calls)


def collective(op: str, size_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Trial:
    """A matrix product, then a collective whose larger side is `size_bytes`, in all groups like
    this at once.

    On a core that computes, a collective takes up to twice as long as on an idle one: each message
    wakes threads that displace another rank. In a step there is always something to displace.
    """
    ranks = dist.get_world_size(group)
    whole = torch.ones(size_bytes // 4, device=device)
    other = torch.ones(size_bytes // 4, device=device)
    part = torch.ones(size_bytes // 4 // ranks, device=device)
    root = dist.get_global_rank(group, 0)
    work: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, root, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    compute = product(BEFORE[device.type], torch.float32, device)
    communicate = work[op]
    return Trial(lambda: (compute(), communicate()), calls=max(2, min(12, 2**23 // size_bytes)))

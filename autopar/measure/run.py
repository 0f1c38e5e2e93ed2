"""The measurement itself: all ranks of a process group at once, and the slowest counts.

With more ranks than cores a rank so gets its share of a core. Every figure is the best of several
repeats, since whatever else runs on the machine can only slow one down; the repeats are rounds over
all trials, so that those of one trial lie seconds apart.
"""

import os
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.measure.fit import OPS, Sample
from autopar.measure.trials import (
    ADD_BYTES,
    BEFORE,
    PRODUCTS,
    SPECIAL,
    Trial,
    addition,
    collective,
    product,
    small_op,
    tangents,
)

SIZES_BYTES = tuple(4096 * 4**k for k in range(7))  # 4 KiB to 16 MiB


@dataclass(frozen=True)
class Settings:
    """How thoroughly to measure: rounds over all trials, and the sizes of the collectives."""

    repeats: int = 24
    sizes_bytes: tuple[int, ...] = SIZES_BYTES
    calls: int = 2000
    """How often a small op is called in one trial."""


@dataclass(frozen=True)
class Figures:
    """What was measured, in seconds, bytes and flops. `levels`: the samples of groups inside a
    node, then of groups with one rank in each node, if there are several."""

    backend: str
    device_name: str
    world: int
    local_world: int
    memory_bytes: int
    overhead_bytes: int
    flops_per_s: dict[str, float]
    memory_bytes_per_s: float
    special_per_s: float
    op_s: float
    view_s: float
    before_s: float
    levels: tuple[tuple[Sample, ...], ...]


def measure(device: torch.device, local_world: int, settings: Settings) -> Figures:
    """The figures of this process group, the same on every rank (rank 0's).

    `local_world`: ranks in each node. Every rank of the group must call this. The process group
    must exist; a CPU's ranks are measured with one thread each.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # The new name of these is younger than the oldest torch that is supported.
            warnings.filterwarnings("ignore", "`torch.distributed.*_tensor` is deprecated")
            figures = _measured(device, local_world, settings)
    finally:
        torch.set_num_threads(threads)
    shared = [figures]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _measured(device: torch.device, local_world: int, settings: Settings) -> Figures:
    products = PRODUCTS[device.type]
    alone = {
        **{_name(d): Trial(product(shape, d, device), calls=2) for d, shape in products.items()},
        "before": Trial(product(BEFORE[device.type], torch.float32, device), calls=12),
        "addition": addition(ADD_BYTES[device.type], device),
        "special": tangents(SPECIAL, device),
        "pointwise": small_op(lambda x: x * 1.5, device, settings.calls),
        "view": small_op(lambda x: x.view(64), device, settings.calls),
    }
    together = {
        (level, op, group.size(), size): collective(op, size, group, device)
        for level, groups in enumerate(_groups(local_world))
        for group in groups
        for op in OPS
        for size in settings.sizes_bytes
    }
    trials = [*alone.values(), *together.values()]
    for trial in trials:
        trial.work()
    rounds = [[trial.seconds() for trial in trials] for _ in range(settings.repeats)]
    best = list(map(min, zip(*rounds, strict=True)))
    alone_s = dict(zip(alone, best, strict=False))
    together_s = dict(zip(together, best[len(alone) :], strict=True))
    samples: dict[int, list[Sample]] = {}
    for (level, op, ranks, size), whole_s in together_s.items():
        added_s = max(0.0, whole_s - alone_s["before"])
        samples.setdefault(level, []).append(Sample(op, size, ranks, added_s, whole_s))
    return Figures(
        backend="nccl" if device.type == "cuda" else "gloo",
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        world=dist.get_world_size(),
        local_world=local_world,
        memory_bytes=_memory_bytes(device, local_world),
        overhead_bytes=_overhead_bytes(device),
        flops_per_s={
            _name(d): 2 * m * k * n / alone_s[_name(d)] for d, (m, k, n) in products.items()
        },
        memory_bytes_per_s=3 * ADD_BYTES[device.type] / alone_s["addition"],
        special_per_s=SPECIAL / alone_s["special"],
        op_s=alone_s["pointwise"],
        view_s=alone_s["view"],
        before_s=alone_s["before"],
        levels=tuple(tuple(samples[level]) for level in sorted(samples)),
    )


def _groups(local_world: int) -> list[list[dist.ProcessGroup]]:
    """This rank's groups: in its node pairs and all, then one rank of each node."""
    world, rank = dist.get_world_size(), dist.get_rank()
    inside = sorted({2, local_world} if local_world % 2 == 0 else {local_world})
    levels = [
        [
            _own([list(range(first, first + size)) for first in range(0, world, size)], rank)
            for size in inside
            if size > 1
        ]
    ]
    if world > local_world:
        places = range(local_world)
        levels.append([_own([list(range(p, world, local_world)) for p in places], rank)])
    return [groups for groups in levels if groups]


def _own(all_ranks: list[list[int]], rank: int) -> dist.ProcessGroup:
    """The group with this rank; every rank makes all of them, as torch demands."""
    groups = [dist.new_group(ranks) for ranks in all_ranks]
    (own,) = [group for group, ranks in zip(groups, all_ranks, strict=True) if rank in ranks]
    assert isinstance(own, dist.ProcessGroup)
    return own


def _memory_bytes(device: torch.device, local_world: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_world


def _overhead_bytes(device: torch.device) -> int:
    """What is gone from a GPU beside the allocator's: contexts and communicators."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def _name(dtype: torch.dtype) -> str:
    """The dtype's name without the module's: torch.float32 is float32."""
    return str(dtype).removeprefix("torch.")

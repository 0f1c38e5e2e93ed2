"""Gradients once a step: sums over axes, the global norm, clipping."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.leaves import Leaf
from autopar.runtime.process_mesh import Group, ProcessMesh

BUCKET_BYTES = 32 * 2**20
"""Gradients with the same axes are summed together, in pieces of at most this size."""


def sum_axes(leaf: Leaf, mesh: ProcessMesh) -> tuple[str, ...]:
    """The axes over which the leaf's accumulated gradient is still partial, in mesh order."""
    done = leaf.shard.axes if leaf.shard else ()
    sums = set(leaf.declaration.sums) - set(done) - set(leaf.declaration.synced)
    return tuple(axis for axis, size in mesh.layout.axes if axis in sums and size > 1)


def sum_gradients(leaves: Iterable[Leaf], mesh: ProcessMesh) -> None:
    """Sums each gradient, in place, over the axes it is partial on: one all-reduce a bucket."""
    together: dict[tuple[tuple[str, ...], torch.dtype], list[Tensor]] = {}
    for leaf in leaves:
        axes, grad = sum_axes(leaf, mesh), leaf.grad
        if axes and grad is not None:
            together.setdefault((axes, grad.dtype), []).append(grad)
    for (axes, _), grads in together.items():
        for bucket in _buckets(grads):
            _sum_together(bucket, mesh[axes])


def sum_shared(leaves: Iterable[Leaf], mesh: ProcessMesh) -> None:
    """Sums the gradients of tensors that several stages hold, in place, over those stages: they are
    one parameter. Call it after `sum_gradients`."""
    for leaf in leaves:
        place = leaf.place
        if place is not None and len(place.stages) > 1 and leaf.declaration.trainable:
            grad = leaf.grad
            assert grad is not None, f"{leaf.name} has no gradient on this stage"
            _sum_together([grad], mesh.among(place.axis, place.stages))


def _buckets(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = [[]]
    held_bytes = 0
    for grad in grads:
        if buckets[-1] and held_bytes + grad.nbytes > BUCKET_BYTES:
            buckets.append([])
            held_bytes = 0
        buckets[-1].append(grad)
        held_bytes += grad.nbytes
    return buckets


def _sum_together(grads: Sequence[Tensor], group: Group) -> None:
    if len(grads) == 1 and grads[0].is_contiguous():
        dist.all_reduce(grads[0], group=group.process_group)
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group.process_group)
    start = 0
    for grad in grads:
        grad.copy_(flat[start : start + grad.numel()].view(grad.shape))
        start += grad.numel()


def global_norm(leaves: Iterable[Leaf], mesh: ProcessMesh) -> Tensor:
    """The 2-norm of all gradients of the whole model: 0-d, the same on every rank.

    Each element counts once: replicas on the rank with coordinate 0 along the axes that replicate
    it. One all-reduce of a scalar over the world.
    """
    squares = torch.zeros((), dtype=torch.float64, device=mesh.device)
    dtype = torch.float32
    for leaf in leaves:
        grad = leaf.grad
        if grad is None:
            continue
        wide = torch.promote_types(grad.dtype, torch.float32)
        dtype = torch.promote_types(dtype, wide)
        if _counts_here(leaf, mesh):
            squares += torch.linalg.vector_norm(grad, dtype=wide).double().square()
    if mesh.world.size > 1:
        dist.all_reduce(squares, group=mesh.world.process_group)
    return squares.sqrt().to(dtype)


def _counts_here(leaf: Leaf, mesh: ProcessMesh) -> bool:
    if leaf.place is not None and not leaf.place.first:
        return False
    coordinate = mesh.coordinate
    return all(coordinate[axis] == 0 for axis in mesh.axes if axis not in leaf.split_axes)


def clip_gradients(leaves: Iterable[Leaf], norm: Tensor, clip_norm: float) -> None:
    """Scales the gradients, in place, by min(1, clip_norm / (norm + 1e-6)): the formula of
    `torch.nn.utils.clip_grad_norm_`.
    """
    scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    for leaf in leaves:
        if (grad := leaf.grad) is not None:
            grad.mul_(scale.to(grad.dtype))

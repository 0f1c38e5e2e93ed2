"""Collectives with the backward that their types need.

A tensor on an axis is I (replicated, gradient complete), V (replicated, gradient partial), S
(split) or P (a partial sum). Each function converts one type to another, and its backward converts
the gradient back; `axis` is a group of the mesh. Over a group of one rank each is the identity.

Gathers and scatters put the pieces of `dim` in rank order; the dim of the whole tensor must be a
multiple of the group's size. Where a dim is `balanced`, it is cut into twice as many chunks, and
rank i holds the i-th from the beginning and the i-th from the end, in this order. Functional
collectives are used, so that a TorchDispatchMode sees every one, and torch.compile can trace them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.process_mesh import Group

_ops = torch.ops._c10d_functional


# ---------------------------------------------------------------- plain, no gradient


def _wait(x: Tensor) -> Tensor:
    waited: Tensor = _ops.wait_tensor(x)
    return waited


def _sum(x: Tensor, axis: Group) -> Tensor:
    return _wait(_ops.all_reduce(x.contiguous(), "sum", axis.name))


def _gather(x: Tensor, dim: int, axis: Group, balanced: bool = False) -> Tensor:
    rows = _wait(_ops.all_gather_into_tensor(x.contiguous(), axis.size, axis.name))
    # Ranks are stacked on dim 0, which is the answer for dim 0 already.
    if dim % x.ndim == 0 and not balanced:
        return rows
    return _together(rows.chunk(axis.size), dim, balanced)


def _scatter_sum(x: Tensor, dim: int, axis: Group, balanced: bool = False) -> Tensor:
    whole = dim % x.ndim == 0 and not balanced
    rows = x if whole else torch.cat(_pieces(x, dim, axis, balanced))
    _check(x, dim, axis)
    return _wait(_ops.reduce_scatter_tensor(rows.contiguous(), "sum", axis.size, axis.name))


def _exchange(
    x: Tensor, split_dim: int, gather_dim: int, axis: Group, balanced_dim: int | None = None
) -> Tensor:
    rows = torch.stack(_pieces(x, split_dim, axis, split_dim == balanced_dim))
    ones = [1] * axis.size
    received = _wait(_ops.all_to_all_single(rows, ones, ones, axis.name))
    return _together(received.unbind(), gather_dim, gather_dim == balanced_dim)


def _shift(x: Tensor, steps: int, axis: Group) -> Tensor:
    """What the rank `steps` before this one holds."""
    rows = x.contiguous().view(-1)
    to, source = (axis.rank + steps) % axis.size, (axis.rank - steps) % axis.size
    sent = [rows.numel() if rank == to else 0 for rank in range(axis.size)]
    taken = [rows.numel() if rank == source else 0 for rank in range(axis.size)]
    return _wait(_ops.all_to_all_single(rows, taken, sent, axis.name)).view(x.shape)


def _check(x: Tensor, dim: int, axis: Group, balanced: bool = False) -> None:
    pieces = axis.size * (1 + balanced)
    assert x.shape[dim] % pieces == 0, (
        f"dim {dim} of {tuple(x.shape)} is no multiple of {pieces} ({axis.axes})"
    )


def _pieces(x: Tensor, dim: int, axis: Group, balanced: bool = False) -> tuple[Tensor, ...]:
    """The ranks' pieces of a whole tensor."""
    return tuple(_piece(x, dim, axis, rank, balanced) for rank in range(axis.size))


def _piece(x: Tensor, dim: int, axis: Group, rank: int, balanced: bool) -> Tensor:
    _check(x, dim, axis, balanced)
    if not balanced:
        return x.chunk(axis.size, dim)[rank]
    chunks = x.chunk(2 * axis.size, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def _together(pieces: Sequence[Tensor], dim: int, balanced: bool = False) -> Tensor:
    """The whole tensor of the ranks' pieces."""
    if not balanced:
        return torch.cat(tuple(pieces), dim)
    halves = [piece.chunk(2, dim) for piece in pieces]
    return torch.cat([*(h[0] for h in halves), *(h[1] for h in reversed(halves))], dim)


def _slice(x: Tensor, dim: int, axis: Group, balanced: bool = False) -> Tensor:
    piece = _piece(x, dim, axis, axis.rank, balanced)
    # A copy even of what lies in a row: a view would keep the whole tensor alive.
    return piece if balanced else piece.clone(memory_format=torch.contiguous_format)


# ---------------------------------------------------------------- with their backward


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Group) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum(grad, ctx.axis), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Group) -> Tensor:
        return _sum(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _AllReducePartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Group) -> Tensor:
        ctx.axis = axis
        return _sum(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum(grad, ctx.axis), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, balanced: bool, axis: Group) -> Tensor:
        ctx.dim, ctx.balanced, ctx.axis = dim, balanced, axis
        return _gather(x, dim, axis, balanced)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _scatter_sum(grad, ctx.dim, ctx.axis, ctx.balanced), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, balanced: bool, axis: Group) -> Tensor:
        ctx.dim, ctx.balanced, ctx.axis = dim, balanced, axis
        return _scatter_sum(x, dim, axis, balanced)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather(grad, ctx.dim, ctx.axis, ctx.balanced), None, None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, balanced: bool, axis: Group) -> Tensor:
        ctx.dim, ctx.balanced, ctx.axis = dim, balanced, axis
        return _gather(x, dim, axis, balanced)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _slice(grad, ctx.dim, ctx.axis, ctx.balanced), None, None, None


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, balanced: bool, axis: Group) -> Tensor:
        ctx.dim, ctx.balanced, ctx.axis = dim, balanced, axis
        return _slice(x, dim, axis, balanced)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather(grad, ctx.dim, ctx.axis, ctx.balanced), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, split_dim: int, gather_dim: int, balanced: int | None, axis: Group
    ) -> Tensor:
        ctx.split_dim, ctx.gather_dim, ctx.axis = split_dim, gather_dim, axis
        ctx.balanced = balanced
        return _exchange(x, split_dim, gather_dim, axis, balanced)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        back = _exchange(grad, ctx.gather_dim, ctx.split_dim, ctx.axis, ctx.balanced)
        return back, None, None, None, None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Group) -> Tensor:
        ctx.axis = axis
        return _shift(x, 1, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _shift(grad, -1, ctx.axis), None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Group) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if ctx.axis.rank == 0 else torch.zeros_like(grad), None


# ---------------------------------------------------------------- what emitted modules call


def _apply(function: type[torch.autograd.Function], x: Tensor, *args: Any) -> Tensor:
    """`function` on x, or x itself where the group (the last argument) has one rank."""
    if args[-1].size == 1:
        return x
    result: Tensor = function.apply(x, *args)
    return result


def enter(x: Tensor, axis: Group) -> Tensor:
    """I → V: identity; backward: all-reduce (Megatron-LM's f, arXiv 1909.08053)."""
    return _apply(_Enter, x, axis)


def all_reduce(x: Tensor, axis: Group) -> Tensor:
    """P → I: all-reduce (sum); backward: identity (Megatron-LM's g)."""
    return _apply(_AllReduce, x, axis)


def all_reduce_partial(x: Tensor, axis: Group) -> Tensor:
    """P → V: all-reduce (sum); backward: all-reduce."""
    return _apply(_AllReducePartial, x, axis)


def all_gather(x: Tensor, dim: int, axis: Group, balanced: bool = False) -> Tensor:
    """S → V: concatenates the ranks' pieces on `dim`; backward: reduce-scatter (sum)."""
    return _apply(_AllGather, x, dim, balanced, axis)


def reduce_scatter(x: Tensor, dim: int, axis: Group, balanced: bool = False) -> Tensor:
    """P → S: sums over ranks and keeps this rank's piece of `dim`; backward: all-gather."""
    return _apply(_ReduceScatter, x, dim, balanced, axis)


def unshard(x: Tensor, dim: int, axis: Group, balanced: bool = False) -> Tensor:
    """S → I: concatenates the ranks' pieces on `dim`; backward: this rank's slice."""
    return _apply(_Unshard, x, dim, balanced, axis)


def shard(x: Tensor, dim: int, axis: Group, balanced: bool = False) -> Tensor:
    """I → S: this rank's piece of `dim`; backward: all-gather."""
    return _apply(_Shard, x, dim, balanced, axis)


def local_part(x: Tensor, dim: int, axis: Group, balanced: bool = False) -> Tensor:
    """V → S, or anything without gradient: this rank's piece of `dim`, no communication either
    way; backward: zeros where the other ranks' pieces are.
    """
    return x if axis.size == 1 else _slice(x, dim, axis, balanced)


def all_to_all(
    x: Tensor, split_dim: int, gather_dim: int, axis: Group, balanced_dim: int | None = None
) -> Tensor:
    """S(gather_dim) → S(split_dim): splits `split_dim` into a piece for each rank and concatenates
    the pieces received on `gather_dim`; backward: the same the other way round. `balanced_dim`:
    which of the two is cut into balanced chunks.
    """
    return _apply(_AllToAll, x, split_dim, gather_dim, balanced_dim, axis)


def ring(x: Tensor, axis: Group) -> Tensor:
    """S → S: sends x to the next rank and returns the previous rank's, all of one shape;
    backward: the other way round.
    """
    return _apply(_Ring, x, axis)


def once(x: Tensor, axis: Group) -> Tensor:
    """Identity; backward: keeps the gradient on the axis's rank 0 and zeroes it elsewhere, so that
    the sum over the axis counts it once (a complete gradient, where a partial one is due).
    """
    return _apply(_Once, x, axis)

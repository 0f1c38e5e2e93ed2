"""Tokens to the ranks that hold their experts, and back: all-to-alls over uneven numbers of rows.

Rows lie sorted by expert on every rank, and each rank of the axis holds as many experts as the
others, in order. How many rows go where is known only when the program runs: `route` exchanges the
numbers, and `dispatch` and `combine` use what it found. No rank waits for a full expert and no row
is dropped; an expert or a rank may have no rows at all.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.runtime.process_mesh import Group

_ops = torch.ops._c10d_functional
GROUPED_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""What torch's own grouped matmul takes."""


@dataclass(frozen=True, eq=False)
class Route:
    """Which of this rank's rows go where, and which come in.

    `ends` [local experts], of the dtype that `route` was given: where each local expert's rows end
    in what `dispatch` returns. `sent` and `received`: rows to and from each rank of the axis.
    `order` [received rows]: the places of the rows, as they come in by rank, in order of experts;
    `back` is its inverse.
    """

    ends: Tensor
    sent: list[int]
    received: list[int]
    order: Tensor
    back: Tensor
    axis: Group


def route(ends: Tensor, axis: Group) -> Route:
    """Where rows go that are sorted by expert. `ends` [experts]: where the rows of each expert end
    on this rank. The number of experts must be a multiple of the axis's size.

    One all-to-all of the experts' numbers of rows; the host waits for them.
    """
    assert len(ends) % axis.size == 0, (len(ends), axis.axes, axis.size)
    counts = ends.diff(prepend=ends.new_zeros(1))
    per_rank = counts.view(axis.size, -1)
    if axis.size == 1:
        found = per_rank
    else:
        ones = [per_rank.shape[1]] * axis.size
        sent = _ops.all_to_all_single(counts.contiguous(), ones, ones, axis.name)
        found = _ops.wait_tensor(sent).view_as(per_rank)
    local = torch.arange(per_rank.shape[1], device=ends.device).repeat(axis.size)
    order = torch.argsort(torch.repeat_interleave(local, found.flatten().long()), stable=True)
    return Route(
        found.sum(0).cumsum(0).to(ends.dtype),
        per_rank.sum(1).tolist(),
        found.sum(1).tolist(),
        order,
        torch.argsort(order),
        axis,
    )


def _send(rows: Tensor, taken: list[int], sent: list[int], axis: Group) -> Tensor:
    if axis.size == 1:
        return rows
    moved: Tensor = _ops.all_to_all_single(rows.contiguous(), taken, sent, axis.name)
    waited: Tensor = _ops.wait_tensor(moved)
    return waited


def _out(rows: Tensor, way: Route) -> Tensor:
    return _send(rows, way.received, way.sent, way.axis)[way.order]


def _home(rows: Tensor, way: Route) -> Tensor:
    return _send(rows[way.back], way.sent, way.received, way.axis)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Route) -> Tensor:
        ctx.way = way
        return _out(rows, way)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _home(grad, ctx.way), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Route) -> Tensor:
        ctx.way = way
        return _home(rows, way)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _out(grad, ctx.way), None


def dispatch(rows: Tensor, routing: Route) -> Tensor:
    """S → D: `rows` [this rank's rows, …], sorted by expert, to the ranks that hold their experts;
    returned are the rows that came in, sorted by local expert. Backward: their gradients go home.
    """
    result: Tensor = _Dispatch.apply(rows, routing)  # type: ignore[no-untyped-call]
    return result


def combine(rows: Tensor, routing: Route) -> Tensor:
    """D → S: what `dispatch` brought here goes home, into the order that it came from. Backward:
    gradients go where their rows were dispatched to.
    """
    result: Tensor = _Combine.apply(rows, routing)  # type: ignore[no-untyped-call]
    return result


def grouped_mm(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """Consecutive groups of `rows` [rows, in], each by its own matrix of `weights` [groups, in,
    out]; `offs` [groups]: where each group ends. For dtypes that torch's own lacks, a loop.
    """
    if rows.dtype in GROUPED_DTYPES:
        result: Tensor = F.grouped_mm(rows, weights, offs=offs)
        return result
    counts = offs.diff(prepend=offs.new_zeros(1)).tolist()
    groups = rows.split(counts)
    return torch.cat([group @ weight for group, weight in zip(groups, weights, strict=True)])

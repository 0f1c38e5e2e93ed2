"""Look-ups in a vocabulary, and the loss over one, that is split over an axis."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.process_mesh import Group


def vocab_embedding(
    indices: Tensor, weight: Tensor, axis: Group, padding_idx: int | None = None
) -> Tensor:
    """Rows of a table of which this rank holds a contiguous part: a partial sum over the axis.

    `indices` [...] into the whole table, `weight` [rows / n, width] (rounded up: padding is never
    looked up); the result is [..., width], zero where another rank holds the row. The row
    `padding_idx` gets no gradient.
    """
    local, mine = _local(indices, len(weight), axis)
    if padding_idx is not None:
        mine_padded = padding_idx - axis.rank * len(weight)
        padding_idx = mine_padded if 0 <= mine_padded < len(weight) else None
    return F.embedding(local, weight, padding_idx) * mine.unsqueeze(-1)


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: Group,
    ignore_index: int = -100,
    classes: int | None = None,
) -> Tensor:
    """Σ of cross-entropies over targets that aren't ignored, classes split over the axis.

    `logits` [n, classes / n_axis], `target` [n] in whole classes; 0-d, the same on every rank of
    the axis. `classes`: how many there are where the last ranks' logits end in padding. Two
    all-reduces: the maximum, then the sum of exponentials with the target's logit (Shoeybi et al.
    2019, section 3).
    """
    total: Tensor = _VocabCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, target, axis, ignore_index, classes
    )
    return total


def _local(indices: Tensor, rows: int, axis: Group) -> tuple[Tensor, Tensor]:
    """Indices into this rank's rows (0 for others'), and which are its own."""
    local = indices - axis.rank * rows
    mine = (local >= 0) & (local < rows)
    return torch.where(mine, local, 0), mine


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, axis: Group, ignore: int, classes: int | None
    ) -> Tensor:
        rows = logits.shape[-1]
        real = rows if classes is None else min(max(classes - axis.rank * rows, 0), rows)
        if real:
            highest = logits[..., :real].max(dim=-1).values
        else:  # all of them are padding
            highest = logits.new_full(logits.shape[:-1], -torch.inf)
        _reduce(highest, axis, dist.ReduceOp.MAX)
        shifted = logits - highest.unsqueeze(-1)
        shifted[..., real:] = -torch.inf  # probability 0, and no gradient
        local, mine = _local(target, rows, axis)
        picked = torch.where(mine, shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0)
        exponentials = shifted.exp_()  # in place: logits are the largest tensors there are
        sums = torch.stack([exponentials.sum(dim=-1), picked])
        _reduce(sums, axis, dist.ReduceOp.SUM)
        counted = target != ignore
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), local, mine, counted)
        return ((sums[0].log() - sums[1]) * counted).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        probabilities, local, mine, counted = ctx.saved_tensors
        ones = mine.to(probabilities.dtype).unsqueeze(-1)
        result = probabilities.scatter_add(-1, local.unsqueeze(-1), -ones)
        return result.mul_((grad * counted).unsqueeze(-1)), None, None, None, None


def _reduce(tensor: Tensor, axis: Group, op: Any) -> None:
    if axis.size > 1:
        dist.all_reduce(tensor, op=op, group=axis.process_group)

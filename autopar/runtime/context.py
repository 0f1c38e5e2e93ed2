"""Ring attention: queries stay, keys and values travel round the ranks.

A sequence of 2 · n chunks lies on n ranks; rank i holds the chunks i and 2n - 1 - i, in this order.
In step t a rank has the keys and values of the t-th rank before it. What it computes from each is
merged by the logarithms of the sums of exponentials (Liu et al. 2023, Ring Attention; Milakov and
Gimelshein 2018). Under a causal mask every step then takes half of the pairs, on every rank alike:
all queries with the first chunk of keys from lower ranks, the second chunk of queries with all keys
from higher ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.attention_blocks import Hidden, Sums, attend, attend_backward, weights
from autopar.runtime.process_mesh import Group


@dataclass(frozen=True)
class _Whole:
    """What hides keys of the whole sequence: later ones where `causal`; `mask` [..., queries or 1,
    keys or 1]."""

    causal: bool
    mask: Tensor | None
    scale: float


@dataclass(frozen=True)
class _Step:
    """Which of this rank's queries meet which keys of rank `source`."""

    queries: slice
    keys: slice
    source: int
    causal: bool


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    axis: Group,
) -> Tensor:
    """Scaled dot-product attention of a sequence that is split, in balanced chunks, over `axis`.

    `query` [..., heads, positions, channels], `key` and `value` likewise, with this rank's
    positions; `attn_mask` is the whole sequence's, boolean (True: seen) or added. The heads may be
    a multiple of the keys' with `enable_gqa`. Returns this rank's rows; backward: gradients of keys
    and values travel on to where they belong.
    """
    assert enable_gqa or key.shape[-3] == query.shape[-3], (query.shape, key.shape)
    whole = _Whole(is_causal, attn_mask, query.shape[-1] ** -0.5 if scale is None else scale)
    result: Tensor = _RingAttention.apply(query, key, value, whole, axis)  # type: ignore[no-untyped-call]
    return result


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, whole: _Whole, axis: Group
    ) -> Tensor:
        wide = _wide(query)
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
        logs = query.new_full(query.shape[:-1], -math.inf, dtype=wide)
        moving = _Moving(axis, [key, value])
        state: tuple[Tensor, ...] = ()
        for step in _steps(query.shape[-2], whole, axis):
            moving.start(last=_is_last(step, axis))
            block = attend(*_met(query, moving.now, step), _hidden(whole, step, axis))
            _merge(out, logs, step, block)
            state = block.state
            moving.finish()
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, logs, *state)
        ctx.whole, ctx.axis = whole, axis
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, logs, *state = ctx.saved_tensors
        whole, axis = ctx.whole, ctx.axis
        grad, wide = grad.contiguous(), _wide(query)
        grad_q = torch.zeros_like(query, dtype=wide)
        moving = _Moving(axis, [key, value])
        # The keys' own rank keeps its share of their gradients; what other ranks add travels with
        # the keys, and one step further: home.
        mine = [torch.zeros_like(x, dtype=wide) for x in (key, value)]
        theirs = _Moving(axis, [torch.zeros_like(x) for x in mine])
        for step in _steps(query.shape[-2], whole, axis):
            moving.start(last=_is_last(step, axis))
            rows = step.queries
            sums = Sums(out[..., rows, :], logs[..., rows], tuple(state))
            parts = attend_backward(
                *_met(query, moving.now, step),
                sums,
                grad[..., rows, :],
                _hidden(whole, step, axis),
            )
            grad_q[..., rows, :] += parts[0]
            own = step.source == axis.rank
            for total, part in zip(mine if own else theirs.now, parts[1:], strict=True):
                total[..., step.keys, :] += part
            moving.finish()
            if not own:
                theirs.start()
                theirs.finish()
        grads = [(a + b).to(key.dtype) for a, b in zip(mine, theirs.now, strict=True)]
        return grad_q.to(query.dtype), *grads, None, None


class _Moving:
    """Tensors that go to the next rank, while those of the rank before come in."""

    def __init__(self, axis: Group, tensors: Sequence[Tensor]) -> None:
        self.axis = axis
        self.now = [x.contiguous() for x in tensors]
        self._next: list[Tensor] = []
        self._works: list[Any] = []

    def start(self, last: bool = False) -> None:
        """Begins to send, unless this was the `last` step."""
        if last or self.axis.size == 1:
            return
        ranks, rank, group = self.axis.ranks, self.axis.rank, self.axis.process_group
        to, source = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
        self._next = [torch.empty_like(x) for x in self.now]
        sends = [dist.P2POp(dist.isend, x, to, group) for x in self.now]
        takes = [dist.P2POp(dist.irecv, x, source, group) for x in self._next]
        self._works = dist.batch_isend_irecv([*sends, *takes])

    def finish(self) -> None:
        """Waits until what comes in is there."""
        for work in self._works:
            work.wait()
        if self._next:
            self.now, self._next, self._works = self._next, [], []


def _steps(positions: int, whole: _Whole, axis: Group) -> list[_Step]:
    """The blocks of a pass, this rank's own keys first."""
    everything, half = slice(0, positions), positions // 2
    found = []
    for step in range(axis.size):
        source = (axis.rank - step) % axis.size
        if not whole.causal or step == 0:
            found.append(_Step(everything, everything, source, whole.causal))
        elif source < axis.rank:
            found.append(_Step(everything, slice(0, half), source, False))
        else:
            found.append(_Step(slice(half, positions), everything, source, False))
    return found


def _is_last(step: _Step, axis: Group) -> bool:
    return step.source == (axis.rank + 1) % axis.size


def _met(query: Tensor, moved: Sequence[Tensor], step: _Step) -> tuple[Tensor, Tensor, Tensor]:
    key, value = moved
    return query[..., step.queries, :], key[..., step.keys, :], value[..., step.keys, :]


def _hidden(whole: _Whole, step: _Step, axis: Group) -> Hidden:
    """What hides a step's keys from its queries."""
    mask = whole.mask
    if mask is not None:
        mask = _part(mask, -2, axis.rank, step.queries, axis)
        mask = _part(mask, -1, step.source, step.keys, axis)
    return Hidden(step.causal, mask, whole.scale)


def _part(mask: Tensor, dim: int, rank: int, which: slice, axis: Group) -> Tensor:
    """A mask's rows or columns that lie on a rank."""
    if mask.shape[dim] == 1:
        return mask
    chunks = mask.chunk(2 * axis.size, dim)
    local = torch.cat((chunks[rank], chunks[-1 - rank]), dim)
    return local.narrow(dim, which.start, which.stop - which.start)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _merge(out: Tensor, logs: Tensor, step: _Step, block: Sums) -> None:
    """Takes a block's result into the whole."""
    rows, so_far = out[..., step.queries, :], logs[..., step.queries]
    together = torch.logaddexp(so_far, block.logs)
    rows *= weights(so_far.unsqueeze(-1), together)
    rows += block.out * weights(block.logs.unsqueeze(-1), together)
    so_far.copy_(together)

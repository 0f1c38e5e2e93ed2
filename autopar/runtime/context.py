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

from autopar.runtime.process_mesh import Group


@dataclass(frozen=True)
class _Masks:
    """What hides keys from queries. `mask` [..., queries or 1, keys or 1]: the whole sequence's."""

    mask: Tensor | None
    causal: bool
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
    masks = _Masks(attn_mask, is_causal, query.shape[-1] ** -0.5 if scale is None else scale)
    if key.shape[-3] != query.shape[-3]:
        assert enable_gqa, (query.shape, key.shape)
    result: Tensor = _RingAttention.apply(query, key, value, masks, axis)  # type: ignore[no-untyped-call]
    return result


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, masks: _Masks, axis: Group
    ) -> Tensor:
        q = _grouped(query, key)
        out = torch.zeros(*q.shape[:-1], value.shape[-1], dtype=_wide(q), device=q.device)
        sums = torch.full(q.shape[:-1], -math.inf, dtype=out.dtype, device=q.device)
        moving = _Moving(axis, [key, value])
        for step in _steps(query.shape[-2], masks, axis):
            k, v = moving.now
            moving.start(last=step.source == (axis.rank + 1) % axis.size)
            _merge(out, sums, step, *_block(q, k, v, masks, step, axis))
            moving.finish()
        result = out.to(query.dtype).reshape(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.masks, ctx.axis = masks, axis
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, result, sums = ctx.saved_tensors
        masks, axis = ctx.masks, ctx.axis
        q, wide = _grouped(query, key), _wide(query)
        toward = grad.reshape(*q.shape[:-1], grad.shape[-1]).to(wide)
        inner = (toward * result.reshape(toward.shape).to(wide)).sum(-1)
        grad_q = torch.zeros(q.shape, dtype=wide, device=q.device)
        moving = _Moving(axis, [key, value])
        mine = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (key, value)]
        theirs = _Moving(axis, [torch.zeros_like(x) for x in mine])
        for step in _steps(query.shape[-2], masks, axis):
            k, v = moving.now
            own = step.source == axis.rank
            last = step.source == (axis.rank + 1) % axis.size
            moving.start(last)
            parts = _block_backward(q, k, v, toward, inner, sums, masks, step, axis)
            grad_q[..., step.queries, :] += parts[0]
            # The keys' own rank keeps its share; those of the others travel with the keys, and one
            # step further: home.
            for total, part in zip(mine if own else theirs.now, parts[1:], strict=True):
                total[..., step.keys, :] += part
            moving.finish()
            if not own:
                theirs.start()
                theirs.finish()
        home = theirs.now if axis.size > 1 else [torch.zeros_like(x) for x in mine]
        grads = [(a + b).to(key.dtype) for a, b in zip(mine, home, strict=True)]
        return grad_q.reshape(query.shape).to(query.dtype), *grads, None, None


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


def _steps(positions: int, masks: _Masks, axis: Group) -> list[_Step]:
    """The blocks of a pass, this rank's own keys first."""
    everything, half = slice(0, positions), positions // 2
    found = []
    for step in range(axis.size):
        source = (axis.rank - step) % axis.size
        if not masks.causal or step == 0:
            found.append(_Step(everything, everything, source, masks.causal))
        elif source < axis.rank:
            found.append(_Step(everything, slice(0, half), source, False))
        else:
            found.append(_Step(slice(half, positions), everything, source, False))
    return found


# ---------------------------------------------------------------- one block


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """Queries [..., heads of keys, queries that share one, positions, channels]."""
    heads = key.shape[-3]
    grouped: Tensor = query.unflatten(-3, (heads, query.shape[-3] // heads))
    return grouped


def _scores(q: Tensor, k: Tensor, masks: _Masks, step: _Step, axis: Group) -> Tensor:
    scores: Tensor = (q.to(_wide(q)) @ k.to(_wide(q)).unsqueeze(-3).mT) * masks.scale
    if step.causal:  # both are this rank's own, in ascending order
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if masks.mask is not None:
        mask = _part(masks.mask, -2, axis.rank, step.queries, axis)
        mask = _part(mask, -1, step.source, step.keys, axis)
        if mask.dim() > 2:
            heads = mask.shape[-3]
            shape = (q.shape[-4], heads // q.shape[-4]) if heads > 1 else (1, 1)
            mask = mask.unflatten(-3, shape)
        seen = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if seen else scores + mask
    return scores


def _part(mask: Tensor, dim: int, rank: int, which: slice, axis: Group) -> Tensor:
    """A mask's rows or columns that lie on a rank."""
    if mask.shape[dim] == 1:
        return mask
    chunks = mask.chunk(2 * axis.size, dim)
    local = torch.cat((chunks[rank], chunks[-1 - rank]), dim)
    return local.narrow(dim, which.start, which.stop - which.start)


def _block(
    q: Tensor, k: Tensor, v: Tensor, masks: _Masks, step: _Step, axis: Group
) -> tuple[Tensor, Tensor]:
    """Attention to some keys alone, and the logarithms of its sums."""
    q, k, v = q[..., step.queries, :], k[..., step.keys, :], v[..., step.keys, :]
    scores = _scores(q, k, masks, step, axis)
    sums = scores.logsumexp(-1)
    return _weights(scores, sums) @ v.to(scores.dtype).unsqueeze(-3), sums


def _weights(scores: Tensor, sums: Tensor) -> Tensor:
    """Softmax with these sums; rows of which nothing is seen have no weights."""
    seen = sums.masked_fill(sums == -math.inf, 0.0)
    return (scores - seen.unsqueeze(-1)).exp()


def _merge(out: Tensor, sums: Tensor, step: _Step, block: Tensor, block_sums: Tensor) -> None:
    """Takes a block's result into the whole."""
    rows, so_far = out[..., step.queries, :], sums[..., step.queries]
    together = torch.logaddexp(so_far, block_sums)
    for x, share in ((rows, so_far), (block, block_sums)):
        x *= _weights(share.unsqueeze(-1), together)
    rows += block
    so_far.copy_(together)


def _block_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    toward: Tensor,
    inner: Tensor,
    sums: Tensor,
    masks: _Masks,
    step: _Step,
    axis: Group,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's share of the gradients of its queries, keys and values, from the sums over all
    keys (Dao 2023, FlashAttention-2)."""
    q, toward = q[..., step.queries, :], toward[..., step.queries, :]
    inner, sums = inner[..., step.queries], sums[..., step.queries]
    k, v = k[..., step.keys, :], v[..., step.keys, :]
    weights = _weights(_scores(q, k, masks, step, axis), sums)
    grad_v = (weights.mT @ toward).sum(-3)
    grad_scores = weights * (toward @ v.to(toward.dtype).unsqueeze(-3).mT - inner.unsqueeze(-1))
    grad_scores *= masks.scale
    grad_q = grad_scores @ k.to(toward.dtype).unsqueeze(-3)
    grad_k = (grad_scores.mT @ q.to(toward.dtype)).sum(-3)
    return grad_q, grad_k, grad_v

"""Attention to a part of all keys, so that parts can be merged: with the logarithms of the sums of
exponentials, and a backward that starts from the sums over all keys (Dao 2023, FlashAttention-2).

By torch's fused kernels where they take the operands (no mask; on CUDA half precision), which never
hold the scores; else by products of some queries at a time.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_aten = torch.ops.aten
QUERIES = 1024
"""How many queries' scores exist at a time where no fused kernel runs."""
HALF = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class Hidden:
    """What hides keys from queries: all later ones where `causal` (queries and keys are then of the
    same positions), and `mask` [..., heads or 1, queries or 1, keys or 1], boolean (True: seen) or
    added. `scale`: what products are multiplied with."""

    causal: bool
    mask: Tensor | None
    scale: float


@dataclass(frozen=True)
class Sums:
    """Of all keys: `out` [..., heads, queries, channels], `logs` [..., heads, queries] the
    logarithms of the sums of exponentials, −inf where nothing was seen. `state`: what a fused
    kernel's backward wants of its forward's random numbers, of which there were none."""

    out: Tensor
    logs: Tensor
    state: tuple[Tensor, ...]


def attend(query: Tensor, key: Tensor, value: Tensor, hidden: Hidden) -> Sums:
    """Attention to these keys alone. `query` [..., heads, queries, channels]; the heads may be a
    multiple of those of `key` and `value`. Results are in float32 at least, or the kernel's own."""
    if not _fused(query, value, hidden):
        every = [
            _attend(query[..., rows, :], key, value, _of_rows(hidden, rows))
            for rows in _tiles(query)
        ]
        out, logs = (
            torch.cat(parts, dim)
            for parts, dim in zip(zip(*every, strict=True), (-2, -1), strict=True)
        )
        return Sums(out, logs, ())
    k, v = (_repeated(x, query) for x in (key, value))
    if query.is_cuda:
        out, logs, *_, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            query, k, v, 0.0, hidden.causal, scale=hidden.scale
        )
        return Sums(out, logs, (seed, offset))
    out, logs = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, k, v, 0.0, hidden.causal, scale=hidden.scale
    )
    return Sums(out, logs, ())


def attend_backward(
    query: Tensor, key: Tensor, value: Tensor, sums: Sums, toward: Tensor, hidden: Hidden
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys give to the gradients of queries, keys and values. `sums`: over all keys, of
    these queries; `toward`: the gradient of `sums.out`."""
    if not _fused(query, value, hidden):
        grads = None
        parts = []
        for rows in _tiles(query):
            mine = Sums(sums.out[..., rows, :], sums.logs[..., rows], ())
            grad_q, *rest = _attend_backward(
                query[..., rows, :], key, value, mine, toward[..., rows, :], _of_rows(hidden, rows)
            )
            parts.append(grad_q)
            grads = rest if grads is None else [a + b for a, b in zip(grads, rest, strict=True)]
        assert grads is not None
        return torch.cat(parts, -2), grads[0], grads[1]
    k, v = (_repeated(x, query) for x in (key, value))
    given = (toward, query, k, v, sums.out, sums.logs)
    if query.is_cuda:
        lengths = (query.shape[-2], key.shape[-2])
        grad_q, grad_k, grad_v = _aten._scaled_dot_product_flash_attention_backward(
            *given, None, None, *lengths, 0.0, hidden.causal, *sums.state, scale=hidden.scale
        )
    else:
        grad_q, grad_k, grad_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, 0.0, hidden.causal, scale=hidden.scale
        )
    return grad_q, _summed(grad_k, key), _summed(grad_v, value)


# ---------------------------------------------------------------- fused kernels


def _fused(query: Tensor, value: Tensor, hidden: Hidden) -> bool:
    """Whether one of torch's fused kernels takes these."""
    if hidden.mask is not None or query.dim() != 4 or query.shape[-1] != value.shape[-1]:
        return False
    if not query.is_cuda:
        return query.device.type == "cpu"
    width = query.shape[-1]
    return query.dtype in HALF and width % 8 == 0 and width <= 256


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    times = query.shape[-3] // x.shape[-3]
    return x if times == 1 else x.repeat_interleave(times, -3)


def _summed(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of what was repeated."""
    times = grad.shape[-3] // x.shape[-3]
    summed: Tensor = grad if times == 1 else grad.unflatten(-3, (-1, times)).sum(-3)
    return summed


# ---------------------------------------------------------------- products


def _tiles(query: Tensor) -> list[slice]:
    length = query.shape[-2]
    return [slice(i, min(i + QUERIES, length)) for i in range(0, length, QUERIES)]


def _of_rows(hidden: Hidden, rows: slice) -> Hidden:
    """The same for some queries; a causal mask as one, True where seen."""
    mask = hidden.mask
    if mask is not None and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    if not hidden.causal:
        return Hidden(False, mask, hidden.scale)
    assert mask is None, "torch's attention is causal or takes a mask"
    return Hidden(True, torch.arange(rows.start, rows.stop)[:, None], hidden.scale)


def _scores(q: Tensor, k: Tensor, hidden: Hidden) -> Tensor:
    """[..., heads of keys, queries that share one, queries, keys]."""
    scores: Tensor = (q @ k.to(q.dtype).unsqueeze(-3).mT) * hidden.scale
    if hidden.mask is None:
        return scores
    mask = hidden.mask.to(q.device)
    if hidden.causal:
        mask = mask >= torch.arange(k.shape[-2], device=q.device)
    elif mask.dim() > 2:
        heads = mask.shape[-3]
        mask = mask.unflatten(-3, (q.shape[-4], -1) if heads > 1 else (1, 1))
    seen = mask.dtype == torch.bool
    return scores.masked_fill(~mask, -math.inf) if seen else scores + mask


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """[..., heads of keys, queries that share one, …], in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    grouped: Tensor = wide.unflatten(-3, (key.shape[-3], -1))
    return grouped


def weights(scores: Tensor, logs: Tensor) -> Tensor:
    """exp(scores − logs); nothing where nothing was seen."""
    return (scores - logs.masked_fill(logs == -math.inf, 0.0).unsqueeze(-1)).exp()


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Hidden) -> tuple[Tensor, Tensor]:
    scores = _scores(_grouped(q, k), k, hidden)
    logs = scores.logsumexp(-1)
    out = weights(scores, logs) @ v.to(scores.dtype).unsqueeze(-3)
    return out.flatten(-4, -3), logs.flatten(-3, -2)


def _attend_backward(
    q: Tensor, k: Tensor, v: Tensor, sums: Sums, toward: Tensor, hidden: Hidden
) -> tuple[Tensor, Tensor, Tensor]:
    shape, q = q.shape, _grouped(q, k)
    toward, out = _grouped(toward, k), _grouped(sums.out, k)
    logs = sums.logs.unflatten(-2, q.shape[-4:-2])
    shares = weights(_scores(q, k, hidden), logs)
    inner = (toward * out).sum(-1, keepdim=True)
    grad_scores = shares * (toward @ v.to(q.dtype).unsqueeze(-3).mT - inner) * hidden.scale
    grad_q = grad_scores @ k.to(q.dtype).unsqueeze(-3)
    grad_k, grad_v = (grad_scores.mT @ q).sum(-3), (shares.mT @ toward).sum(-3)
    return grad_q.reshape(shape), grad_k, grad_v

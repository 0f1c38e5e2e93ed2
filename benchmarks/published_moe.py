"""Mixtures of experts and latent attention of published runs, for `published_models`."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Moe:
    """Experts with a gate, of which each token goes to `top_k`; `shared_ffn`: the width of those
    that every token goes to (0: none); the first `dense_layers` have `dense_ffn` instead."""

    experts: int
    top_k: int
    ffn: int
    shared_ffn: int
    dense_layers: int
    dense_ffn: int


@dataclass(frozen=True)
class Mla:
    """Latent attention (DeepSeek-AI 2024): queries, keys and values from narrow vectors; heads have
    a part with positions and one without."""

    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    value: int


class Gated(nn.Module):
    """SiLU of one product times another."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Rows sorted by expert, through grouped products, and back to their tokens."""

    def __init__(self, hidden: int, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.gate_up = nn.Parameter(torch.empty(moe.experts, 2 * moe.ffn, hidden))
        self.down = nn.Parameter(torch.empty(moe.experts, hidden, moe.ffn))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[tokens, hidden] to the same; `chosen`, `weights`: [tokens, top_k]."""
        order, places = torch.sort(chosen.reshape(-1))
        rows = x[places // self.moe.top_k]
        counts = torch.histc(order.float(), bins=self.moe.experts, min=0, max=self.moe.experts - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        gate, up = torch._grouped_mm(rows, self.gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
        inner = F.silu(gate) * up
        found = torch._grouped_mm(inner, self.down.transpose(-2, -1), offs=ends)
        found = found * weights.reshape(-1)[places].unsqueeze(-1)
        back = torch.empty_like(places)
        back[places] = torch.arange(places.size(0), device=places.device)
        out = found[back].view(-1, self.moe.top_k, x.size(-1)).sum(dim=1)
        return out.to(x.dtype)


class Mixture(nn.Module):
    """A router, its experts, and those that all tokens share."""

    def __init__(self, hidden: int, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.router = nn.Linear(hidden, moe.experts, bias=False)
        self.experts = Experts(hidden, moe)
        if moe.shared_ffn:
            self.shared = Gated(hidden, moe.shared_ffn)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        tokens = x.reshape(-1, x.size(-1))
        shares = self.router(tokens).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(shares, self.moe.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out: Tensor = self.experts(tokens, chosen, weights.to(x.dtype)).reshape(x.shape)
        if self.moe.shared_ffn:
            out = out + self.shared(x)
        return out


class LatentAttention(nn.Module):
    """Causal, one kernel."""

    def __init__(self, hidden: int, heads: int, mla: Mla) -> None:
        super().__init__()
        self.heads, self.mla = heads, mla
        self.query_down = nn.Linear(hidden, mla.q_lora, bias=False)
        self.query_norm = nn.RMSNorm(mla.q_lora)
        self.query_up = nn.Linear(mla.q_lora, heads * (mla.nope + mla.rope), bias=False)
        self.down = nn.Linear(hidden, mla.kv_lora + mla.rope, bias=False)
        self.norm = nn.RMSNorm(mla.kv_lora)
        self.up = nn.Linear(mla.kv_lora, heads * (mla.nope + mla.value), bias=False)
        self.out = nn.Linear(heads * mla.value, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Hidden states [batch, sequence, hidden] to the same."""
        mla, (batch, length, _) = self.mla, x.shape
        query = self.query_up(self.query_norm(self.query_down(x)))
        query = query.view(batch, length, self.heads, mla.nope + mla.rope).transpose(1, 2)
        query, turned = torch.split(query, [mla.nope, mla.rope], dim=-1)
        latent, key_turned = torch.split(self.down(x), [mla.kv_lora, mla.rope], dim=-1)
        both = self.up(self.norm(latent)).view(batch, length, self.heads, mla.nope + mla.value)
        key, value = torch.split(both.transpose(1, 2), [mla.nope, mla.value], dim=-1)
        turned = rotated(turned, cos, sin)
        key_turned = rotated(key_turned.view(batch, 1, length, mla.rope), cos, sin)
        query = torch.cat((query, turned), dim=-1)
        key = torch.cat((key, key_turned.expand(*key.shape[:-1], -1)), dim=-1)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """With rotary positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin

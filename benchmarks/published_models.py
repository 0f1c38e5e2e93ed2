"""The models of published runs, as plain modules for the meta device: what their software ran.

Two kinds of block: GPT's (Megatron-LM: learned positions, GELU, dropout) and Llama's (rotary
positions, gated MLP, grouped queries), each with attention as separate products and softmax, or
fused; Llama's with a mixture of experts or latent attention too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from published_moe import Gated, LatentAttention, Mixture, Mla, Moe, rotated
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Of a decoder. `head`: the width of one; `gated`: the MLP has a gate, and norms no bias;
    `fused_attention`: one kernel, not products around a softmax; `fused_softmax`: else,
    one kernel that masks, scales and takes the softmax; `dropout` 0: none; `repeats_heads`: keys
    and values are copied for all the queries that share them; `compiled_loss`: one kernel takes the
    logits as they are, not in float32."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool
    tied: bool
    fused_attention: bool
    fused_softmax: bool
    dropout: float
    dtype: torch.dtype
    repeats_heads: bool = False
    compiled_loss: bool = False
    moe: Moe | None = None
    mla: Mla | None = None


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values from one product where heads are equal."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head, shape.kv_heads * shape.head
        bias = not shape.gated
        self.fused = shape.heads == shape.kv_heads and not shape.gated
        if self.fused:
            self.query_key_value = nn.Linear(shape.hidden, 3 * width, bias=bias)
        else:
            self.query = nn.Linear(shape.hidden, width, bias=bias)
            self.key = nn.Linear(shape.hidden, kv_width, bias=bias)
            self.value = nn.Linear(shape.hidden, kv_width, bias=bias)
        self.out = nn.Linear(width, shape.hidden, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Hidden states [batch, sequence, hidden] to the same."""
        shape = self.shape
        batch, length, _ = x.shape
        if self.fused:
            parts = self.query_key_value(x).chunk(3, dim=-1)
        else:
            parts = (self.query(x), self.key(x), self.value(x))
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        query, key, value = (
            part.view(batch, length, count, shape.head).transpose(1, 2)
            for part, count in zip(parts, heads, strict=True)
        )
        if shape.gated:
            query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        grouped = shape.heads != shape.kv_heads
        if grouped and shape.repeats_heads:
            times, grouped = shape.heads // shape.kv_heads, False
            key, value = repeated(key, times), repeated(value, times)
        if shape.fused_attention:
            found = F.scaled_dot_product_attention(
                query, key, value, dropout_p=shape.dropout, is_causal=True, enable_gqa=grouped
            )
        else:
            scores = query @ key.transpose(-1, -2)
            if shape.fused_softmax:  # moves what a softmax moves
                weights = scores.softmax(dim=-1)
            else:  # in float32; masked in place
                weights = (scores.float() * shape.head**-0.5).softmax(dim=-1).to(x.dtype)
            found = F.dropout(weights, shape.dropout) @ value
        return self.out(found.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


def repeated(x: Tensor, times: int) -> Tensor:
    """[batch, heads, sequence, width], each head so many times."""
    batch, heads, length, width = x.shape
    wide = x.unsqueeze(2).expand(batch, heads, times, length, width)
    return wide.reshape(batch, heads * times, length, width)


class Plain(nn.Module):
    """Two products around a GELU."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer, the `number`-th."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        norm: Any = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.shape, moe, mla = shape, shape.moe, shape.mla
        self.first_norm, self.second_norm = norm(shape.hidden), norm(shape.hidden)
        self.attention: nn.Module = (
            Attention(shape) if mla is None else LatentAttention(shape.hidden, shape.heads, mla)
        )
        if moe is not None and number >= moe.dense_layers:
            self.mlp: nn.Module = Mixture(shape.hidden, moe)
        else:
            ffn = shape.ffn if moe is None else moe.dense_ffn
            self.mlp = (Gated if shape.gated else Plain)(shape.hidden, ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Hidden states to hidden states."""
        dropout = self.shape.dropout
        x = x + F.dropout(self.attention(self.first_norm(x), cos, sin), dropout)
        return x + F.dropout(self.mlp(self.second_norm(x)), dropout)


class Decoder(nn.Module):
    """A language model that returns its loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        if not shape.gated:
            self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, i) for i in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.gated else nn.LayerNorm)(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
        length = shape.sequence
        for name in ("cos", "sin"):
            width = shape.head if shape.mla is None else shape.mla.rope
            self.register_buffer(name, torch.empty(length, width), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss over all tokens."""
        x = self.tokens(ids)
        if not self.shape.gated:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = F.dropout(x, self.shape.dropout)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        logits = logits if self.shape.compiled_loss else logits.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(shape: Shape, batch: int) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """The model and its global batch, both without values."""
    with torch.device("meta"):
        model = Decoder(shape).to(shape.dtype)
        ids = torch.empty(batch, shape.sequence, dtype=torch.int64)
    return model, {"ids": ids, "labels": ids.clone()}

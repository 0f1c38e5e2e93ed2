"""A chain of layers of which no two are alike, on meta."""

from typing import Any

import torch
from torch import Tensor, nn

FEATURES, TOKENS = 1024, 512
NARROWEST, STEP = 2048, 8
"""The first layer's inner width, and how much wider each layer is than the one before."""


class Block(nn.Module):
    """A residual MLP behind a norm."""

    def __init__(self, features: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, inner)
        self.down = nn.Linear(inner, features)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, features], in and out."""
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


class Chain(nn.Module):
    """Layers one after the other, each with another inner width, and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        inner = [NARROWEST + STEP * layer for layer in range(layers)]
        self.layers = nn.ModuleList([Block(FEATURES, width) for width in inner])
        self.head = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, features], in and out."""
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def chain_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(outputs, batch["y"])


def chain_of(layers: int, samples: int) -> tuple[nn.Module, dict[str, Tensor], Any]:
    """The model in bfloat16, a batch and its loss."""
    with torch.device("meta"):
        model = Chain(layers).to(torch.bfloat16)
        x, y = torch.empty(2, samples, TOKENS, FEATURES, dtype=torch.bfloat16)
    return model, {"x": x, "y": y}, chain_loss

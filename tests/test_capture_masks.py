"""Attention masks that are recognised, and those that must stay."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured import SDPA, Stack, check_same, cross_entropy, llama, tokens, vectors
from torch import Tensor, nn
from torch.fx import Node

from autopar.capture import Capture, capture


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def attention_of(captured: Capture) -> Node:
    (node,) = (n for n in captured.blocks[0].graph.nodes if n.target is SDPA)
    assert isinstance(node, Node)
    return node


def test_a_mask_from_the_batch_stays() -> None:
    batch = tokens() | {"attention_mask": torch.ones(2, 16, dtype=torch.long)}
    captured = check_same(llama(), batch)
    assert isinstance(attention_of(captured).args[3], Node)


class Window(nn.Module):
    """Attention with a mask of its own."""

    def __init__(self, mask: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.project, self.mask, self.scale = nn.Linear(8, 8), mask, 1.0

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x)[None]
        return F.scaled_dot_product_attention(q, q, q, self.mask(x.shape[0]))[0]


def _window(s: int) -> Tensor:
    i = torch.arange(s)
    return (i[None] <= i[:, None]) & (i[None] > i[:, None] - 2)


def _infinite(s: int) -> Tensor:
    return torch.full((s, s), float("-inf")).triu(1)


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (lambda s: torch.ones(s, s, dtype=torch.bool).tril(), True),
        (_infinite, True),
        (_window, False),
        (lambda s: torch.ones(s, s, dtype=torch.bool).triu(), False),
        (lambda s: torch.ones(s, s, dtype=torch.bool), None),
    ],
    ids=["tril", "minus_infinity", "window", "triu", "all"],
)
def test_masks_made_inside_a_layer(mask: Any, causal: bool | None) -> None:
    captured = check_same(Stack(Window(mask), Window(mask)), vectors(), cross_entropy)
    arguments = attention_of(captured).args
    if causal is None:
        assert arguments[3:] == (None, 0.0, False)
    else:
        assert (arguments[3:] == (None, 0.0, True)) is causal


def test_long_masks_are_proved_causal() -> None:
    """[16384, 16384] is over the limit of what is evaluated."""
    with torch.device("meta"):
        model = llama(max_position_embeddings=16384)
    captured = capture(model, tokens(1, 16384, "meta"), None)
    assert attention_of(captured).args[3:] == (None, 0.0, True)


def test_a_long_window_is_not_causal() -> None:
    with torch.device("meta"):
        model = Stack(Window(_window))
        batch = {"x": torch.zeros(16384, 8), "y": torch.zeros(16384, dtype=torch.long)}
    captured = capture(model, batch, cross_entropy)
    assert isinstance(attention_of(captured).args[3], Node)

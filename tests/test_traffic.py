"""What backwards move: gradients in and out, what was kept, and gradients added up."""

import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.graph.analyse import analyse
from autopar.graph.model_graph import Block
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.traffic import backward_bytes, chained, loss_transients
from autopar.layouts.typing import OpTyping
from autopar.mesh import Mesh

ROWS, WIDTH = 6, 10
SIZE = ROWS * WIDTH * 4
"""Bytes of an activation."""


class Layer(nn.Module):
    """A residual around a biased product, GELU and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        x = self.first(x)
        return (x + nn.functional.dropout(nn.functional.gelu(self.inner(x)), 0.1)).sum()


def captured() -> Block:
    model = Layer()
    return analyse(capture(model, torch.zeros(ROWS, WIDTH), None)).skeleton


def moved(block: Block, name: str) -> int:
    setting = Setting(Mesh(()), (), 1)
    return backward_bytes(block, block.ops[name], None, setting)


def named(block: Block, kind: str, count: int = 0) -> str:
    return [name for name, op in block.ops.items() if str(op.node.target).split(".")[1] == kind][
        count
    ]


def test_each_op() -> None:
    block = captured()
    gelu, dropout = named(block, "gelu"), named(block, "dropout")
    weight, bias = WIDTH * WIDTH * 4, WIDTH * 4
    assert moved(block, gelu) == 3 * SIZE  # gradient, input, gradient
    assert moved(block, named(block, "add")) == SIZE + bias  # the bias alone is summed
    inner = named(block, "linear", 1)
    # The gradient, input and weight; their gradients; half of adding the input's two gradients.
    assert moved(block, inner) == 3 * SIZE + 2 * weight + 3 * SIZE // 2
    residual = named(block, "add", 2)
    assert moved(block, residual) == 3 * SIZE // 2  # handed on; the other half of that sum
    assert 2 * SIZE < moved(block, dropout) <= 2 * SIZE + ROWS * WIDTH  # and a mask


def test_what_one_kernel_could_do() -> None:
    block = captured()
    names = [named(block, "gelu"), named(block, "dropout"), named(block, "add", 2)]
    before = [named(block, "add", 1), *names[:2]]
    for name, maker in zip(names, before, strict=True):
        source = chained(block, block.ops[name])
        assert source is not None and source.name == maker
    assert chained(block, block.ops[named(block, "linear", 1)]) is None
    first = named(block, "add")  # used twice: it has to be written
    assert first not in [getattr(chained(block, op), "name", "") for op in block.ops.values()]


class Head(nn.Module):
    """Logits in bfloat16, the loss in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 7, dtype=torch.bfloat16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy."""
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.view(-1, 7), labels.view(-1))


def test_a_loss_makes_gradients_of_logits() -> None:
    batch = {
        "x": torch.zeros(ROWS, 3, WIDTH, dtype=torch.bfloat16),
        "labels": torch.zeros(ROWS, 3, dtype=torch.int64),
    }
    block = analyse(capture(Head(), batch, None)).skeleton
    ops = {
        name: OpTyping({n.name: Layout() for n in op.node.all_input_nodes}, Layout())
        for name, op in block.ops.items()
    }
    (found,) = loss_transients(block, ops, Setting(Mesh(()), (), 1))
    assert found.bytes == ROWS * 3 * 7 * (4 + 2)  # as float32, and cast back

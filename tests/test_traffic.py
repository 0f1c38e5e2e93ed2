"""What ops move: in backwards, in one kernel with others, and where a view has to copy."""

import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.graph.analyse import analyse
from autopar.graph.model_graph import Block
from autopar.graph.ops import op_name
from autopar.layouts.copies import added_bytes, copied_bytes, in_product, uncopied_bytes
from autopar.layouts.effects import compute_effects
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.traffic import (
    backward_bytes,
    chained,
    chained_bytes,
    chained_gradient_bytes,
    loss_transients,
    mask_bytes,
)
from autopar.layouts.typing import OpTyping
from autopar.mesh import AxisPart, Mesh

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


WHOLE = Setting(Mesh(()), (), 1)


def moved(block: Block, name: str) -> int:
    return backward_bytes(block, block.ops[name], None, WHOLE)


def added(block: Block, name: str) -> int:
    return added_bytes(block, block.ops[name], None, WHOLE)


def named(block: Block, kind: str, count: int = 0) -> str:
    return [name for name, op in block.ops.items() if op_name(op.node) == kind][count]


def test_each_op() -> None:
    block = captured()
    gelu, dropout = named(block, "gelu"), named(block, "dropout")
    weight, bias = WIDTH * WIDTH * 4, WIDTH * 4
    assert moved(block, gelu) == 3 * SIZE  # gradient, input, gradient
    assert moved(block, named(block, "add")) == SIZE + bias  # the bias alone is summed
    inner = named(block, "linear", 1)
    assert moved(block, inner) == 3 * SIZE + 2 * weight  # the gradient, operands, their gradients
    residual = named(block, "add", 2)
    assert moved(block, residual) == 0  # handed on
    # Half of adding the two gradients of what both use.
    assert added(block, inner) == added(block, residual) == 3 * SIZE // 2
    assert added(block, gelu) == 0
    mask = mask_bytes(block, block.ops[dropout], None, WHOLE)
    assert 0 < mask <= ROWS * WIDTH
    assert moved(block, dropout) == 2 * SIZE + mask
    assert mask_bytes(block, block.ops[gelu], None, WHOLE) == 0


def test_what_one_kernel_could_do() -> None:
    block = captured()
    gelu, dropout, residual = (
        block.ops[name]
        for name in (named(block, "gelu"), named(block, "dropout"), named(block, "add", 2))
    )
    assert [n.name for n in chained(block, dropout)] == [gelu.node.name]
    # The first input is used twice: it has to be written.
    assert [n.name for n in chained(block, residual)] == [dropout.node.name]
    assert chained(block, gelu) == ()  # its input is the product's: the bias is added there
    assert chained(block, block.ops[named(block, "linear", 1)]) == ()
    assert chained_bytes(block, dropout, None, WHOLE) == 2 * SIZE
    assert chained_gradient_bytes(block, dropout, None, WHOLE) == 2 * SIZE
    # A sum's gradient is handed on: nothing is written that could be left out.
    assert chained_gradient_bytes(block, residual, None, WHOLE) == 0


def test_a_bias_is_part_of_its_product() -> None:
    block = captured()
    bias, residual = block.ops[named(block, "add")], block.ops[named(block, "add", 2)]
    assert in_product(block, bias, None, None)
    assert not in_product(block, residual, None, None)
    assert [e.phase for e in compute_effects(block, bias, None, WHOLE)] == ["backward"]
    product = bias.node.all_input_nodes[0].name
    split = AxisPart("tp", 2)
    near = {
        product: OpTyping({}, Layout(partial=frozenset((split,)))),
        bias.node.name: OpTyping({product: Layout()}, Layout()),
    }
    # A partial sum is reduced first.
    assert not in_product(block, bias, near[bias.node.name], near)


class Views(nn.Module):
    """Parts of a product, joined again, turned and flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """A sum."""
        first, second = self.inner(x).chunk(2, dim=-1)
        joined = torch.cat((second, first), dim=-1)
        turned = joined.view(ROWS, 2, WIDTH).transpose(0, 1)
        return (turned.reshape(2 * ROWS, WIDTH)[:ROWS] * 2).sum()


def test_views_that_copy() -> None:
    block = analyse(capture(Views(), torch.zeros(ROWS, WIDTH), None)).skeleton

    def both(kind: str) -> tuple[int, int]:
        op = block.ops[named(block, kind)]
        return copied_bytes(block, op, None, WHOLE), uncopied_bytes(block, op, None, WHOLE)

    assert both("chunk") == (0, 4 * SIZE)  # the parts' gradients are put together
    assert both("cat") == (4 * SIZE, 0)
    assert both("view") == both("transpose") == (0, 0)
    assert both("reshape") == (4 * SIZE, 0)
    assert both("slice") == (0, 4 * SIZE)  # zeros, and the part read and written


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
    # The gradient of the logarithms, and that of the logits; more than it cast back beside it.
    assert found.bytes == ROWS * 3 * 7 * (4 + 4)
    (loss,) = (op for op in block.ops.values() if op.kind == "loss")
    (classes,) = loss.closed
    logits = loss.node.all_input_nodes[0].name
    split = Layout(((classes, (AxisPart("tp", 7),)),))
    ops[loss.node.name] = OpTyping({logits: split}, Layout())
    (found,) = loss_transients(block, ops, Setting(Mesh((("tp", 7),)), (), 1))
    assert found.bytes == ROWS * 3 * (4 + 2)  # one op: as float32, and cast back

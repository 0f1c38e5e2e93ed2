"""What an op's backward moves, and what kernels that join ops needn't move.

A backward reads the gradient of what the op made and what autograd kept, and writes the gradients
of the inputs. A sum hands its gradient on as it is. Where several ops use a value, its gradients
are added up, each read and the sum written.
"""

import math
from collections.abc import Iterator, Mapping

import torch.fx

from autopar.graph.model_graph import Block, Op
from autopar.graph.ops import VIEW_CLASSES, op_name
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.typing import OpTyping
from autopar.layouts.work import first_output, internal_bytes, layout_in, made_layout
from autopar.plugin import Resident

HANDS_ON = frozenset({"add", "sub", "alias", "detach", "clone", "contiguous"})
"""Ops whose inputs of the output's shape get its gradient itself."""


def backward_bytes(block: Block, op: Op, typing: OpTyping | None, setting: Setting) -> int:
    """What the backward of an op that carries a gradient reads and writes on one rank."""
    value = block.values.get(op.node.name) or first_output(block, op.node)
    assert value is not None, op.node
    makes = made_layout(block, op, typing, setting)
    out = setting.local_numel(value.dims, makes) * value.item_bytes
    hands_on = op_name(op.node) in HANDS_ON
    kept = [one for one in block.saved if one.op == op.node.name]
    owners = {one.value for one in kept}
    needs: dict[str, Layout] = {}
    total, works = 0, False
    for source in dict.fromkeys(op.node.all_input_nodes):
        known = block.values.get(source.name)
        if known is None:
            continue
        layout = needs[source.name] = layout_in(block, typing, source.name, setting)
        size = setting.local_numel(known.dims, layout) * known.item_bytes
        if source.name in owners:
            total += size
        if known.needs_grad:
            if not hands_on or size != out:
                total, works = total + size, True
            total += _added_up(source, size)
    if op.node.name in owners:
        total += out
    for one in kept:
        if one.value is None:
            total += internal_bytes(block, one, OpTyping(needs, makes), setting)
    return total + (out if works else 0)


def _added_up(source: torch.fx.Node, size: int) -> int:
    """This use's part of adding the gradients of a value's uses: of n, n - 1 sums of two."""
    uses = len(source.users)
    return math.ceil(3 * size * (uses - 1) / uses)


def chained(block: Block, op: Op) -> torch.fx.Node | None:
    """The input of a pointwise op that only it uses and a pointwise op makes: a kernel that does
    both neither writes nor reads it."""
    if op.kind != "pointwise":
        return None
    for source in op.node.all_input_nodes:
        maker = block.ops.get(source.name)
        if maker is None or maker.kind != "pointwise" or maker.region is None:
            continue
        if len(source.users) == 1 and source.name in block.values:
            return source
    return None


def chained_bytes(block: Block, op: Op, typing: OpTyping | None, setting: Setting) -> int:
    """What the op and the maker of its chained input move of that, in a forward."""
    source = chained(block, op)
    if source is None:
        return 0
    value = block.values[source.name]
    layout = layout_in(block, typing, source.name, setting)
    return 2 * setting.local_numel(value.dims, layout) * value.item_bytes


def loss_transients(
    block: Block, ops: Mapping[str, OpTyping], setting: Setting
) -> Iterator[Resident]:
    """What a loss needs for a moment: the gradient of its input (the logits, in the loss's
    precision), and the same on its way through the casts and views before it."""
    for name, typing in ops.items():
        op = block.ops[name]
        source = next((n for n in op.node.all_input_nodes if n.name in typing.needs), None)
        if op.kind != "loss" or source is None or not block.values[source.name].needs_grad:
            continue
        layout, total = typing.needs[source.name], 0
        while source is not None:
            value = block.values[source.name]
            total += (
                setting.local_numel(value.dims, layout.restrict(value.names)) * value.item_bytes
            )
            source = _before_cast(block, source)
        yield Resident("transient", total, when="end")


def _before_cast(block: Block, node: torch.fx.Node) -> torch.fx.Node | None:
    """The input of the cast that made a value, views aside; None where no cast did."""
    while node.name in block.ops and len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        if source.name not in block.values:
            return None
        if op_name(node) == "to":
            return source
        if block.ops[node.name].kind not in VIEW_CLASSES:
            return None
        node = source
    return None

"""What an op's backward moves, and what kernels that join ops needn't move.

A backward reads the gradient of what the op made and what autograd kept, and writes the gradients
of the inputs. A sum hands its gradient on as it is. (Adding up gradients: `copies.added_bytes`.)
"""

from collections.abc import Iterator, Mapping

import torch.fx

from autopar.graph.model_graph import Block, Op
from autopar.graph.ops import VIEW_CLASSES, drops, op_name
from autopar.layouts.copies import Near, in_product
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
        if known.needs_grad and (not hands_on or size != out):
            total, works = total + size, True
    if op.node.name in owners:
        total += out
    for one in kept:
        if one.value is None:
            total += internal_bytes(block, one, OpTyping(needs, makes), setting)
    return total + (out if works else 0)


def chained(block: Block, op: Op, near: Near = None) -> tuple[torch.fx.Node, ...]:
    """The inputs of a pointwise op that only it uses and a pointwise op makes: a kernel that does
    both neither writes nor reads them. (A bias may be its product's to add.)"""
    if op.kind != "pointwise":
        return ()
    return tuple(
        source
        for source in dict.fromkeys(op.node.all_input_nodes)
        if len(source.users) == 1 and source.name in block.values and _chains(block, source, near)
    )


def _chains(block: Block, source: torch.fx.Node, near: Near) -> bool:
    maker = block.ops.get(source.name)
    if maker is None or maker.kind != "pointwise" or maker.region is None:
        return False
    typing = None if near is None else near.get(source.name)
    return not in_product(block, maker, typing, near)


def chained_bytes(
    block: Block, op: Op, typing: OpTyping | None, setting: Setting, near: Near = None
) -> int:
    """What the op and the makers of its chained inputs move of those, in a forward."""
    return sum(_twice(block, s, typing, setting) for s in chained(block, op, near))


def chained_gradient_bytes(
    block: Block, op: Op, typing: OpTyping | None, setting: Setting, near: Near = None
) -> int:
    """The same of their gradients in a backward, which the op writes and the maker reads; one that
    is only handed on has to be there. Of a norm: what its parts keep beside its input."""
    if op_name(op.node) in HANDS_ON:
        return 0
    if op.kind == "normalisation":
        return _inside_bytes(block, op, typing, setting)
    return sum(
        _twice(block, source, typing, setting)
        for source in chained(block, op, near)
        if op_name(source) not in HANDS_ON and block.values[source.name].needs_grad
    )


def mask_bytes(block: Block, op: Op, typing: OpTyping | None, setting: Setting) -> int:
    """What an op that drops at random writes beside its result."""
    return _inside_bytes(block, op, typing, setting) if drops(op.node) else 0


def _inside_bytes(block: Block, op: Op, typing: OpTyping | None, setting: Setting) -> int:
    """What an op keeps that it makes itself."""
    needs = {
        n.name: layout_in(block, typing, n.name, setting)
        for n in op.node.all_input_nodes
        if n.name in block.values
    }
    whole = OpTyping(needs, made_layout(block, op, typing, setting))
    kept = [one for one in block.saved if one.op == op.node.name and one.value is None]
    return sum(internal_bytes(block, one, whole, setting) for one in kept)


def _twice(block: Block, source: torch.fx.Node, typing: OpTyping | None, setting: Setting) -> int:
    value = block.values[source.name]
    layout = layout_in(block, typing, source.name, setting)
    return 2 * setting.local_numel(value.dims, layout) * value.item_bytes


def loss_transients(
    block: Block, ops: Mapping[str, OpTyping], setting: Setting
) -> Iterator[Resident]:
    """What a loss needs for a moment: the gradient of its input (the logits, in the loss's
    precision), and the same on its way through the casts and views before it. A cross-entropy of
    whole classes is two ops: the gradient of the logarithms and that of the logits come first."""
    for name, typing in ops.items():
        op = block.ops[name]
        source = next((n for n in op.node.all_input_nodes if n.name in typing.needs), None)
        if op.kind != "loss" or source is None or not block.values[source.name].needs_grad:
            continue
        layout, chain = typing.needs[source.name], []
        while source is not None:
            value = block.values[source.name]
            numel = setting.local_numel(value.dims, layout.restrict(value.names))
            chain.append(numel * value.item_bytes)
            source = _before_cast(block, source)
        whole = op_name(op.node) == "cross_entropy_loss" and not any(
            dim in op.closed for dim, _ in layout.splits
        )
        total = max(sum(chain), 2 * chain[0]) if whole else sum(chain)
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

"""What ops that aren't counted as work of their own move all the same: views that copy, gradients
of slices, and gradients that are added up."""

import math
from collections.abc import Mapping

from autopar.graph.model_graph import Block, Op
from autopar.graph.ops import biased_product, op_name
from autopar.layouts.layout import Setting
from autopar.layouts.typing import OpTyping
from autopar.layouts.views import IF_NEEDED, viewed
from autopar.layouts.work import layout_in, made_layout

JOINS = frozenset({"cat", "stack"})
PARTS = frozenset({"split", "split_with_sizes", "chunk", "unbind"})
SLICES = frozenset({"slice", "select"})
Near = Mapping[str, OpTyping] | None
"""The typed ops of a region; None in the unsplit model."""


def copied_bytes(block: Block, op: Op, typing: OpTyping | None, setting: Setting) -> int:
    """What a view op reads and writes in the forward: joined tensors, and what can't be seen in
    another shape."""
    name = op_name(op.node)
    if op.node.name not in block.values or name not in JOINS | IF_NEEDED:
        return 0
    if name in IF_NEEDED and _is_view(block, op, typing, setting):
        return 0
    return 2 * _bytes(block, op, op.node.name, typing, setting)


def uncopied_bytes(block: Block, op: Op, typing: OpTyping | None, setting: Setting) -> int:
    """What a view op's backward reads and writes. Parts' gradients are put together; a slice's is
    put into zeros; an expanded tensor's is summed."""
    name = op_name(op.node)
    sources = [n.name for n in op.node.all_input_nodes if n.name in block.values]
    if not sources or not block.values[sources[0]].needs_grad:
        return 0
    whole = _bytes(block, op, sources[0], typing, setting)
    if name in PARTS:
        return 2 * whole
    made = _bytes(block, op, op.node.name, typing, setting)
    if name in SLICES:
        return whole + 2 * made if made < whole else 0
    return made + whole if name == "expand" and made > whole else 0


def added_bytes(block: Block, op: Op, typing: OpTyping | None, setting: Setting) -> int:
    """An op's part of adding up the gradients of values that several ops use: of n, n - 1 sums,
    each of which reads two and writes one."""
    total = 0
    for source in dict.fromkeys(op.node.all_input_nodes):
        value = block.values.get(source.name)
        uses = len(source.users)
        if value is not None and value.needs_grad and uses > 1:
            size = _bytes(block, op, source.name, typing, setting)
            total += math.ceil(3 * size * (uses - 1) / uses)
    return total


def beside_pointwise(block: Block, op: Op) -> bool:
    """Whether joining tensors or parting one can be part of a pointwise op's kernel: one that takes
    what it makes, or makes what it takes."""
    if op_name(op.node) not in JOINS | PARTS | SLICES:
        return False
    users = [u for user in op.node.users for u in (user, *user.users)]
    near = [block.ops[n.name] for n in (*users, *op.node.all_input_nodes) if n.name in block.ops]
    return any(
        other.kind == "pointwise" and not in_product(block, other, None, None) for other in near
    )


def in_product(block: Block, op: Op, typing: OpTyping | None, near: Near) -> bool:
    """Whether an op adds a bias that the kernel of the product before it adds: nothing else uses
    the product, and no collective lies between."""
    if op_name(op.node) != "add" or (product := biased_product(op.node)) is None:
        return False
    if len(product.users) > 1:
        return False
    if typing is None or near is None:
        return True
    made = near.get(product.name)
    return made is not None and not made.makes.partial and made.makes == typing.needs[product.name]


def _is_view(block: Block, op: Op, typing: OpTyping | None, setting: Setting) -> bool:
    if typing is None:
        return op.node.name in block.views
    return viewed(block, op.node.name, typing, setting) is not None


def _bytes(block: Block, op: Op, name: str, typing: OpTyping | None, setting: Setting) -> int:
    """Of one of the op's inputs, or of what it makes."""
    value = block.values.get(name)
    if value is None:
        return 0
    made = name == op.node.name
    layout = (
        made_layout(block, op, typing, setting) if made else layout_in(block, typing, name, setting)
    )
    return setting.local_numel(value.dims, layout.restrict(value.names)) * value.item_bytes

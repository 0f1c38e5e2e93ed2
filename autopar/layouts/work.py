"""How much an op computes and moves on one rank: divisions of the whole graph's sizes."""

import math
from fractions import Fraction

import torch.fx

from autopar.graph.factors import expr_leaves
from autopar.graph.model_graph import Block, Op, SavedTensor, Value
from autopar.graph.ops import arguments, op_name
from autopar.graph.rules.products import einsum_terms, right_operand
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.sizes import inside_dims, matched
from autopar.layouts.typing import OpTyping, input_layout

RADIX_PASSES = 8
"""How often a radix sort of 64-bit keys, 8 bits at a time, reads and writes everything."""


def first_output(block: Block, node: torch.fx.Node) -> Value | None:
    """Of an op with several outputs (a maximum and where it is), one that is used."""
    users = sorted((u for u in node.users if u.name in block.values), key=lambda u: u.args[1])  # type: ignore[arg-type,return-value]
    return block.values[users[0].name] if users else None


def layout_in(block: Block, typing: OpTyping | None, name: str, setting: Setting) -> Layout:
    """The layout in which an op takes (or makes) a value."""
    if typing is not None and name in typing.needs:
        return typing.needs[name]
    return input_layout(block.values[name], setting) if name in block.values else Layout()


def made_layout(block: Block, op: Op, typing: OpTyping | None, setting: Setting) -> Layout:
    """The layout that an op makes."""
    if typing is not None:
        return typing.makes
    value = block.values.get(op.node.name) or first_output(block, op.node)
    return input_layout(value, setting) if value else Layout()


def moved_bytes(block: Block, op: Op, typing: OpTyping | None, setting: Setting) -> int:
    """What an op reads and writes on one rank in its forward."""
    makes = made_layout(block, op, typing, setting)
    value = block.values.get(op.node.name) or first_output(block, op.node)
    assert value is not None, op.node
    out = setting.local_numel(value.dims, makes)
    total = out * sum(made.item_bytes for made in _results(block, op.node))
    for n in dict.fromkeys(op.node.all_input_nodes):
        source = block.values.get(n.name)
        if source is not None:
            layout = layout_in(block, typing, n.name, setting)
            numel = setting.local_numel(source.dims, layout)
            if n is _table(op):
                numel = out
            total += numel * source.item_bytes
    return total * (RADIX_PASSES if op.kind == "sort" else 1)


def _results(block: Block, node: torch.fx.Node) -> list[Value]:
    made = [node] if node.name in block.values else list(node.users)
    return [block.values[n.name] for n in made if n.name in block.values]


def _table(op: Op) -> torch.fx.Node | None:
    """The input of which an op reads no more than it returns."""
    args = arguments(op.node)
    if op.kind == "embedding":
        return args["weight"]  # type: ignore[no-any-return]
    return args["self"] if op.kind == "index" else None


def forward_flops(block: Block, op: Op, typing: OpTyping | None, setting: Setting) -> int:
    """Of contractions and attention; what other ops compute hides behind what they move. Of grouped
    contractions: all rows, whichever groups they are in."""
    if op.kind not in ("contraction", "grouped", "convolution", "attention"):
        return 0
    value = block.values[op.node.name]
    makes = made_layout(block, op, typing, setting)
    out = setting.local_numel(value.dims, makes)
    args = arguments(op.node)
    if op.kind == "convolution":
        return _convolution_flops(block, op, typing, setting, out)
    if op.kind == "contraction" and "equation" in args:
        return 2 * out * _einsum_inner(block, op, typing, setting)
    if op.kind in ("contraction", "grouped"):
        operand = args["weight"] if "weight" in args else right_operand(args)
        source = block.values[operand.name]
        rows_out = "weight" in args and op.kind == "contraction"  # a linear's weight is [out, in]
        dim = 1 if rows_out else max(len(source.dims) - 2, 0)
        layout = layout_in(block, typing, operand.name, setting)
        return 2 * out * setting.local_length(source.dims[dim], layout)
    if op.kind == "attention":
        query, key = args["query"].name, args["key"].name
        keys = setting.local_length(
            block.values[key].dims[-2], layout_in(block, typing, key, setting)
        )
        inner = setting.local_length(
            block.values[query].dims[-1], layout_in(block, typing, query, setting)
        )
        outer = setting.local_length(value.dims[-1], makes)
        return 2 * (out // outer) * keys * (inner + outer)
    return 0


SPECIAL = frozenset(
    {
        *("tanh", "gelu", "silu", "sigmoid", "log_sigmoid", "exp", "exp2", "expm1", "log"),
        *("log1p", "log2", "log10", "sin", "cos", "tan", "erf", "erfc", "softplus", "mish", "elu"),
        *("selu", "celu", "softmax", "log_softmax", "logsumexp", "cross_entropy_loss"),
    }
)
"""Ops that take an exponential or the like of every element, of their input or their result."""

SPECIAL_AGAIN = frozenset(
    {"gelu", "silu", "log_sigmoid", "erf", "erfc", "softplus", "mish", "log_softmax"}
)
"""Those whose gradient takes another."""


def special_count(
    block: Block, op: Op, typing: OpTyping | None, setting: Setting, backward: bool
) -> int:
    """How many exponentials and the like an op takes on one rank; attention one for each pair of
    positions that its mask leaves, in either direction."""
    name, args = op_name(op.node), arguments(op.node)
    if op.kind == "attention":
        query, key = args["query"].name, args["key"].name
        rows = setting.local_shape(
            block.values[query].dims, layout_in(block, typing, query, setting)
        )
        keys = setting.local_length(
            block.values[key].dims[-2], layout_in(block, typing, key, setting)
        )
        return int(math.prod(rows[:-1]) * keys * (0.5 if args.get("is_causal") else 1))
    if name not in (SPECIAL_AGAIN if backward else SPECIAL):
        return 0
    source = op.node.all_input_nodes[0].name
    if source not in block.values:
        return 0
    return setting.local_numel(block.values[source].dims, layout_in(block, typing, source, setting))


def _convolution_flops(
    block: Block, op: Op, typing: OpTyping | None, setting: Setting, out: int
) -> int:
    """2 · outputs · kernel · input channels of a group; of a transposed one, 2 · inputs · kernel ·
    output channels of a group."""
    args = arguments(op.node)
    weight, source = args["weight"].name, args["input"].name
    shape = setting.local_shape(
        block.values[weight].dims, layout_in(block, typing, weight, setting)
    )
    if "output_padding" in args:
        layout = layout_in(block, typing, source, setting)
        out = setting.local_numel(block.values[source].dims, layout)
    return 2 * out * math.prod(shape[1:])


def _einsum_inner(block: Block, op: Op, typing: OpTyping | None, setting: Setting) -> int:
    """Local elements of the letters that are contracted."""
    args = arguments(op.node)
    terms, result = einsum_terms(args["equation"])
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, args["tensors"], strict=True):
        layout = layout_in(block, typing, operand.name, setting)
        shape = setting.local_shape(block.values[operand.name].dims, layout)
        for letter, length in zip(term, shape, strict=True):
            sizes[letter] = max(length, sizes.get(letter, 1))
    return math.prod(n for letter, n in sizes.items() if letter not in result)


def batch_share(block: Block, op: Op, typing: OpTyping | None, setting: Setting) -> Fraction:
    """The share of the global batch that one rank runs at a time through an op that is proportional
    to it; 1 for an op that takes no samples."""
    for n in op.node.all_input_nodes:
        value = block.values.get(n.name)
        leaf = next(
            (leaf for expr in value.dims for leaf in expr_leaves(expr) if leaf.name == "batch")
            if value is not None
            else iter(()),
            None,
        )
        if leaf is not None:
            layout = layout_in(block, typing, n.name, setting)
            return Fraction(setting.local_length((leaf,), layout), leaf.size)
    return Fraction(1)


def internal_bytes(block: Block, one: SavedTensor, typing: OpTyping, setting: Setting) -> int:
    """Made inside an op (statistics, masks)."""
    name, dims = inside_dims(block, one.op)
    layout = typing.makes if name == one.op else typing.needs[name]
    found, rest = matched(one.shape, dims)
    return one.item_bytes * rest * setting.local_numel(found, layout)

"""The local shapes of products and attention: what the speed of their kernels depends on."""

import math

from autopar.graph.model_graph import Block, Op
from autopar.graph.ops import arguments
from autopar.graph.rules.products import right_operand
from autopar.layouts.layout import Setting
from autopar.layouts.typing import OpTyping
from autopar.layouts.work import layout_in, made_layout


def kernel_shape(
    block: Block, op: Op, typing: OpTyping | None, setting: Setting, flops: int
) -> tuple[int, ...]:
    """`Compute.shape` of an op that does `flops` in its forward; () where it has none."""
    if not flops or op.node.name not in block.values:
        return ()
    if op.kind == "attention":
        return _attention_shape(block, op, typing, setting)
    if op.kind not in ("contraction", "grouped", "convolution"):
        return ()
    value = block.values[op.node.name]
    out = setting.local_shape(value.dims, made_layout(block, op, typing, setting))
    numel = math.prod(out)
    k = flops // (2 * numel)
    if op.kind == "convolution":
        # As an implicit product: pixels by kernel by channels.
        n = out[1]
        return (1, numel // n, n, k)
    if op.kind == "grouped":
        # The rows spread evenly over the groups, as the plan says that it assumes.
        args = arguments(op.node)
        operand = (args.get("weight") or right_operand(args)).name
        layout = layout_in(block, typing, operand, setting)
        groups = setting.local_length(block.values[operand].dims[0], layout)
        return (groups, math.ceil(out[0] / groups), out[-1], k)
    if not out:
        return (1, 1, 1, k)
    products = math.prod(out[: _batched_dims(block, op)])
    n = out[-1]
    return (products, numel // products // n, n, k)


def skipped_share(op: Op) -> float:
    """`Compute.skipped`: a causal mask hides half of the pairs, which fused attention skips."""
    return 0.5 if op.kind == "attention" and arguments(op.node).get("is_causal") else 0.0


def _batched_dims(block: Block, op: Op) -> int:
    """How many leading dims number products of their own: those of the right operand's batch."""
    args = arguments(op.node)
    if "weight" in args or "equation" in args:
        return 0
    operand = block.values[right_operand(args).name]
    return max(len(operand.dims) - 2, 0)


def _attention_shape(
    block: Block, op: Op, typing: OpTyping | None, setting: Setting
) -> tuple[int, ...]:
    args = arguments(op.node)
    query, key = args["query"].name, args["key"].name
    shape = setting.local_shape(block.values[query].dims, layout_in(block, typing, query, setting))
    keys = setting.local_length(block.values[key].dims[-2], layout_in(block, typing, key, setting))
    value = block.values[op.node.name]
    made = made_layout(block, op, typing, setting)
    outer = setting.local_length(value.dims[-1], made)
    return (math.prod(shape[:-2]), shape[-2], keys, shape[-1], outer)

"""Runs the factor rules over a graph: the dims of every tensor in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.fx

from autopar.graph.factors import FactorError, new_dim, unify
from autopar.graph.ops import class_of, op_name, shape_of
from autopar.graph.rules import RULES, Dims, OpDims

KnownDims = dict[torch.fx.Node, list[Dims]]


@dataclass(frozen=True)
class BlockDims:
    """`dims`: per node, one list of dims per output tensor. `ops`: what each op's rule found.
    `opaque`: ops without a rule, or used in a way that it doesn't cover, and why."""

    dims: KnownDims
    ops: dict[torch.fx.Node, OpDims]
    opaque: dict[str, str]
    inputs: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node, ...]


def read_dims(
    graph: torch.fx.Graph,
    callees: Mapping[str, "BlockDims | None"],
    start: Callable[[KnownDims], None] | None = None,
) -> BlockDims:
    """Dims of every node. `callees` are the blocks that the skeleton's layer calls run; their
    boundary dims are joined with the skeleton's. `start` sees the placeholders' dims first."""
    dims: KnownDims = {}
    ops: dict[torch.fx.Node, OpDims] = {}
    opaque: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            dims[node] = [[new_dim(length) for length in shape_of(node)]]
    if start is not None:
        start(dims)
    for node in graph.nodes:
        if node.op == "call_function":
            ops[node] = _apply(node, dims, callees, opaque)
            dims[node] = ops[node].out
    result = next(n for n in reversed(graph.nodes) if n.op == "output")
    placeholders = tuple(n for n in graph.nodes if n.op == "placeholder")
    return BlockDims(dims, ops, opaque, placeholders, tuple(result.args[0]))


def _apply(
    node: torch.fx.Node,
    dims: KnownDims,
    callees: Mapping[str, "BlockDims | None"],
    opaque: dict[str, str],
) -> OpDims:
    name = op_name(node)
    kind = class_of(name)
    if kind == "layer":
        callee = callees[str(node.args[1])]
        assert callee is not None
        return _call(node, callee, dims)
    if kind is None:
        opaque[node.name] = f"the op {node.target} has no factor rule"
        return _whole(node, dims, opaque[node.name])
    try:
        return RULES[kind](node, dims)
    except FactorError as error:
        opaque[node.name] = f"the op {node.target}: {error}"
        return _whole(node, dims, opaque[node.name])


def _call(node: torch.fx.Node, callee: BlockDims, dims: KnownDims) -> OpDims:
    """A layer call: the block's boundary dims are the caller's."""
    tensors: tuple[torch.fx.Node, ...] = tuple(node.args[0])  # type: ignore[arg-type]
    inputs = callee.inputs[len(callee.inputs) - len(tensors) :]
    for argument, placeholder in zip(tensors, inputs, strict=True):
        for mine, theirs in zip(dims[argument][0], callee.dims[placeholder][0], strict=True):
            unify(mine, theirs)
    return OpDims([callee.dims[out][0] for out in callee.outputs])


def _whole(node: torch.fx.Node, dims: KnownDims, reason: str) -> OpDims:
    """An op that is only ever run whole: fresh dims out, everything in is blocked."""
    values = node.meta["val"]
    tensors = values if isinstance(values, (list, tuple)) else [values]
    out = [[new_dim(int(length)) for length in t.shape] for t in tensors]
    touched = [dim for n in node.all_input_nodes for t in dims.get(n, ()) for dim in t]
    touched += [dim for t in out for dim in t]
    return OpDims(out, blocked=[(dim, reason) for dim in touched])

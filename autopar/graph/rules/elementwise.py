"""Ops along which every dim goes as it is, and constants."""

import torch.fx

from autopar.graph.factors import FactorError, new_dim, size, unify
from autopar.graph.ops import arguments, is_tensor, op_name, shape_of
from autopar.graph.rules.base import Known, OpDims, broadcast, dims_of, which_dims
from autopar.graph.rules.picking import same_but


def pointwise(node: torch.fx.Node, known: Known) -> OpDims:
    """Every dim is the same in all operands and the result."""
    return OpDims([broadcast([dims_of(known, n) for n in node.all_input_nodes if is_tensor(n)])])


def constant(node: torch.fx.Node, known: Known) -> OpDims:
    """A tensor made from numbers: fresh dims."""
    return OpDims([[new_dim(length) for length in shape_of(node)]])


def channelwise(node: torch.fx.Node, known: Known) -> OpDims:
    """prelu: a weight for each channel (dim 1), or one for all."""
    args = arguments(node)
    x, weight = dims_of(known, args["self"]), dims_of(known, args["weight"])
    if weight and shape_of(args["weight"]) != (1,):
        unify(x[1], weight[0])
    return OpDims([x])


def feature_dropout(node: torch.fx.Node, known: Known) -> OpDims:
    """dropout2d and the like drop whole feature maps: all but [batch, channels] is whole."""
    x = dims_of(known, arguments(node)["input"])
    return OpDims([x], blocked=[(dim, "whole feature maps are dropped") for dim in x[2:]])


def scan(node: torch.fx.Node, known: Known) -> OpDims:
    """cumsum, flip, roll, tril and the like: the same dims, whole where elements move or add up."""
    args, name = arguments(node), op_name(node)
    x = dims_of(known, args["self"])
    if name in ("tril", "triu"):
        along = [len(x) - 2, len(x) - 1]
    else:
        along = which_dims(args.get("dim", args.get("dims")), len(x))
    outputs = 2 if isinstance(node.meta["val"], (list, tuple)) else 1
    return OpDims([x] * outputs, blocked=[(x[d], f"{name} runs along it") for d in along])


def difference(node: torch.fx.Node, known: Known) -> OpDims:
    """diff: whole along its dim, which has as many elements as before or not."""
    args = arguments(node)
    x = list(dims_of(known, args["self"]))
    (dim,) = which_dims(args["dim"], len(x))
    whole = [x[dim]]
    for more in (args["prepend"], args["append"]):
        if more is not None:
            same_but(x, dims_of(known, more), dim)
            whole.append(dims_of(known, more)[dim])
    length = shape_of(node)[dim]
    if size(x[dim]) != length:
        x[dim] = new_dim(length)
        whole.append(x[dim])
    return OpDims([x], blocked=[(one, "diff runs along it") for one in whole])


def buffer_update(node: torch.fx.Node, known: Known) -> OpDims:
    """A model's buffer is written to in place: it and what is written are whole."""
    buffer = node.args[0]
    if not isinstance(buffer, torch.fx.Node) or _base(buffer).op != "placeholder":
        raise FactorError("a write to a tensor that is no buffer")
    pointwise(node, known)
    return OpDims([dims_of(known, buffer)])


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """What a chain of writes started from: each returns what it wrote to."""
    while node.op == "call_function" and op_name(node).endswith("_"):
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        node = source
    return node

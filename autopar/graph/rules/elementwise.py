"""Ops along which every dim goes as it is, and constants."""

import torch.fx

from autopar.graph.factors import FactorError, new_dim, unify
from autopar.graph.ops import arguments, is_tensor, op_name, shape_of
from autopar.graph.rules.base import Known, OpDims, broadcast, dims_of, which_dims


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


def buffer_update(node: torch.fx.Node, known: Known) -> OpDims:
    """`buffer += number`: batch norm's count of batches."""
    if len(node.all_input_nodes) != 1 or node.all_input_nodes[0].op != "placeholder":
        raise FactorError("a tensor written into a buffer")
    return OpDims([dims_of(known, node.all_input_nodes[0])])

"""Reductions and losses."""

import torch.fx

from autopar.graph.factors import FactorError, set_hint, unify
from autopar.graph.ops import arguments, is_tensor, op_name
from autopar.graph.rules.base import Known, OpDims, broadcast, dims_of, joined, which_dims


def reduction(node: torch.fx.Node, known: Known) -> OpDims:
    """sum (contracts); mean, amax, norm and the like (the reduced dims must stay whole)."""
    args, name = arguments(node), op_name(node)
    x = dims_of(known, args.get("self", args.get("x1")))
    if is_tensor(args.get("x2")):
        x = broadcast([x, dims_of(known, args["x2"])])
    dims = which_dims(args.get("dim"), len(x))
    keep = bool(args.get("keepdim"))
    out = [[] if i in dims else dim for i, dim in enumerate(x) if keep or i not in dims]
    reduced = [x[i] for i in dims]
    if name == "sum":
        return OpDims([out], contract=reduced)
    outputs = 2 if isinstance(node.meta["val"], (list, tuple)) else 1
    article = "an" if name[0] in "aeiou" else "a"
    why = f"{article} {name} runs along it"
    return OpDims([out] * outputs, blocked=[(dim, why) for dim in reduced])


def loss(node: torch.fx.Node, known: Known) -> OpDims:
    """A loss that is a sum by now: contracts all dims; classes must be whole."""
    args = arguments(node)
    x, target = dims_of(known, args["self"]), dims_of(known, args["target"])
    if op_name(node) not in ("cross_entropy_loss", "nll_loss"):
        both = broadcast([x, target])
        return OpDims([[]], contract=both)
    if len(x) != 2 and len(target) != len(x):
        raise FactorError("class dim between other dims")
    if len(target) == len(x):
        joined(x, target)
    else:
        unify(x[0], target[0])
    set_hint(x[-1], "vocab")
    plain = op_name(node) == "cross_entropy_loss" and len(x) == 2 and len(target) == 1
    if not plain or args["weight"] is not None or args["label_smoothing"]:
        reason = "over split classes only a plain cross-entropy can be emitted"
        return OpDims([[]], contract=list(x), unlowered=[(x[-1], reason)])
    return OpDims([[]], contract=list(x), closed=[x[-1]])

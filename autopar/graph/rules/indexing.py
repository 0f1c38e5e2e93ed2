"""Look-ups by index along dims."""

import torch.fx

from autopar.graph.factors import size, unify
from autopar.graph.ops import arguments, op_name, shape_of
from autopar.graph.positions import points_into
from autopar.graph.rules.base import Dims, Known, OpDims, broadcast, dims_of
from autopar.graph.rules.picking import PICKED, name_experts, no_masks, picked, pointed


def index(node: torch.fx.Node, known: Known) -> OpDims:
    """index, index_select, gather, take_along_dim, one_hot: the dim that is looked up along must
    be whole, unless each rank is known to pick its own elements; the index's own dims and all
    others are free."""
    args, name = arguments(node), op_name(node)
    x = dims_of(known, args["self"])
    if name == "index":
        return _index(x, args["indices"], known)
    if name == "one_hot":
        classes = pointed(args["self"], shape_of(node)[-1], known)
        return OpDims([[*x, classes]], blocked=[(classes, "one_hot makes it")])
    if name == "index_select":
        dim = args["dim"] % len(x)
        chosen = dims_of(known, args["index"]) or [[]]
        out = [*x[:dim], *chosen, *x[dim + 1 :]]
        return OpDims([out], blocked=picked(x[dim], args["index"], known))
    indices = dims_of(known, args["index"] if name == "gather" else args["indices"])
    dim = args["dim"] % len(x)
    blocked = picked(x[dim], args["index" if name == "gather" else "indices"], known)
    out = list(indices)
    for i, (mine, theirs) in enumerate(zip(x, indices, strict=True)):
        if i == dim:
            continue
        if size(mine) == size(theirs):
            unify(mine, theirs)
        elif name == "take_along_dim" and size(theirs) == 1:
            out[i] = mine
        elif not (name == "take_along_dim" and size(mine) == 1):
            blocked += [(mine, PICKED), (theirs, PICKED)]  # the first rows only
    return OpDims([out], blocked=blocked)


def _index(x: Dims, indices: list[torch.fx.Node | None], known: Known) -> OpDims:
    """x[i, :, j]: the indices broadcast; their dims stand where the first index stands if the
    indexed dims are neighbours, else in front."""
    where = [i for i, value in enumerate(indices) if value is not None]
    given = [index for index in indices if index is not None]
    no_masks(given)
    blocked = [b for i, index in zip(where, given, strict=True) for b in picked(x[i], index, known)]
    for i, index in zip(where, given, strict=True):
        found = points_into(index, known)
        if found is not None and found.ranked and len(x) > 2:
            name_experts(x[i])
    chosen = broadcast([dims_of(known, index) for index in given])
    rest = [dim for i, dim in enumerate(x) if i not in where]
    neighbours = where == list(range(where[0], where[0] + len(where)))
    at = where[0] if neighbours else 0
    return OpDims([[*rest[:at], *chosen, *rest[at:]]], blocked=blocked)

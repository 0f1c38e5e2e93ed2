"""Look-ups by index along dims."""

import torch.fx

from autopar.graph.factors import Product, new_dim, size, unify
from autopar.graph.ops import arguments, op_name, shape_of
from autopar.graph.rules.base import Dims, Known, OpDims, broadcast, dims_of


def index(node: torch.fx.Node, known: Known) -> OpDims:
    """index, index_select, gather, take_along_dim, one_hot: the dim that is looked up along must
    be whole; the index's own dims and all others are free."""
    args, name = arguments(node), op_name(node)
    x = dims_of(known, args["self"])
    if name == "index":
        return _index(x, args["indices"], known)
    if name == "one_hot":
        classes = new_dim(shape_of(node)[-1])
        return OpDims([[*x, classes]], blocked=[(classes, "one_hot makes it")])
    if name == "index_select":
        dim = args["dim"] % len(x)
        chosen = dims_of(known, args["index"]) or [[]]
        out = [*x[:dim], *chosen, *x[dim + 1 :]]
        return OpDims([out], blocked=[(x[dim], _WHY)])
    indices = dims_of(known, args["index"] if name == "gather" else args["indices"])
    dim = args["dim"] % len(x)
    blocked = [(x[dim], _WHY)]
    out = list(indices)
    for i, (mine, theirs) in enumerate(zip(x, indices, strict=True)):
        if i == dim:
            continue
        if size(mine) == size(theirs):
            unify(mine, theirs)
        elif name == "take_along_dim" and size(theirs) == 1:
            out[i] = mine
        elif not (name == "take_along_dim" and size(mine) == 1):
            blocked += [(mine, _WHY), (theirs, _WHY)]  # the first rows only
    return OpDims([out], blocked=blocked)


_WHY = "values are looked up along it by index"


def _index(x: Dims, indices: list[torch.fx.Node | None], known: Known) -> OpDims:
    """x[i, :, j]: the indices broadcast; their dims stand where the first index stands if the
    indexed dims are neighbours, else in front."""
    where = [i for i, value in enumerate(indices) if value is not None]
    chosen = broadcast([dims_of(known, indices[i]) for i in where])
    rest = [dim for i, dim in enumerate(x) if i not in where]
    neighbours = where == list(range(where[0], where[0] + len(where)))
    at = where[0] if neighbours else 0
    blocked: list[tuple[Product, str]] = [(x[i], _WHY) for i in where]
    return OpDims([[*rest[:at], *chosen, *rest[at:]]], blocked=blocked)

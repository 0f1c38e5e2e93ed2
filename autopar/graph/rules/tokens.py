"""Factor rules for ops that choose, sort, pick and count tokens, and for grouped matmuls.

Each rank does with its tokens what one device does with all. That is exact where only elements of
its own part are picked (see `positions`), and where nothing depends on the order of the sorted ones
(see `factors`, on orders).
"""

import torch
import torch.fx

from autopar.graph.factors import (
    FactorError,
    Product,
    leaves,
    new_dim,
    new_order,
    set_hint,
    unify,
)
from autopar.graph.ops import arguments, is_tensor, op_name
from autopar.graph.positions import counted, is_permutation, points_into
from autopar.graph.rules.base import Dims, Known, OpDims, broadcast, dims_of
from autopar.graph.rules.picking import name_experts, no_masks, picked, pointed, same_but


def top_k(node: torch.fx.Node, known: Known) -> OpDims:
    """The k largest along a dim, which must be whole; values and positions."""
    args = arguments(node)
    x = list(dims_of(known, args["self"]))
    dim = args["dim"] % len(x)
    chosen = new_dim(args["k"])
    set_hint(chosen, "top_k")
    out = [*x[:dim], chosen, *x[dim + 1 :]]
    why = "the largest along it are chosen"
    return OpDims([out, out], blocked=[(x[dim], why), (chosen, why)])


def sort(node: torch.fx.Node, known: Known) -> OpDims:
    """sort, argsort: each rank sorts what it has. Sorting a permutation restores the order that its
    positions point into."""
    args = arguments(node)
    source = args["self"]
    x = dims_of(known, source)
    if not x:
        raise FactorError("a sort of a single number")
    dim = args["dim"] % len(x)
    restored = points_into(source, known) if is_permutation(source) else None
    if restored is not None and not args["descending"]:
        ordered = restored.into
    else:
        ordered = new_order(x[dim])
    out = [*x[:dim], ordered, *x[dim + 1 :]]
    return OpDims([out] if op_name(node) == "argsort" else [out, out])


def scatter(node: torch.fx.Node, known: Known) -> OpDims:
    """scatter, scatter_add: elements written (added) along one dim, where an index says."""
    args = arguments(node)
    x, i = dims_of(known, args["self"]), dims_of(known, args["index"])
    dim = args["dim"] % len(x)
    same_but(x, i, dim)
    if is_tensor(args.get("src")):
        for mine, theirs in zip(dims_of(known, args["src"]), i, strict=True):
            unify(mine, theirs)
    return _written(node, x, dim, args["index"], i[dim], known, op_name(node) == "scatter_add")


def index_add(node: torch.fx.Node, known: Known) -> OpDims:
    """index_add: slices of the source added where an index says."""
    args = arguments(node)
    x, source = dims_of(known, args["self"]), dims_of(known, args["source"])
    dim = args["dim"] % len(x)
    same_but(x, source, dim)
    (rows,) = dims_of(known, args["index"])
    unify(source[dim], rows)
    return _written(node, x, dim, args["index"], rows, known, True)


def index_put(node: torch.fx.Node, known: Known) -> OpDims:
    """x[i] = values: with one index."""
    args = arguments(node)
    x = dims_of(known, args["self"])
    places = [place for place, given in enumerate(args["indices"]) if is_tensor(given)]
    if len(places) != 1:
        raise FactorError("elements written by several indices")
    (place,) = places
    written = args["indices"][place]
    no_masks([written])
    i = dims_of(known, written)
    broadcast([[*x[:place], *i, *x[place + 1 :]], dims_of(known, args["values"])])
    along = [factor for dim in i for factor in dim]
    return _written(node, x, place, written, along, known, bool(args["accumulate"]))


def _written(
    node: torch.fx.Node,
    x: Dims,
    dim: int,
    where: torch.fx.Node,
    rows: Product,
    known: Known,
    adds: bool,
) -> OpDims:
    """Rows written into a dim. Where a rank holds a part of the rows, it must hold the part of the
    dim that they go to; sums that start from zero may also be partial."""
    blocked = picked(x[dim], where, known)
    here = set(leaves(x[dim]))
    others: list[Product] = [[leaf] for leaf in leaves(rows) if leaf not in here]
    if adds and _is_zero(arguments(node)["self"]):
        return OpDims([x], contract=others, blocked=blocked)
    why = "elements along it are written where an index says"
    return OpDims([x], blocked=[*blocked, *((other, why) for other in others)])


def _is_zero(node: torch.fx.Node) -> bool:
    if node.op != "call_function":
        return False
    full = op_name(node) in ("full", "full_like", "new_full")
    if full:
        return bool(arguments(node)["fill_value"] == 0)
    return op_name(node) in ("zeros", "zeros_like", "new_zeros")


def repeat_interleave(node: torch.fx.Node, known: Known) -> OpDims:
    """Each element along a dim several times: a minor factor more."""
    args = arguments(node)
    x = list(dims_of(known, args["self"]))
    if not isinstance(args["repeats"], int) or (args["dim"] is None and len(x) != 1):
        raise FactorError("each element is repeated a number of times of its own")
    dim = (args["dim"] or 0) % len(x)
    times = new_dim(args["repeats"])
    x[dim] = [*x[dim], *times]
    return OpDims([x], unlowered=[(times, "it repeats elements in place")])


def count(node: torch.fx.Node, known: Known) -> OpDims:
    """histc: how many elements fall into each bin. Of a part of the elements: a partial sum."""
    args = arguments(node)
    bins = args["bins"]
    whole = args["min"] == 0 and args["max"] in (bins - 1, bins)
    if args["min"] == args["max"]:
        raise FactorError("bins that span the values found")
    counted_ = dims_of(known, args["self"])
    out = pointed(args["self"], bins, known) if whole else new_dim(bins)
    return OpDims([[out]], contract=list(counted_), blocked=[(out, "it is counted into")])


def search(node: torch.fx.Node, known: Known) -> OpDims:
    """searchsorted: places of values in a sorted sequence, which must be whole."""
    args = arguments(node)
    sequence = dims_of(known, args["sorted_sequence"])
    values = args["self"]
    x = dims_of(known, values) if is_tensor(values) else []
    for mine, theirs in zip(sequence[:-1], x[:-1], strict=False):
        unify(mine, theirs)
    return OpDims([x], blocked=[(sequence[-1], "values are searched in it")])


def grouped(node: torch.fx.Node, known: Known) -> OpDims:
    """A matmul of consecutive groups of rows, each with its own matrix. Offsets are where each
    group ends; a rank with a part of the rows needs those of its rows."""
    args = arguments(node)
    rows, weights = args.get("input", args.get("self")), args.get("weight", args.get("mat2"))
    x, w, ends = dims_of(known, rows), dims_of(known, weights), args["offs"]
    if len(x) != 2 or len(w) != 3 or not is_tensor(ends) or args.get("bias") is not None:
        raise FactorError("groups of another form than [rows, in] by [groups, in, out]")
    unify(x[1], w[1])
    unify(dims_of(known, ends)[0], w[0])
    name_experts(w[0])
    blocked = [(w[0], "each rank's rows may be of any group")]
    if counted(ends, x[0], known):
        return OpDims([[x[0], w[2]]], contract=[w[1]], blocked=blocked, shares=(ends,))
    blocked.append((x[0], "its groups aren't known to be counts of its own rows"))
    return OpDims([[x[0], w[2]]], contract=[w[1]], blocked=blocked)

"""Views, permutations, concatenations, splits, repeats and padding."""

from typing import Any

import torch.fx

from autopar.graph.factors import (
    FactorError,
    Product,
    concatenation,
    cut,
    find,
    new_dim,
    resolve,
    size,
    split_minor,
)
from autopar.graph.ops import arguments, op_name, shape_of
from autopar.graph.rules.base import Dims, Known, OpDims, broadcast, dims_of


def view(node: torch.fx.Node, known: Known) -> OpDims:
    """The same elements in order under another shape: products regroup."""
    rest = [factor for dim in dims_of(known, arguments(node)["self"]) for factor in resolve(dim)]
    out: Dims = []
    for length in shape_of(node):
        dim: Product = []
        done = 1
        while done < length:
            unit = find(rest.pop(0))
            need = length // done
            if need % unit.size == 0:
                dim.append(unit)
                done *= unit.size
                continue
            if unit.size % need:
                raise FactorError(f"view cuts a dim of size {unit.size} at {need}")
            high, low = split_minor([unit], unit.size // need)
            dim += high
            rest = low + rest
            done = length
        out.append(dim)
    return OpDims([out])


def permute(node: torch.fx.Node, known: Known) -> OpDims:
    """transpose, permute, t, unsqueeze, squeeze, expand, movedim."""
    args, name = arguments(node), op_name(node)
    x = list(dims_of(known, args["self"]))
    rank = len(x)
    if name in ("transpose", "swapaxes", "swapdims"):
        i, j = (args[k] % rank for k in (*(k for k in args if k != "self"),))
        x[i], x[j] = x[j], x[i]
    elif name in ("movedim", "moveaxis"):
        x = _moved(x, args["source"], args["destination"])
    elif name == "t":
        x.reverse()
    elif name == "permute":
        x = [x[d] for d in args["dims"]]
    elif name == "unsqueeze":
        x.insert(args["dim"] % (rank + 1), [])
    elif name == "squeeze":
        which = args.get("dim")
        gone = range(rank) if which is None else [which] if isinstance(which, int) else which
        drop = {d % rank for d in gone}
        x = [dim for i, dim in enumerate(x) if i not in drop or size(dim) != 1]
    else:
        shape = shape_of(node)
        x = [[]] * (len(shape) - rank) + x
        x = [
            new_dim(n) if size(dim) == 1 and n != 1 else dim
            for dim, n in zip(x, shape, strict=True)
        ]
    return OpDims([x])


def _moved(x: Dims, source: int | list[int], destination: int | list[int]) -> Dims:
    """The dims with some of them moved to given places, the others in order around them."""
    moved = [source] if isinstance(source, int) else source
    places = [destination] if isinstance(destination, int) else destination
    at = {p % len(x): s % len(x) for s, p in zip(moved, places, strict=True)}
    rest = iter(i for i in range(len(x)) if i not in at.values())
    return [x[at[p]] if p in at else x[next(rest)] for p in range(len(x))]


def concat_split(node: torch.fx.Node, known: Known) -> OpDims:
    """split, chunk, slice, select, unbind, cat, stack: segments of one dim."""
    args, name = arguments(node), op_name(node)
    if name == "cat":
        return _cat([dims_of(known, n) for n in args["tensors"]], args["dim"])
    if name == "stack":
        operands = [dims_of(known, n) for n in args["tensors"]]
        others, made = broadcast(operands), new_dim(len(operands))
        dim = args["dim"] % (len(others) + 1)
        out = [*others[:dim], made, *others[dim:]]
        return OpDims([out], blocked=[(made, "tensors are stacked along it")])
    x = list(dims_of(known, args["self"]))
    dim = args["dim"] % len(x)
    whole = size(x[dim])
    if name == "select":
        gone = x.pop(dim)
        return OpDims([x], blocked=[(gone, "one index of it is taken")])
    if name == "unbind":
        gone = x.pop(dim)
        return OpDims([x] * whole, blocked=[(gone, "each index of it is taken")])
    if name == "slice":
        start, stop = slice_bounds(args, whole)
        if args["step"] != 1:
            x[dim] = new_dim(shape_of(node)[dim])
            return OpDims([x], blocked=[(dims_of(known, args["self"])[dim], "every n-th is taken")])
        if (start, stop) == (0, whole):
            return OpDims([x])
        sizes = [start, stop - start, whole - stop]
        x[dim] = cut(x[dim], sizes)[1 if start else 0]
        return OpDims([x])
    sizes = [int(value.shape[dim]) for value in node.meta["val"]]
    return OpDims([[*x[:dim], segment, *x[dim + 1 :]] for segment in cut(x[dim], sizes)])


def slice_bounds(args: dict[str, Any], whole: int) -> tuple[int, int]:
    """Start and stop of a slice along a dim of this size, both within it."""
    start, end = args["start"], args["end"]
    low = 0 if start is None else max(start + whole, 0) if start < 0 else min(start, whole)
    high = whole if end is None else max(end + whole, 0) if end < 0 else min(end, whole)
    return low, high


def _cat(operands: list[Dims], dim: int) -> OpDims:
    dim %= len(operands[0])
    others = broadcast([[e for i, e in enumerate(dims) if i != dim] for dims in operands])
    joined = [concatenation([dims[dim] for dims in operands])]
    return OpDims([[*others[:dim], joined, *others[dim:]]])


def untraced_cut(node: torch.fx.Node, known: Known) -> OpDims:
    """A concatenation or a cut along a dim that must be whole for it: what comes out is a dim of
    its own, so that what goes in stays one dim everywhere else."""
    args, name = arguments(node), op_name(node)
    operands = [dims_of(known, n) for n in (args["tensors"] if name == "cat" else [args["self"]])]
    dim = args["dim"] % len(operands[0])
    rest = broadcast([[e for i, e in enumerate(dims) if i != dim] for dims in operands])
    value = node.meta["val"]
    results = value if isinstance(value, (list, tuple)) else [value]
    why = "it is put together here" if name == "cat" else "a part of it is taken"
    blocked = [(dims[dim], why) for dims in operands]
    out = [[*rest[:dim], new_dim(int(r.shape[dim])), *rest[dim:]] for r in results]
    return OpDims(out, blocked=[*blocked, *((dims[dim], why) for dims in out)])


def repeat(node: torch.fx.Node, known: Known) -> OpDims:
    """repeat, tile: a repeated dim is a new major factor times itself."""
    args = arguments(node)
    x = list(dims_of(known, args["self"]))
    times = list(args["repeats" if "repeats" in args else "dims"])
    x = [[]] * (len(times) - len(x)) + x
    times = [1] * (len(x) - len(times)) + times
    return OpDims([[[*new_dim(n), *dim] for n, dim in zip(times, x, strict=True)]])


def pad(node: torch.fx.Node, known: Known) -> OpDims:
    """Padded dims are new dims; what they came from must be whole."""
    x = dims_of(known, arguments(node)["self"])
    shape = shape_of(node)
    same = [size(dim) == length for dim, length in zip(x, shape, strict=True)]
    out = [dim if kept else new_dim(n) for dim, n, kept in zip(x, shape, same, strict=True)]
    changed = [dim for dim, kept in zip([*x, *out], same * 2, strict=True) if not kept]
    return OpDims([out], blocked=[(dim, "it is padded") for dim in changed])


def getitem(node: torch.fx.Node, known: Known) -> OpDims:
    """One output of an op with several."""
    source, index = node.args[0], node.args[1]
    assert isinstance(source, torch.fx.Node) and isinstance(index, int)
    return OpDims([known[source][index]])

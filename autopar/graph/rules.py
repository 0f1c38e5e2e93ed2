"""Factor rules by op class: which input dims are which output dims, which are contracted, and
which must stay whole.

A rule joins factors (see `factors`) and returns `OpDims`. An op without a rule, or used in a way
that its rule does not cover, is an error that names it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.fx

from autopar.graph.factors import (
    FactorError,
    Product,
    concatenation,
    cut,
    find,
    new_dim,
    resolve,
    set_hint,
    size,
    split_minor,
    unify,
)
from autopar.graph.ops import arguments, is_tensor, op_name, shape_of

Dims = list[Product]


@dataclass
class OpDims:
    """What a rule found. `out` has one list of dims per output tensor.

    `closed`: contracted dims whose partial sums the op adds up itself, where they are split.
    `blocked`: dims that must stay whole for this op, with the reason. `unlowered`: dims that could
    be split here in theory, but whose split form can't be emitted.
    """

    out: list[Dims]
    contract: list[Product] = field(default_factory=list)
    closed: list[Product] = field(default_factory=list)
    blocked: list[tuple[Product, str]] = field(default_factory=list)
    unlowered: list[tuple[Product, str]] = field(default_factory=list)


Known = Mapping[torch.fx.Node, list[Dims]]
Rule = Callable[[torch.fx.Node, Known], OpDims]


def _dims(known: Known, node: object) -> Dims:
    assert isinstance(node, torch.fx.Node)
    return known[node][0]


def broadcast(operands: Sequence[Dims]) -> Dims:
    """The dims of a broadcast result: aligned from the right, size-1 dims give way."""
    rank = max(map(len, operands))
    out: Dims = [[] for _ in range(rank)]
    for dims in operands:
        for position, dim in enumerate(dims, start=rank - len(dims)):
            if size(dim) == 1:
                continue
            if size(out[position]) == 1:
                out[position] = dim
            else:
                unify(out[position], dim)
    return out


def pointwise(node: torch.fx.Node, known: Known) -> OpDims:
    """Every dim is the same in all operands and the result."""
    return OpDims([broadcast([_dims(known, n) for n in node.all_input_nodes if is_tensor(n)])])


def contraction(node: torch.fx.Node, known: Known) -> OpDims:
    """linear (bias split off before), matmul, mm, bmm."""
    args = arguments(node)
    if op_name(node) == "linear":
        assert args["bias"] is None, "biases are separate adds by now"
        x, weight = _dims(known, args["input"]), _dims(known, args["weight"])
        unify(x[-1], weight[1])
        return OpDims([[*x[:-1], weight[0]]], contract=[weight[1]])
    x = _dims(known, args["self"])
    y = _dims(known, args.get("other") or args["mat2"])
    if len(x) < 2 or len(y) < 2:
        raise FactorError("matrix times vector")
    unify(x[-1], y[-2])
    lead = broadcast([x[:-2], y[:-2]]) if len(x) > 2 or len(y) > 2 else []
    return OpDims([[*lead, x[-2], y[-1]]], contract=[y[-2]])


def normalisation(node: torch.fx.Node, known: Known) -> OpDims:
    """layer_norm, rms_norm, softmax: whole along the normalised dims."""
    args = arguments(node)
    x = _dims(known, args.get("input") or args["self"])
    if op_name(node) in ("softmax", "log_softmax"):
        return OpDims([x], blocked=[(x[args["dim"]], "softmax runs along it")])
    count = len(args["normalized_shape"])
    for parameter in (args["weight"], args.get("bias")):
        if is_tensor(parameter):
            for mine, theirs in zip(_dims(known, parameter), x[-count:], strict=True):
                unify(mine, theirs)
    set_hint(x[-1], "hidden")
    return OpDims([x], blocked=[(dim, f"{op_name(node)} runs along it") for dim in x[-count:]])


def reduction(node: torch.fx.Node, known: Known) -> OpDims:
    """sum (contracts) and mean (must stay whole: its divisor is the whole dim)."""
    args = arguments(node)
    x = _dims(known, args["self"])
    which = args.get("dim")
    chosen = list(range(len(x))) if which is None else [which] if isinstance(which, int) else which
    dims = {int(d) % len(x) for d in chosen} if x else set()
    keep = bool(args.get("keepdim"))
    out = [[] if i in dims else dim for i, dim in enumerate(x) if keep or i not in dims]
    reduced = [x[i] for i in sorted(dims)]
    if op_name(node) == "sum":
        return OpDims([out], contract=reduced)
    return OpDims([out], blocked=[(dim, "a mean runs along it") for dim in reduced])


def attention(node: torch.fx.Node, known: Known) -> OpDims:
    """Scaled dot-product attention: heads and batch are free, the sequence must be whole."""
    args = arguments(node)
    q, k, v = (_dims(known, args[name]) for name in ("query", "key", "value"))
    for mine, theirs in zip(q[:-3], k[:-3], strict=True):
        unify(mine, theirs)
    if size(q[-3]) != size(k[-3]):
        groups, rest = split_minor(q[-3], size(q[-3]) // size(k[-3]))
        unify(groups, k[-3])
        set_hint(rest, "query_group")
        set_hint(k[-3], "kv_heads")
    else:
        unify(q[-3], k[-3])
        _name_heads(q[-3])
    for mine, theirs in zip(k[:-1], v[:-1], strict=True):
        unify(mine, theirs)
    unify(q[-1], k[-1])
    set_hint(q[-1], "head_dim")
    if size(q[-1]) == size(v[-1]):
        unify(q[-1], v[-1])  # one name for both; each must stay whole anyway
    set_hint(v[-1], "head_dim")
    set_hint(q[-2], "sequence")
    set_hint(k[-2], "sequence")
    mask = args["attn_mask"]
    if is_tensor(mask):
        for mine, theirs in zip(_dims(known, mask)[::-1], [*q[:-1], k[-2]][::-1], strict=False):
            if size(mine) != 1:
                unify(mine, theirs)
    whole = "attention needs the whole sequence"
    inner = "attention scores sum over it"
    return OpDims(
        [[*q[:-1], v[-1]]],
        blocked=[(q[-2], whole), (k[-2], whole), (q[-1], inner), (v[-1], inner)],
    )


def _name_heads(dim: Product) -> None:
    """Heads, or kv heads times the queries that share one (keys repeated by an expand)."""
    factors = resolve(dim)
    set_hint(factors[:1], "heads" if len(factors) == 1 else "kv_heads")
    if len(factors) == 2:
        set_hint(factors[1:], "query_group")


def embedding(node: torch.fx.Node, known: Known) -> OpDims:
    """Rows of a table: the table's first dim is contracted."""
    args = arguments(node)
    weight, indices = _dims(known, args["weight"]), _dims(known, args["indices"])
    set_hint(weight[0], "vocab")
    set_hint(weight[1], "hidden")
    return OpDims([[*indices, weight[1]]], contract=[weight[0]])


def loss(node: torch.fx.Node, known: Known) -> OpDims:
    """A loss that is a sum by now: contracts all dims; classes must be whole."""
    args = arguments(node)
    x, target = _dims(known, args["self"]), _dims(known, args["target"])
    if op_name(node) not in ("cross_entropy_loss", "nll_loss"):
        both = broadcast([x, target])
        return OpDims([[]], contract=both)
    if len(x) != 2 and len(target) != len(x):
        raise FactorError("class dim between other dims")
    if len(target) == len(x):
        for mine, theirs in zip(x, target, strict=True):
            unify(mine, theirs)
    else:
        unify(x[0], target[0])
    set_hint(x[-1], "vocab")
    plain = op_name(node) == "cross_entropy_loss" and len(x) == 2 and len(target) == 1
    if not plain or args["weight"] is not None or args["label_smoothing"]:
        reason = "over split classes only a plain cross-entropy can be emitted"
        return OpDims([[]], contract=list(x), unlowered=[(x[-1], reason)])
    return OpDims([[]], contract=list(x), closed=[x[-1]])


def constant(node: torch.fx.Node, known: Known) -> OpDims:
    """A tensor made from numbers: fresh dims."""
    return OpDims([[new_dim(length) for length in shape_of(node)]])


def pad(node: torch.fx.Node, known: Known) -> OpDims:
    """Padded dims are new dims; what they came from must be whole."""
    x = _dims(known, arguments(node)["self"])
    shape = shape_of(node)
    same = [size(dim) == length for dim, length in zip(x, shape, strict=True)]
    out = [dim if kept else new_dim(n) for dim, n, kept in zip(x, shape, same, strict=True)]
    return OpDims(
        [out], blocked=[(d, "it is padded") for d, kept in zip(x, same, strict=True) if not kept]
    )


def view(node: torch.fx.Node, known: Known) -> OpDims:
    """The same elements in order under another shape: products regroup."""
    rest = [factor for dim in _dims(known, arguments(node)["self"]) for factor in resolve(dim)]
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
    """transpose, permute, t, unsqueeze, squeeze, expand."""
    args, name = arguments(node), op_name(node)
    x = list(_dims(known, args["self"]))
    rank = len(x)
    if name == "transpose":
        i, j = args["dim0"] % rank, args["dim1"] % rank
        x[i], x[j] = x[j], x[i]
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


def concat_split(node: torch.fx.Node, known: Known) -> OpDims:
    """split, chunk, slice, select, cat: segments of one dim."""
    args, name = arguments(node), op_name(node)
    if name == "cat":
        return _cat([_dims(known, n) for n in args["tensors"]], args["dim"])
    x = list(_dims(known, args["self"]))
    dim = args["dim"] % len(x)
    whole = size(x[dim])
    if name == "select":
        gone = x.pop(dim)
        return OpDims([x], blocked=[(gone, "one index of it is taken")])
    if name == "slice":
        start, stop = _bounds(args["start"], args["end"], whole)
        if args["step"] != 1:
            x[dim] = new_dim(shape_of(node)[dim])
            return OpDims([x], blocked=[(_dims(known, args["self"])[dim], "every n-th is taken")])
        if (start, stop) != (0, whole):
            segments = cut(x[dim], [start, stop - start, whole - stop])
            x[dim] = segments[1 if start else 0]
        return OpDims([x])
    sizes = [int(value.shape[dim]) for value in node.meta["val"]]
    segments = cut(x[dim], sizes)
    return OpDims([[*x[:dim], segment, *x[dim + 1 :]] for segment in segments])


def untraced_cut(node: torch.fx.Node, known: Known) -> OpDims:
    """A concatenation or a cut along a dim that must be whole for it: what comes out is a dim of
    its own, so that what goes in stays one dim everywhere else."""
    args, name = arguments(node), op_name(node)
    operands = [_dims(known, n) for n in (args["tensors"] if name == "cat" else [args["self"]])]
    dim = args["dim"] % len(operands[0])
    rest = broadcast([[e for i, e in enumerate(dims) if i != dim] for dims in operands])
    value = node.meta["val"]
    results = value if isinstance(value, (list, tuple)) else [value]
    why = "it is put together here" if name == "cat" else "a part of it is taken"
    blocked = [(dims[dim], why) for dims in operands]
    out = [[*rest[:dim], new_dim(int(r.shape[dim])), *rest[dim:]] for r in results]
    return OpDims(out, blocked=[*blocked, *((dims[dim], why) for dims in out)])


def _bounds(start: int | None, end: int | None, whole: int) -> tuple[int, int]:
    low = 0 if start is None else start + whole if start < 0 else min(start, whole)
    high = whole if end is None else end + whole if end < 0 else min(end, whole)
    return low, high


def _cat(operands: list[Dims], dim: int) -> OpDims:
    dim %= len(operands[0])
    others = broadcast([[e for i, e in enumerate(dims) if i != dim] for dims in operands])
    joined = [concatenation([dims[dim] for dims in operands])]
    return OpDims([[*others[:dim], joined, *others[dim:]]])


def getitem(node: torch.fx.Node, known: Known) -> OpDims:
    """One output of an op with several."""
    source, index = node.args[0], node.args[1]
    assert isinstance(source, torch.fx.Node) and isinstance(index, int)
    return OpDims([known[source][index]])


RULES: dict[str, Rule] = {
    "pointwise": pointwise,
    "contraction": contraction,
    "normalisation": normalisation,
    "reduction": reduction,
    "attention": attention,
    "embedding": embedding,
    "loss": loss,
    "constant": constant,
    "pad": pad,
    "view": view,
    "permute": permute,
    "concat_split": concat_split,
    "getitem": getitem,
}

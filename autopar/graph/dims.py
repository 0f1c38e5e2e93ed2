"""Runs the factor rules over a graph: the dims of every tensor in it.

An op without a rule is opaque: its dims must stay whole. The batch alone may be split, where a
probe finds that the op treats samples one by one.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.fx

from autopar.capture.opaque_code import OpaqueCode, Place, code_of
from autopar.capture.probe import Dependent, Independent, probe
from autopar.capture.source_line import source_line
from autopar.errors import AutoparError
from autopar.graph.factors import (
    FactorError,
    Product,
    leaves,
    new_dim,
    resolve,
    set_hint,
    size,
    split_minor,
    unify,
)
from autopar.graph.ops import arguments, class_of, op_name, shape_of
from autopar.graph.rules import RULES, Dims, OpDims, untraced_cut

KnownDims = dict[torch.fx.Node, list[Dims]]


Enter = Callable[[str, Sequence[Dims]], "BlockDims"]
"""A layer's path and the dims of its call's tensors → the dims of the block that it runs."""


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
    enter: Enter | None = None,
    start: Callable[[KnownDims], None] | None = None,
    untraced: Collection[str] = (),
) -> BlockDims:
    """Dims of every node. `enter` gives the blocks that the skeleton's layer calls run; their
    boundary dims are joined with the skeleton's. `start` sees the placeholders' dims first.
    `untraced`: concatenations and cuts whose result along that dim is a dim of its own."""
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
            whole = node.name in untraced
            ops[node] = untraced_cut(node, dims) if whole else _apply(node, dims, enter, opaque)
            dims[node] = ops[node].out
    result = next(n for n in reversed(graph.nodes) if n.op == "output")
    placeholders = tuple(n for n in graph.nodes if n.op == "placeholder")
    return BlockDims(dims, ops, opaque, placeholders, tuple(result.args[0]))


def join_inputs(known: KnownDims, given: Sequence[Dims]) -> None:
    """Says that a block's inputs (its last placeholders) are the tensors that a call gives it."""
    inputs = [node for node in known if node.op == "placeholder"]
    for theirs, mine in zip(inputs[len(inputs) - len(given) :], given, strict=True):
        for a, b in zip(mine, known[theirs][0], strict=True):
            unify(a, b)


def _apply(
    node: torch.fx.Node, dims: KnownDims, enter: Enter | None, opaque: dict[str, str]
) -> OpDims:
    kind = class_of(op_name(node))
    if kind == "layer":
        assert enter is not None
        tensors: tuple[torch.fx.Node, ...] = tuple(node.args[0])  # type: ignore[arg-type]
        given = [dims[argument][0] for argument in tensors]
        try:
            callee = enter(str(node.args[1]), given)
            join_inputs(callee.dims, given)
        except FactorError as error:
            raise _no_layer(node, tensors, error) from error
        return OpDims([callee.dims[out][0] for out in callee.outputs])
    if kind is not None:
        try:
            return _with_births(node, kind, RULES[kind](node, dims), dims)
        except FactorError as error:
            why = str(error)
    else:
        why = "no factor rule"
    code = code_of(node)
    what = f"{node.target} at {source_line(node)}: {why}"
    if code is not None:
        what = f"the layer's own code runs, {code.where} can't be exported ({code.why})"
    return _opaque(node, dims, what, opaque)


def _no_layer(
    node: torch.fx.Node, tensors: Sequence[torch.fx.Node], error: FactorError
) -> AutoparError:
    """What to do where the dims of a layer's inputs are none that its other calls have."""
    made = ", ".join(f"{t.name} ({source_line(t)})" for t in tensors if t.op == "call_function")
    return AutoparError(
        f"can't analyse the call of {node.args[1]} with {made or 'its inputs'}: {error}. Do it in "
        "one module with the layers, outside nn.ModuleList and nn.Sequential, so that they aren't "
        "captured apart"
    )


MADE_LOCALLY = frozenset({"constant"})
"""Classes of ops that make a rank's part of a dim that no input has as easily as the whole dim."""


def _with_births(node: torch.fx.Node, kind: str, found: OpDims, dims: KnownDims) -> OpDims:
    """A dim that no input carries is made whole by the op that makes it (padding, counts, every
    n-th element), whatever its rule says."""
    if kind in MADE_LOCALLY or op_name(node) in ("expand", "repeat_interleave"):
        return found
    given = {f for n in node.all_input_nodes for t in dims.get(n, ()) for d in t for f in leaves(d)}
    for tensor in found.out:
        for dim in tensor:
            born = [f for f in leaves(dim) if f not in given]
            found.blocked.extend(([f], f"{op_name(node)} makes it whole") for f in born)
    return found


def _opaque(node: torch.fx.Node, dims: KnownDims, what: str, opaque: dict[str, str]) -> OpDims:
    """Fresh dims out; all dims but the batch, and often the batch too, must be whole."""
    values = node.meta["val"]
    tensors = values if isinstance(values, (list, tuple)) else [values]
    out = [[new_dim(int(length)) for length in t.shape] for t in tensors]
    code = code_of(node)
    found, batch = _batch(node, dims) if code is None else _code_batch(code, node, dims)
    if isinstance(found, Independent):
        for value, tensor, (dim, _) in zip(tensors, out, found.outputs, strict=True):
            # The probe may have shrunk what shares the dim with the batch.
            rest, left = divmod(int(value.shape[dim]), size(batch))
            assert left == 0, (node, value.shape, dim)
            tensor[dim] = _with_rest(batch, rest, node, dims)
        how = "a probe" if code is None else "small runs"
        text = f"{what}; samples are independent, as {how} found"
    else:
        text = f"{what}; {found.why}"
    opaque[node.name] = text
    touched = [dim for n in node.all_input_nodes for t in dims.get(n, ()) for dim in t]
    touched += [dim for t in out for dim in t]
    free = set(leaves(batch)) if isinstance(found, Independent) else set()
    whole = [[factor for factor in resolve(dim) if factor not in free] for dim in touched]
    return OpDims(out, blocked=[(dim, text) for dim in whole if dim])


def _batch(node: torch.fx.Node, dims: KnownDims) -> tuple[Independent | Dependent, Product]:
    """What a probe along the batch finds, and the batch's factor."""
    places: dict[torch.fx.Node, Place] = {}
    batch: Product = []
    for n in node.all_input_nodes:
        tensors = dims.get(n, [])
        carried = [f for t in tensors for dim in t for f in leaves(dim) if f.hint == "batch"]
        if not carried:
            continue
        found = [(i, dim) for i, dim in enumerate(tensors[0]) if _leads(dim)]
        if len(tensors) != 1 or len(carried) != 1 or len(found) != 1:
            return Dependent("the batch isn't the leading part of one dim of its input"), []
        (position, dim), batch = found[0], carried
        places[n] = position, math.prod(f.size for f in resolve(dim)[1:])
    if not places:
        return Dependent("its inputs don't carry the batch"), []
    return probe(node, places), batch


def _code_batch(
    code: OpaqueCode, node: torch.fx.Node, dims: KnownDims
) -> tuple[Independent | Dependent, Product]:
    """Where small runs of a layer found the batch, joined over its inputs."""
    batch: Product = []
    inputs: tuple[torch.fx.Node, ...] = tuple(node.args[0])  # type: ignore[arg-type]
    for n, place in zip(inputs, code.inputs, strict=True):
        if place is not None:
            major, _ = split_minor(dims[n][0][place[0]], place[1])
            batch = batch or major
            unify(batch, major)
    set_hint(batch, "batch")
    return (Dependent(code.mixing) if code.mixing else Independent(code.outputs)), batch


def _leads(dim: Product) -> bool:
    factors = resolve(dim)
    return bool(factors) and factors[0].hint == "batch"


def _with_rest(batch: Product, rest: int, node: torch.fx.Node, dims: KnownDims) -> Product:
    """The batch, or the batch times what shares its dim in an input."""
    if rest == 1:
        return list(batch)
    inputs = [dim for n in node.all_input_nodes for dim in dims[n][0] if _leads(dim)]
    for dim in inputs:
        if math.prod(f.size for f in resolve(dim)[1:]) == rest:
            return dim
    return [*batch, *new_dim(rest)]


def is_cut(node: torch.fx.Node) -> bool:
    """Whether an op concatenates along a dim or takes a part of one."""
    return op_name(node) in ("cat", "slice", "split", "split_with_sizes", "chunk")


def broken_cuts(known: BlockDims) -> set[str]:
    """The concatenations and cuts that make a batch or a sequence a concatenation of segments."""
    found = set()
    for node, info in known.ops.items():
        if not is_cut(node):
            continue
        args = arguments(node)
        given = args["tensors"] if op_name(node) == "cat" else [args["self"]]
        dim = args["dim"] % len(shape_of(given[0]))
        around = [known.dims[n][0][dim] for n in given] + [out[dim] for out in info.out]
        if any(_segmented(one) for one in around):
            found.add(node.name)
    return found


def _segmented(dim: Product) -> bool:
    return any(f.segments is not None and f.hint in ("batch", "sequence") for f in resolve(dim))

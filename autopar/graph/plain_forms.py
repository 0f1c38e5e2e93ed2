"""Ops that say in a word what others say in two, spelt out, so that fewer ops need rules."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx

from autopar.graph.arange_index import without_arange
from autopar.graph.ops import arguments, is_tensor, op_name, shape_of
from autopar.graph.positions import is_permutation
from autopar.graph.rewrite import insert, named
from autopar.graph.shared_heads import share_heads

aten = torch.ops.aten


def plain_form(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Rewrite one op, where it has a plainer form."""
    for name, rewrite in _FORMS.items():
        if named(node, name):
            rewrite(graph, node)
            return


def _without_broadcast(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Operands of one shape stay as they are, others are expanded (losses call this)."""
    operands = arguments(node)["tensors"]
    for user in list(node.users):
        operand = operands[user.args[1]]
        if shape_of(operand) != shape_of(user):
            shape = list(shape_of(user))
            operand = insert(graph, user, aten.expand.default, (operand, shape), user)
        user.replace_all_uses_with(operand)
        graph.erase_node(user)
    graph.erase_node(node)


def _plain_constant(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """new_zeros and the like depend on no values."""
    value = {"new_zeros": 0, "new_ones": 1, "new_empty": 0}.get(op_name(node))
    fill = arguments(node)["fill_value"] if value is None else value
    shape, made = list(shape_of(node)), node.meta["val"]
    with graph.inserting_before(node):
        other = graph.call_function(aten.full.default, (shape, fill), {"dtype": made.dtype})
    other.meta = dict(node.meta)
    _replace(graph, node, other)


def _replace(graph: torch.fx.Graph, node: torch.fx.Node, other: torch.fx.Node) -> None:
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def _plain_view(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """broadcast_to, expand_as, reshape_as, narrow, outer and .T under the names that have rules."""
    args, name, shape = arguments(node), op_name(node), list(shape_of(node))
    source = args["self"]
    if name in ("broadcast_to", "expand_as"):
        other = insert(graph, node, aten.expand.default, (source, shape), node)
    elif name in ("reshape_as", "view_as"):
        other = insert(graph, node, aten.reshape.default, (source, shape), node)
    elif name == "narrow":
        if is_tensor(args["start"]):
            return
        start = args["start"] % shape_of(source)[args["dim"]]
        bounds = (source, args["dim"], start, start + args["length"])
        other = insert(graph, node, aten.slice.Tensor, bounds, node)
    elif name == "outer":
        column = insert(graph, node, aten.unsqueeze.default, (source, 1), node)
        other = insert(graph, node, aten.mul.Tensor, (column, args["vec2"]), node)
    elif len(shape) == 2:
        other = insert(graph, node, aten.t.default, (source,), node)
    else:
        return
    _replace(graph, node, other)


def _meshgrid(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Each tensor along a dim of its own, expanded."""
    args = arguments(node)
    tensors = args["tensors"]
    order = list(range(len(tensors)))
    if args.get("indexing") == "xy":
        order[:2] = order[:2][::-1]
    for user in list(node.users):
        shape, place = list(shape_of(user)), arguments(user)["index"]
        alone = [n if i == order[place] else 1 for i, n in enumerate(shape)]
        source = insert(graph, user, aten.reshape.default, (tensors[place], alone), user)
        _replace(graph, user, insert(graph, user, aten.expand.default, (source, shape), user))
    graph.erase_node(node)


def _glu(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """a · sigmoid(b) of the two halves."""
    args = arguments(node)
    source, dim = args["self"], args["dim"] % len(shape_of(node))
    half = shape_of(node)[dim]
    left = insert(graph, node, aten.slice.Tensor, (source, dim, 0, half), node)
    right = insert(graph, node, aten.slice.Tensor, (source, dim, half, 2 * half), node)
    gate = insert(graph, node, aten.sigmoid.default, (right,), node)
    _replace(graph, node, insert(graph, node, aten.mul.Tensor, (left, gate), node))


def _weight_norm(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """v · g / ‖v‖, the norm over all dims but one."""
    args = arguments(node)
    v, g = args["v"], args["g"]
    rank = len(shape_of(v))
    dims = [d for d in range(rank) if args["dim"] == -1 or d != args["dim"] % rank]
    norm = insert(graph, node, aten.linalg_vector_norm.default, (v, 2, dims, True), node)
    scale = insert(graph, node, aten.div.Tensor, (g, norm), node)
    _replace(graph, node, insert(graph, node, aten.mul.Tensor, (v, scale), node))


def _baddbmm(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """beta · self + alpha · (batch1 @ batch2)."""
    args = arguments(node)
    out = insert(graph, node, aten.bmm.default, (args["batch1"], args["batch2"]), node)
    if args["alpha"] != 1:
        out = insert(graph, node, aten.mul.Tensor, (out, args["alpha"]), node)
    if args["beta"] != 0:  # with 0, torch doesn't look at it
        bias: Any = args["self"]
        if args["beta"] != 1:
            bias = insert(graph, node, aten.mul.Tensor, (bias, args["beta"]), node)
        out = insert(graph, node, aten.add.Tensor, (out, bias), node)
    _replace(graph, node, out)


def _pixel_shuffle(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """[…, c·r·r, h, w] → […, c, h·r, w·r], and back."""
    args = arguments(node)
    source = args["self"]
    *lead, _, height, width = shape_of(source)
    n = len(lead)
    *_, channels, out_height, out_width = shape_of(node)
    if op_name(node) == "pixel_shuffle":
        r = args["upscale_factor"]
        cut, order = [channels, r, r, height, width], [0, 3, 1, 4, 2]
    else:
        r = args["downscale_factor"]
        cut, order = [shape_of(source)[n], out_height, r, out_width, r], [0, 2, 4, 1, 3]
    dims = [*range(n), *(n + d for d in order)]
    apart = insert(graph, node, aten.reshape.default, (source, [*lead, *cut]), node)
    turned = insert(graph, node, aten.permute.default, (apart, dims), node)
    shape = list(shape_of(node))
    _replace(graph, node, insert(graph, node, aten.reshape.default, (turned, shape), node))


def _plain_inverse(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """inverse[p] = arange(n) inverts a permutation; so does argsort, and says so."""
    args = arguments(node)
    indices, values = args["indices"], args["values"]
    if len(indices) != 1 or not named(values, "arange") or not is_permutation(indices[0]):
        return
    counts_up = arguments(values).get("start", 0) == 0 and arguments(values).get("step", 1) == 1
    if counts_up and shape_of(values) == shape_of(node) and node.meta["val"].dtype == torch.int64:
        _replace(graph, node, insert(graph, node, aten.argsort.default, (indices[0],), node))


def _mean_by_sum(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """A mean of everything is a sum over the whole number of elements: sums can be split."""
    args = arguments(node)
    if node.target is not aten.mean.default or args["dtype"] is not None:
        return
    total = insert(graph, node, aten.sum.default, (args["self"],), node)
    count = math.prod(shape_of(args["self"]))
    node.replace_all_uses_with(insert(graph, node, aten.div.Tensor, (total, count), node))
    graph.erase_node(node)


def _of_two(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """The larger or the smaller of two tensors."""
    if node.target is aten.min.other:
        node.target = aten.minimum.default
    elif node.target is aten.max.other:
        node.target = aten.maximum.default


def _operator(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """x & y and the like."""
    plain = {
        "__and__": aten.bitwise_and,
        "__or__": aten.bitwise_or,
        "__xor__": aten.bitwise_xor,
    }[op_name(node)]
    node.target = plain.Tensor if is_tensor(arguments(node)["other"]) else plain.Scalar


def _type_as(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    source, dtype = arguments(node)["self"], node.meta["val"].dtype
    _replace(graph, node, insert(graph, node, aten.to.dtype, (source, dtype), node))


_FORMS: Mapping[str, Callable[[torch.fx.Graph, torch.fx.Node], None]] = {
    "scaled_dot_product_attention": share_heads,
    "broadcast_tensors": _without_broadcast,
    "mean": _mean_by_sum,
    "min": _of_two,
    "max": _of_two,
    "index": without_arange,
    "index_put": _plain_inverse,
    "glu": _glu,
    "meshgrid": _meshgrid,
    "baddbmm": _baddbmm,
    "type_as": _type_as,
    "_weight_norm": _weight_norm,
    **dict.fromkeys(("__and__", "__or__", "__xor__"), _operator),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), _plain_constant),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), _pixel_shuffle),
    **dict.fromkeys(
        ("broadcast_to", "expand_as", "numpy_T", "reshape_as", "view_as", "narrow", "outer"),
        _plain_view,
    ),
}

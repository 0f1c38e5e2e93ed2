"""x[arange(n), i]: the first index only says that rows go with rows. Without it every dim that it
stands for can be split; with it, its numbers would have to know where a part begins."""

import torch
import torch.fx

from autopar.graph.ops import arguments, is_tensor, op_name, shape_of
from autopar.graph.rewrite import insert

aten = torch.ops.aten
_SHAPING = ("unsqueeze", "view", "reshape", "expand", "to", "clone", "contiguous", "squeeze")


def without_arange(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Rewrite an `index` in which some indices are whole aranges, each along a dim of its own, and
    at most one is not: a permuted view, or a gather along that one's dim."""
    args = arguments(node)
    source, indices = args["self"], list(args["indices"])
    if not indices or any(not is_tensor(i) or _is_mask(i) for i in indices):
        return
    rank = max(len(shape_of(i)) for i in indices)
    lengths = shape_of(source)
    places = [_arange_place(i, n, rank) for i, n in zip(indices, lengths, strict=False)]
    general = [d for d, place in enumerate(places) if place is None]
    found = [place for place in places if place is not None]
    if not found or len(set(found)) < len(found) or len(general) > 1:
        return
    # The source as [the index's dims (1 where no arange stands), the looked-up dim, the rest].
    rest = list(range(len(indices), len(lengths)))
    order = [*(places.index(p) for p in sorted(found)), *general, *rest]
    x = source
    if order != list(range(len(order))):
        x = insert(graph, node, aten.permute.default, (x, order), node)
    for place in range(rank):
        if place not in found:
            x = insert(graph, node, aten.unsqueeze.default, (x, place), node)
    tail = [lengths[d] for d in rest]
    shape = list(shape_of(node))
    if general:
        index = indices[general[0]]
        lead = shape[:rank]
        if not _from_argmax(index):  # gather takes no negative indices
            index = insert(graph, node, aten.remainder.Scalar, (index, lengths[general[0]]), node)
        x = _expanded(graph, node, x, [*lead, lengths[general[0]], *tail])
        for _ in range(rank - len(shape_of(index))):
            index = insert(graph, node, aten.unsqueeze.default, (index, 0), node)
        for _ in range(1 + len(tail)):
            index = insert(graph, node, aten.unsqueeze.default, (index, -1), node)
        index = _expanded(graph, node, index, [*lead, 1, *tail])
        x = insert(graph, node, aten.gather.default, (x, rank, index), node)
        x = insert(graph, node, aten.squeeze.dim, (x, rank), node)
    else:
        x = _expanded(graph, node, x, shape)
    node.replace_all_uses_with(x)
    graph.erase_node(node)


def _expanded(
    graph: torch.fx.Graph, node: torch.fx.Node, x: torch.fx.Node, shape: list[int]
) -> torch.fx.Node:
    if list(shape_of(x)) == shape:
        return x
    return insert(graph, node, aten.expand.default, (x, shape), node)


def _from_argmax(index: torch.fx.Node) -> bool:
    node = index
    while node.op == "call_function" and op_name(node) in _SHAPING:
        source: torch.fx.Node = arguments(node)["self"]
        node = source
    return node.op == "call_function" and op_name(node) in ("argmax", "argmin")


def _is_mask(index: torch.fx.Node) -> bool:
    return index.meta["val"].dtype in (torch.bool, torch.uint8)


def _arange_place(index: torch.fx.Node, length: int, rank: int) -> int | None:
    """The dim, of the broadcast indices, along which an index is 0, 1, …, length - 1."""
    shape = shape_of(index)
    along = [d for d, n in enumerate(shape) if n != 1]
    if length == 1 or len(along) != 1 or shape[along[0]] != length:
        return None
    node = index
    while node.op == "call_function" and op_name(node) in _SHAPING:
        if node.meta["val"].is_floating_point():
            return None
        source: torch.fx.Node = arguments(node)["self"]
        node = source
    if node.op != "call_function" or op_name(node) != "arange":
        return None
    args = arguments(node)
    plain = args.get("start") in (None, 0) and args.get("step") in (None, 1)
    return along[0] + rank - len(shape) if plain and shape_of(node) == (length,) else None

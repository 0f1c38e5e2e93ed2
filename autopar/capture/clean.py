"""Removing from a graph what computes nothing."""

from collections.abc import Collection

import torch
import torch.fx
from torch import Tensor
from torch.fx import Graph, Node

from autopar.capture.functional import make_functional, mutates, packet

_ATEN = torch.ops.aten
_DROPOUTS = {
    _ATEN.dropout,
    _ATEN.alpha_dropout,
    _ATEN.feature_dropout,
    _ATEN.feature_alpha_dropout,
}
_SAME_TENSOR = {  # ops that return their input where shape, dtype and strides stay
    _ATEN.alias,
    _ATEN.to,
    _ATEN.contiguous,
    _ATEN.view,
    _ATEN.view_as,
    _ATEN.reshape,
    _ATEN._unsafe_view,
    _ATEN.expand,
    _ATEN.expand_as,
    _ATEN.slice,
    _ATEN.type_as,
    _ATEN.lift_fresh_copy,
    _ATEN.lift_fresh,
}


def clean(graph: Graph, inputs: Collection[Node]) -> None:
    """Drop asserts, writes in place, ops that are provably the identity, and dead code. `inputs`
    are the program's own arguments."""
    for node in list(graph.nodes):
        if packet(node) is _ATEN._assert_tensor_metadata:
            graph.erase_node(node)
    # First, since a copy that computes nothing still protects its input from a later write.
    make_functional(graph, inputs)
    for node in list(graph.nodes):
        if packet(node) is _ATEN.cat:
            _without_empty(node)
        if _is_identity(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    drop_dead(graph)
    graph.lint()


def _without_empty(node: Node) -> None:
    """A concatenation with an empty tensor is one without it."""
    pieces = node.args[0]
    assert isinstance(pieces, (list, tuple))
    kept = [p for p in pieces if isinstance(p, Node) and p.meta["val"].numel()]
    if kept and len(kept) < len(pieces):
        node.args = (kept, *node.args[1:])


def drop_dead(graph: Graph) -> None:
    """Drop what nothing uses, in-place updates of buffers excepted. Random ops may go."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not mutates(node):
            graph.erase_node(node)


def _is_identity(node: Node) -> bool:
    kind = packet(node)
    if kind is None or not node.args or not isinstance(node.args[0], Node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    if kind in (_ATEN.detach, _ATEN.detach_):
        return _has_no_gradient(node.args[0])
    if kind in _DROPOUTS:
        return bool(node.args[1] == 0.0 or node.args[2] is False)
    same = before.shape == after.shape and before.dtype == after.dtype
    return (
        kind in _SAME_TENSOR
        and same
        and before.stride() == after.stride()
        and node.kwargs.get("copy") is not True
    )


def _has_no_gradient(node: Node) -> bool:
    """A lifted constant, or an integer tensor."""
    value = node.meta["val"]
    lifted = node.op == "placeholder" and str(node.target).startswith("c_")
    return lifted or not (value.is_floating_point() or value.is_complex())

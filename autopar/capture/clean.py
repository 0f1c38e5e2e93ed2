"""Removing from a graph what computes nothing."""

import torch
import torch.fx
from torch import Tensor
from torch.fx import Graph, Node

_ATEN = torch.ops.aten
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
_COPIES = {_ATEN.dropout, _ATEN.lift_fresh_copy}


def packet(node: Node) -> object:
    """The op without its overload (`aten.to` for `aten.to.dtype`), None for other nodes."""
    return getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None


def mutates(node: Node) -> bool:
    """Whether the op writes to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def clean(graph: Graph) -> None:
    """Drop asserts, ops that are provably the identity, and dead code."""
    for node in list(graph.nodes):
        if packet(node) is _ATEN._assert_tensor_metadata:
            graph.erase_node(node)
    # First, since a copy that computes nothing still protects its input from a later write.
    make_functional(graph)
    writes = any(mutates(n) and n.args[0].op != "placeholder" for n in graph.nodes)
    for node in list(graph.nodes):
        if _is_identity(node) and not (writes and packet(node) in _COPIES):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    drop_dead(graph)
    graph.lint()


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
    if kind is _ATEN.dropout:
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
    lifted = node.op == "placeholder" and str(node.target).startswith("c_")
    return lifted or not node.meta["val"].is_floating_point()


def make_functional(graph: Graph) -> None:
    """`relu_` → `relu` and the like, where no other node sees the memory that is written."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        functional = _functional(node)
        if functional is None or _others_see_write(node, order):
            continue
        node.target = functional
        # Names follow the op: add__1 becomes add_N.
        node._rename(functional.__name__.split(".")[0])


def _functional(node: Node) -> torch._ops.OpOverload | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not mutates(node):
        return None
    name = target.overloadpacket.__name__
    plain = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    if plain is None or target._overloadname not in plain.overloads():
        return None
    written = node.args[0]
    assert isinstance(written, Node)
    same = node.meta["val"].dtype == written.meta["val"].dtype
    return getattr(plain, target._overloadname) if same else None


def _others_see_write(node: Node, order: dict[Node, int]) -> bool:
    """Whether a node that shares the written memory is read after the write, or is an input."""
    written = node.args[0]
    assert isinstance(written, Node)
    storage = _storage(written)
    for other in order:
        if other is node or order[other] >= order[node] or _storage(other) != storage:
            continue
        if other.op == "placeholder" or any(order[user] > order[node] for user in other.users):
            return True
    return False


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None

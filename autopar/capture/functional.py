"""Writes in place become new tensors, so that a graph's order is that of its data alone.

`y[:, 1:] = x` reaches the graph as a view of y and a copy_ into it. Here the view's new value is
joined with what stays of y (a concatenation along the sliced dim), and every later use of y and of
its views reads the result. Writes to a model's buffers stay.
"""

import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx import Graph, Node

from autopar.errors import AutoparError

_ATEN = torch.ops.aten
_RESHAPES = {_ATEN.view, _ATEN.reshape, _ATEN._unsafe_view, _ATEN.view_as, _ATEN.reshape_as}
_SAME = {_ATEN.alias, _ATEN.detach, _ATEN.contiguous, _ATEN.to, _ATEN.lift_fresh, _ATEN.type_as}
_WRITABLE = (
    _RESHAPES
    | _SAME
    | {_ATEN.slice, _ATEN.select, _ATEN.transpose, _ATEN.t, _ATEN.permute}
    | {_ATEN.unsqueeze, _ATEN.squeeze, _ATEN.flatten, _ATEN.unflatten, _ATEN.expand}
)


def packet(node: Node) -> object:
    """The op without its overload (`aten.to` for `aten.to.dtype`), None for other nodes."""
    return getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None


def mutates(node: Node) -> bool:
    """Whether the op writes to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def make_functional(graph: Graph, inputs: Collection[Node]) -> None:
    """Replace every write but those to buffers. `inputs` are the placeholders of the program's own
    arguments: of the batch (a layer that writes to its arguments is no block, see `stub`).

    Errors: AutoparError for a write through a view that has no functional form.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not mutates(node):
            continue
        target = node.args[0]
        assert isinstance(target, Node)
        base, views = _chain(target)
        if base.op == "placeholder" and base not in inputs:
            continue
        _replace(graph, node, base, views)


def _chain(node: Node) -> tuple[Node, list[Node]]:
    """The tensor that a node is a view of, and the views from there to the node."""
    views: list[Node] = []
    while (packet(node) in _WRITABLE and _storage(node) == _storage(node.args[0])) or (
        node.op == "call_function" and mutates(node)  # what it wrote to, itself
    ):
        if not mutates(node):
            views.insert(0, node)
        assert isinstance(node.args[0], Node)
        node = node.args[0]
    known = node.op == "placeholder" or node.target is operator.getitem
    if not known and _storages(node) & {s for n in node.all_input_nodes for s in _storages(n)}:
        raise AutoparError(
            f"{node.target} makes a view that is written to in place at {_line(node)}, which can't "
            "be captured: write y = f(x) instead of changing x"
        )
    return node, views


def _replace(graph: Graph, node: Node, base: Node, views: list[Node]) -> None:
    order = {n: i for i, n in enumerate(graph.nodes)}
    after = {n for n in graph.nodes if order[n] > order[node]}
    aliases = [
        n for n in graph.nodes if order[n] < order[node] and n is not base and _views(n, base)
    ]
    _check_shared(graph, node, {base, *aliases}, after)
    memory = _storage(base)
    with graph.inserting_before(node):
        before = [base]
        for view in views:
            before.append(_again(graph, view, before[-1]))
        new = _written(graph, node, before[-1])
        node.replace_all_uses_with(new)
        for view, whole in zip(reversed(views), reversed(before[:-1]), strict=True):
            new = _joined(graph, view, whole, new)
        read_again = [n for n in aliases if any(user in after for user in n.users)]
        fresh = _made_anew(graph, base, new, read_again)
    for old, value in fresh.items():
        old.replace_all_uses_with(value, delete_user_cb=lambda user: user in after)
    graph.erase_node(node)
    for later in graph.nodes:  # views made afterwards are now of the new tensor's memory
        if later in after and packet(later) in _WRITABLE and _storage(later) == memory:
            later.meta["val"] = _value(later.target, later.args, later.kwargs, base)


def _made_anew(graph: Graph, base: Node, new: Node, aliases: list[Node]) -> dict[Node, Node]:
    """What later reads of `base` and of these views of it see instead."""
    fresh: dict[Node, Node] = {base: new}
    for alias in aliases:
        for step in _chain(alias)[1]:
            if step not in fresh:
                source = step.args[0]
                assert isinstance(source, Node)
                fresh[step] = _again(graph, step, fresh[source])
    return fresh


def _check_shared(graph: Graph, node: Node, known: set[Node], after: set[Node]) -> None:
    """Only views that can be made anew may share memory that is written to and read again."""
    memory = {_storage(n) for n in known}
    for other in graph.nodes:
        if other in known or other in after or other is node or not memory & _storages(other):
            continue
        if any(user in after for user in other.users):
            raise AutoparError(
                f"memory is written to in place at {_line(node)} and read again through "
                f"{other.target}, which can't be captured: compute a new tensor instead"
            )


def _views(node: Node, base: Node) -> bool:
    """Whether a node is a view of `base`."""
    if packet(node) not in _WRITABLE or _storage(node) != _storage(base):
        return False
    return _chain(node)[0] is base


def _written(graph: Graph, node: Node, old: Node) -> Node:
    """The value that the tensor `old` has after a write."""
    name = packet(node).__name__  # type: ignore[attr-defined]
    shape, dtype = list(old.meta["val"].shape), old.meta["val"].dtype
    if name in ("copy_", "fill_"):
        source = node.args[1]
        if not isinstance(source, Node):
            return _call(graph, _ATEN.full_like.default, (old, source), old, node)
        if source.meta["val"].dtype != dtype:
            source = _call(graph, _ATEN.to.dtype, (source, dtype), source, node)
        if list(source.meta["val"].shape) != shape:
            source = _call(graph, _ATEN.expand.default, (source, shape), source, node)
        return source
    overload = getattr(node.target, "_overloadname", "")
    plain = getattr(_ATEN, name.removesuffix("_"), None)
    if plain is None or overload not in plain.overloads():
        raise AutoparError(
            f"{node.target} writes in place at {_line(node)} and has no form that returns a new "
            "tensor: compute a new one instead"
        )
    result = _call(graph, getattr(plain, overload), (old, *node.args[1:]), old, node, node.kwargs)
    if result.meta["val"].dtype != dtype:
        result = _call(graph, _ATEN.to.dtype, (result, dtype), result, node)
    return result


def _joined(graph: Graph, view: Node, whole: Node, part: Node) -> Node:
    """`whole` with what `view` shows of it replaced by `part`."""
    kind, value = packet(view), whole.meta["val"]
    if kind in _SAME:
        return part
    if kind in _RESHAPES or kind in (_ATEN.flatten, _ATEN.unflatten, _ATEN.squeeze):
        return _call(graph, _ATEN.reshape.default, (part, list(value.shape)), part, view)
    if kind in (_ATEN.transpose, _ATEN.t):
        dims = view.args[1:] if kind is _ATEN.transpose else (0, 1)
        return _call(graph, _ATEN.transpose.int, (part, *dims), part, view)
    if kind is _ATEN.permute:
        order = [d % value.dim() for d in view.args[1]]  # type: ignore[union-attr]
        inverse = [order.index(i) for i in range(len(order))]
        return _call(graph, _ATEN.permute.default, (part, inverse), part, view)
    if kind is _ATEN.unsqueeze:
        return _call(graph, _ATEN.squeeze.dim, (part, view.args[1]), part, view)
    if kind in (_ATEN.slice, _ATEN.select):
        return _inserted(graph, view, whole, part)
    raise AutoparError(
        f"a tensor is written to in place through {view.target} at {_line(view)}, which can't be "
        "captured: compute a new tensor instead"
    )


def _inserted(graph: Graph, view: Node, whole: Node, part: Node) -> Node:
    """A slice or one index of `whole` replaced: what lies before, the part, what lies after."""
    value = whole.meta["val"]
    args: tuple[Any, ...] = (*view.args, *([None] * 5))
    dim = (args[1] or 0) % value.dim()
    length = int(value.shape[dim])
    if packet(view) is _ATEN.select:
        start = args[2] % length
        stop = start + 1
        part = _call(graph, _ATEN.unsqueeze.default, (part, dim), part, view)
    else:
        if (args[4] or 1) != 1:
            raise AutoparError(
                f"every {args[4]}-th element is written to in place at {_line(view)}, which can't "
                "be captured: compute a new tensor instead"
            )
        start, stop, _ = slice(args[2], args[3]).indices(length)
    pieces = [
        _piece(graph, view, whole, dim, 0, start),
        part if stop > start else None,
        _piece(graph, view, whole, dim, max(start, stop), length),
    ]
    kept = [piece for piece in pieces if piece is not None]
    if len(kept) == 1:
        return kept[0]
    return _call(graph, _ATEN.cat.default, (kept, dim), kept[0], view)


def _piece(graph: Graph, view: Node, whole: Node, dim: int, start: int, stop: int) -> Node | None:
    """`whole[start:stop]` along a dim, of a concatenation its pieces themselves; None if empty."""
    if stop <= start:
        return None
    if packet(whole) is _ATEN.cat and (whole.args[1] if len(whole.args) > 1 else 0) == dim:
        at, found = 0, []
        for piece in whole.args[0]:  # type: ignore[union-attr]
            assert isinstance(piece, Node)
            end = at + int(piece.meta["val"].shape[dim])
            if start <= at and end <= stop:
                found.append(piece)
            elif at < stop and start < end:
                break
            at = end
        else:
            if len(found) == 1:
                return found[0]
            return _call(graph, _ATEN.cat.default, (found, dim), found[0], view)
    return _call(graph, _ATEN.slice.Tensor, (whole, dim, start, stop), whole, view)


def _again(graph: Graph, view: Node, source: Node) -> Node:
    """The same view of another tensor."""
    return _call(graph, view.target, (source, *view.args[1:]), source, view, view.kwargs)


def _call(
    graph: Graph,
    target: Any,
    args: tuple[Any, ...],
    fake: Node,
    like: Node,
    kwargs: Any = None,
) -> Node:
    node = graph.create_node("call_function", target, args, dict(kwargs or {}))
    node.meta = {key: value for key, value in like.meta.items() if key != "val"}
    node.meta["val"] = _value(target, args, kwargs, fake)
    return node


def _value(target: Any, args: Any, kwargs: Any, fake: Node) -> Any:
    values = torch.fx.node.map_arg((args, dict(kwargs or {})), lambda n: n.meta["val"])
    with fake.meta["val"].fake_mode, torch.no_grad():
        return target(*values[0], **values[1])


def _line(node: Node) -> str:
    """The user's line, as the export noted it."""
    trace = [s.strip() for s in str(node.meta.get("stack_trace", "")).splitlines() if s.strip()]
    return " ".join(trace[-2:]) if trace else "an unknown line"


def _storages(node: Any) -> set[int]:
    value = node.meta.get("val") if isinstance(node, Node) else None
    values = value if isinstance(value, (list, tuple)) else [value]
    return {v.untyped_storage()._cdata for v in values if isinstance(v, Tensor)}


def _storage(node: Any) -> int | None:
    found = _storages(node)
    return found.pop() if len(found) == 1 else None

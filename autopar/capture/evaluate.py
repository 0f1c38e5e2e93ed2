"""The values of graph nodes that depend on constants only."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx import Node

from autopar.capture.functional import mutates, packet

MAX_ELEMENTS = 2**24
# Pointwise, but composite: without torch's tag.
_POINTWISE = {
    torch.ops.aten.to,
    torch.ops.aten.__and__,
    torch.ops.aten.__or__,
    torch.ops.aten.alias,
}


@dataclass
class Evaluator:
    """Runs constant-only nodes on real tensors, each once.

    What is equal for all indices of the first dim (the batch, for masks) is computed for one.
    """

    constants: dict[str, Tensor]
    _constant: dict[Node, bool] = field(default_factory=dict)
    _values: dict[Node, Any] = field(default_factory=dict)

    def is_constant(self, node: Node) -> bool:
        """Whether the value depends on no input, parameter or buffer and on no random number."""
        stack = [node]
        while stack:
            top = stack[-1]
            waiting = [n for n in top.all_input_nodes if n not in self._constant]
            if top in self._constant or not waiting:
                self._constant.setdefault(top, self._own_constant(top))
                stack.pop()
            stack.extend(waiting)
        return self._constant[node]

    def _own_constant(self, node: Node) -> bool:
        if node.op == "placeholder":
            return node.name in self.constants
        if node.op != "call_function" or str(node.target) == "autopar.layer.default":
            return False
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        written = any(mutates(user) for user in node.users)
        inputs = all(self._constant[n] for n in node.all_input_nodes)
        return inputs and not random and not mutates(node) and not written

    def value(self, node: Node) -> Any:
        """The node's value (with stride 0 on a first dim along which it is constant), or None
        where it needs tensors of more than MAX_ELEMENTS."""
        for step in self._needed(node):
            self._values[step] = self._compute(step)
        return self._values[node]

    def _needed(self, node: Node) -> list[Node]:
        """What has to be computed for `node`, in order."""
        wanted, todo = set(), [node]
        while todo:
            step = todo.pop()
            if step not in self._values and step not in wanted:
                wanted.add(step)
                todo.extend(step.all_input_nodes)
        return [step for step in node.graph.nodes if step in wanted] if wanted else []

    def _compute(self, node: Node) -> Any:
        assert self.is_constant(node), node
        if node.op == "placeholder":
            return self.constants[node.name]
        if any(self._values[n] is None for n in node.all_input_nodes):
            return None
        get = self._values.__getitem__
        shape = _shape(node)
        rank = len(shape)
        if self._same_along_batch(node):
            # An expand of one row costs nothing, whatever its size.
            if _count(shape[1:]) > MAX_ELEMENTS:
                return None
            return _run(node, lambda n: _first_row(get(n), rank)).expand(shape)
        if _count(shape) > MAX_ELEMENTS and packet(node) is not torch.ops.aten.expand:
            return None
        value = _run(node, get)
        return _squashed(value) if isinstance(value, Tensor) else value

    def _same_along_batch(self, node: Node) -> bool:
        """Whether a pointwise op reads tensors that don't change along its result's first dim."""
        shape = _shape(node)
        tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
        if len(shape) < 2 or node.target is operator.getitem:
            return False
        if not tagged and packet(node) not in _POINTWISE:
            return False
        values = [self._values[n] for n in node.all_input_nodes]
        return all(v.dim() < len(shape) or v.stride(0) == 0 or v.shape[0] == 1 for v in values)


def _run(node: Node, get: Callable[[Node], Any]) -> Any:
    args: Any = torch.fx.map_arg(node.args, get)
    kwargs: Any = torch.fx.map_arg(node.kwargs, get)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _shape(node: Node) -> tuple[int, ...]:
    value = node.meta["val"]
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _first_row(value: Any, rank: int) -> Any:
    return value[:1] if isinstance(value, Tensor) and value.dim() == rank else value


def _squashed(value: Tensor) -> Tensor:
    if value.dim() == 0 or value.shape[0] < 2 or value.stride(0) == 0:
        return value
    same = torch.equal(value, value[:1].expand(value.shape))
    return value[:1].clone().expand(value.shape) if same else value

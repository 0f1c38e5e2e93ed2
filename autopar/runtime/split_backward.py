"""The backward in two halves: the inputs' gradients now, the weights' later.

As in torch's pipelining: where a weight joins what depends on the inputs, a hook keeps the gradient
that arrives at that node of the autograd graph, and the second half goes on from it. Torch's own
first half detaches the outputs in place, which views don't allow, and takes weights with several
such nodes into groups that overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import _backward as halves


@dataclass(frozen=True, eq=False)
class Later:
    """The second half of one backward."""

    weights: tuple[Tensor, ...]
    groups: list[dict[str, Any]]

    def run(self) -> None:
        """Adds the weights' gradients to theirs. Once."""
        weights: Any = iter(self.weights)  # torch says Parameters, and needs tensors
        halves.stage_backward_weight(weights, self.groups)


def backward_inputs(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[tuple[Tensor, ...], Later]:
    """The inputs' gradients (zeros where an input isn't used), and the rest of the work.

    A weight that joins what depends on the inputs in one place is left for later. Others (used
    twice, or behind something that no input reaches) get their gradients now: later they would
    need the inputs' chain once more, with its communication.
    """
    graph = halves.construct_reverse_graph([_node(output) for output in outputs])
    nodes = {_node(weight): weight for weight in weights}
    reached, _ = halves.reverse_closure([_node(one) for one in inputs], set(), graph)
    groups: dict[Any, dict[str, Any]] = {}
    now = []
    for node, weight in nodes.items():
        if node not in graph:
            continue
        _, joins = halves.reverse_closure([node], reached, graph)
        if len(joins) == 1:
            (join,) = joins
            groups.setdefault(join, {"params": set(), "intermediates": [join]})["params"].add(node)
        else:
            now.append(weight)
    later = list(groups.values())
    handles = [handle for group in later for handle in _listen(group)]
    try:
        wanted = (*inputs, *now)
        found = torch.autograd.grad(outputs, wanted, grads, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for weight, grad in zip(now, found[len(inputs) :], strict=True):
        assert grad is not None, "a weight in the graph without a gradient"
        weight.grad = grad if weight.grad is None else weight.grad + grad
    given = tuple(
        torch.zeros_like(one) if grad is None else grad
        for one, grad in zip(inputs, found[: len(inputs)], strict=True)
    )
    left = {node for group in later for node in group["params"]}
    return given, Later(tuple(nodes[node] for node in nodes if node in left), later)


def _node(tensor: Tensor) -> Any:
    node = halves._get_grad_fn_or_grad_acc(tensor)
    assert node is not None, "a tensor without gradient"
    return node


def _listen(group: dict[str, Any]) -> list[Any]:
    """Hooks that keep what arrives at a group's nodes, in the form that the second half takes."""
    group["grads"] = [None] * len(group["intermediates"])

    def keep(index: int) -> Any:
        def hook(grads: Any) -> None:
            group["grads"][index] = grads

        return hook

    return [node.register_prehook(keep(i)) for i, node in enumerate(group["intermediates"])]

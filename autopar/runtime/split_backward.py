"""The backward in two halves: the inputs' gradients now, the weights' later.

torch's pipelining finds the nodes of the autograd graph where a weight joins what depends on the
inputs (`get_param_groups`); a hook keeps the gradient that arrives there, and the second half goes
on from it. Its own first half detaches the outputs in place, which views don't allow.
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

    Weights that nothing joins with the inputs get their gradients now.
    """
    roots = [_node(output) for output in outputs]
    graph = halves.construct_reverse_graph(roots)
    nodes = {_node(weight): weight for weight in weights}
    used = [node for node in nodes if node in graph]
    groups = halves.get_param_groups([_node(one) for one in inputs], used, graph)
    later = {node for group in groups for node in group["params"]}
    apart = [nodes[node] for node in used if node not in later]
    if apart:
        found = torch.autograd.grad(outputs, apart, grads, retain_graph=True)
        for weight, grad in zip(apart, found, strict=True):
            weight.grad = grad if weight.grad is None else weight.grad + grad
    handles = [handle for group in groups for handle in _listen(group)]
    try:
        found = torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    given = tuple(
        torch.zeros_like(one) if grad is None else grad
        for one, grad in zip(inputs, found, strict=True)
    )
    return given, Later(tuple(nodes[node] for node in used), groups)


def _node(tensor: Tensor) -> Any:
    node = halves._get_grad_fn_or_grad_acc(tensor)
    assert node is not None, "a tensor without gradient"
    return node


def _listen(group: dict[str, Any]) -> list[Any]:
    """Hooks that keep what arrives at a group's nodes, in the form that the second half takes."""
    group["intermediates"] = list(group["intermediates"])
    group["grads"] = [None] * len(group["intermediates"])

    def keep(index: int) -> Any:
        def hook(grads: Any) -> None:
            group["grads"][index] = grads

        return hook

    return [node.register_prehook(keep(i)) for i, node in enumerate(group["intermediates"])]

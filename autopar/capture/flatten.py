"""One flat graph out of what torch.export returns."""

import operator
from typing import Any

import torch
import torch.fx
from torch.fx import Graph, GraphModule, Node

from autopar.errors import AutoparError

_NO_GRAD = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"


def flattened(module: GraphModule) -> Graph:
    """A copy of the graph with regions under `torch.no_grad()` inlined (their results detached).

    Raises AutoparError for regions under an enabled autocast and for control flow.
    """
    graph = Graph()
    env: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = graph.node_copy(node)
    outputs = _inline(graph, module, env)
    output = graph.output(outputs)
    output.meta["val"] = None
    return graph


def _inline(graph: Graph, module: GraphModule, env: dict[Node, Any]) -> Any:
    for node in module.graph.nodes:
        if node.op == "output":
            return torch.fx.map_arg(node.args[0], lambda n: env[n])
        if node.op == "get_attr":
            env[node] = module.get_submodule(node.target)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            env[node] = _inline_region(graph, node, env)
        elif node.target is operator.getitem and isinstance(env[node.args[0]], (tuple, list)):
            env[node] = env[node.args[0]][node.args[1]]
        elif node.op != "placeholder":
            env[node] = graph.node_copy(node, lambda n: env[n])
    raise AssertionError("a graph without an output")


def _inline_region(graph: Graph, node: Node, env: dict[Node, Any]) -> Any:
    name = node.target.name()  # type: ignore[union-attr]
    args: list[Any] = [env[a] if isinstance(a, Node) else a for a in node.args]
    if name == _NO_GRAD and args[0] is False:
        body, inputs = args[1], args[2:]
    elif name == _AUTOCAST and args[2] is False:
        body, inputs = args[4], args[5:]
    elif name == _AUTOCAST:
        raise AutoparError(
            f"the model enables autocast itself{_place(node)}: remove it and choose the dtype with"
            ' precision="bf16"'
        )
    else:
        raise AutoparError(
            f"the model uses {name}{_place(node)}, which autopar doesn't capture: write it without"
        )
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    outputs = _inline(graph, body, dict(zip(placeholders, inputs, strict=True)))
    if name == _NO_GRAD:
        return tuple(_detached(graph, output) for output in outputs)
    return outputs


def _detached(graph: Graph, value: Any) -> Any:
    if not isinstance(value, Node):
        return value
    if not (value.meta["val"].is_floating_point() or value.meta["val"].is_complex()):
        return value
    node = graph.call_function(torch.ops.aten.detach.default, (value,))
    node.meta = dict(value.meta)
    return node


def _place(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    return f" in {path.removeprefix('model').removeprefix('.') or 'a layer'} ({kind})"

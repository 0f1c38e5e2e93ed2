"""Helpers for rewriting graphs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from autopar.capture.schema import schema_of
from autopar.graph.ops import op_name


def named(node: torch.fx.Node, *names: str) -> bool:
    """Whether a node calls an op of one of these names."""
    return schema_of(node) is not None and op_name(node) in names


def insert(
    graph: torch.fx.Graph,
    before: torch.fx.Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    like: torch.fx.Node,
    name: str | None = None,
    **kwargs: Any,
) -> torch.fx.Node:
    """A new call before a node, with its value's metadata, and `like`'s place in the modules."""
    with graph.inserting_before(before):
        node = graph.create_node("call_function", target, args, kwargs, name=name)
    values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    fake: Any = next(
        n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)
    )
    with fake.fake_mode, torch.no_grad():
        node.meta["val"] = target(*values, **kwargs)
    node.meta["nn_module_stack"] = like.meta.get("nn_module_stack", {})
    node.meta["stack_trace"] = like.meta.get("stack_trace")
    return node

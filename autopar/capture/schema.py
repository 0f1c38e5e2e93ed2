"""Schemas of exported ops: the one place that knows torch's class of them."""

from typing import Any

import torch
import torch.fx


def schema_of(node: torch.fx.Node) -> Any | None:
    """The schema of the op that a node calls, or None where it calls something else."""
    target = node.target
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def namespace_of(node: torch.fx.Node) -> str:
    """The op's namespace ("aten", "autopar"), "" for other targets."""
    target = node.target
    return target.namespace if isinstance(target, torch._ops.OpOverload) else ""

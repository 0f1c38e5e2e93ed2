"""Keys and values that were repeated for the queries that share them.

A model repeats each head of keys by an expand and a reshape; attention with `enable_gqa` takes them
as they are. Fused kernels then keep, and ring attention sends, only what there is. With a mask the
repeats stay: of the fused kernels those that take masks don't share heads.
"""

from typing import Any

import torch.fx

from autopar.graph.ops import arguments, op_name, shape_of

_COPIES = ("clone", "contiguous")


def share_heads(_: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Gives an attention op the keys and values from before they were repeated."""
    args = arguments(node)
    if args["attn_mask"] is not None or args["enable_gqa"]:
        return
    query, key, value = args["query"], _unrepeated(args["key"]), _unrepeated(args["value"])
    if key is None or value is None or shape_of(key)[-3] != shape_of(value)[-3]:
        return
    node.args = (query, key, value, None, args["dropout_p"], args["is_causal"])
    scale: dict[str, Any] = {} if args["scale"] is None else {"scale": args["scale"]}
    node.kwargs = {**scale, "enable_gqa": True}


def _unrepeated(node: torch.fx.Node) -> torch.fx.Node | None:
    """[batch, heads, positions, channels] of which a tensor has each head several times in a row,
    or None."""
    if _name(node) not in ("reshape", "view") or len(shape_of(node)) != 4:
        return None
    expand = arguments(node)["self"]
    while _name(expand) in _COPIES:
        expand = arguments(expand)["self"]
    if _name(expand) != "expand" or len(shape_of(expand)) != 5:
        return None
    single = arguments(expand)["self"]
    if _name(single) != "unsqueeze" or not _is_repeated(single, expand, node):
        return None
    source: torch.fx.Node = arguments(single)["self"]
    return source


def _is_repeated(single: torch.fx.Node, expand: torch.fx.Node, node: torch.fx.Node) -> bool:
    batch, heads, times, *rest = shape_of(expand)
    return (
        shape_of(single) == (batch, heads, 1, *rest)
        and arguments(single)["dim"] in (2, -3)
        and shape_of(node) == (batch, heads * times, *rest)
    )


def _name(node: torch.fx.Node) -> str:
    return op_name(node) if node.op == "call_function" else ""

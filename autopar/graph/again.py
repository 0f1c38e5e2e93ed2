"""What may run twice: whether a region, or a layer, can be run again in the backward."""

from collections.abc import Iterable

import torch.fx

from autopar.capture.opaque_code import code_of
from autopar.graph.model_graph import Block
from autopar.graph.ops import arguments, class_of, op_name


def region_once(block: Block, region: str) -> str:
    """Why the region's ops can't run again as one piece, or ""."""
    nodes = [op.node for op in block.ops.values() if op.region == region]
    return _changes(nodes) or _apart(nodes) if nodes else "it has no ops"


def layer_once(block: Block, is_layer: bool) -> str:
    """Why the block's ops can't run again all together, or ""."""
    if not is_layer:
        return "it belongs to no layer"
    return _changes(op.node for op in block.ops.values())


def _changes(nodes: Iterable[torch.fx.Node]) -> str:
    """What would come twice: a buffer's change, or code of the model's own that may do anything."""
    for node in nodes:
        if code_of(node) is not None:
            return f"{node.name} runs the model's own code, which may change more than its results"
        kind, name = class_of(op_name(node)), op_name(node)
        if kind == "buffer_update":
            return f"{node.name} changes a buffer, and would twice a step"
        if kind == "batch_norm" and arguments(node).get("running_mean") is not None:
            return f"{node.name} ({name}) changes its running statistics, and would twice a step"
    return ""


def _apart(nodes: list[torch.fx.Node]) -> str:
    """The region's ops are one piece if no op of another region lies on a path between two."""
    inside, after = set(nodes), set[torch.fx.Node]()
    for node in nodes[0].graph.nodes if nodes else ():
        sources = node.all_input_nodes
        if node in inside:
            between = [s for s in sources if s in after and s not in inside]
            if between:
                return f"{between[0].name}, of another region, lies between its ops"
        elif any(s in inside or s in after for s in sources):
            after.add(node)
    return ""


def pieces(
    nodes: Iterable[torch.fx.Node], together: Iterable[frozenset[str]]
) -> list[tuple[bool, list[torch.fx.Node]]]:
    """The nodes in an order in which each set of names of `together` (each one piece) is in a row:
    (whether it is such a set, nodes)."""
    rest = [[node] for node in nodes]
    wanted = [names for names in together if names]
    for names in wanted:
        places = [i for i, row in enumerate(rest) if row[0].name in names]
        if not places:
            continue
        first, last = places[0], places[-1]
        span = rest[first : last + 1]
        piece = [row[0] for row in span if row[0].name in names]
        later: set[torch.fx.Node] = set(piece)
        before, behind = [], []
        for row in span:
            if row[0].name in names:
                continue
            if any(s in later for node in row for s in node.all_input_nodes):
                later.update(row)
                behind.append(row)
            else:
                before.append(row)
        rest[first : last + 1] = [*before, piece, *behind]
    out: list[tuple[bool, list[torch.fx.Node]]] = []
    for row in rest:
        if any(row[0].name in names for names in wanted):
            out.append((True, row))
        elif out and not out[-1][0]:
            out[-1][1].extend(row)
        else:
            out.append((False, list(row)))
    return out

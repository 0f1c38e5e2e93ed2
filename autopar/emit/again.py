"""A region that runs again in the backward: its statements as a function under a checkpoint."""

from typing import Protocol

import torch.fx

from autopar.emit.names import Names
from autopar.graph.model_graph import Block
from autopar.layouts.layout import Layout

CHECKPOINT = "from torch.utils.checkpoint import checkpoint"


class _Body(Protocol):
    names: Names
    block: Block
    lines: list[str]
    texts: dict[tuple[str, Layout], str]
    region: str | None

    def operand(self, node: torch.fx.Node, source: torch.fx.Node) -> str: ...
    def heading(self, region: str) -> str: ...
    def op(self, node: torch.fx.Node) -> None: ...
    def made(self, name: str) -> Layout: ...


def checkpoint_text(function: str, arguments: list[str]) -> str:
    """The call."""
    return f"checkpoint({', '.join([function, *arguments])}, use_reentrant=False)"


def run_again(body: _Body, nodes: list[torch.fx.Node]) -> None:
    """Print the ops of one region as a function and its call.

    What comes from outside is converted before and passed; what is made inside, conversions as
    well, stays inside but for the results.
    """
    region = body.block.ops[nodes[0].name].region
    assert region is not None
    body.region = region
    body.lines.append(body.heading(region))
    inside = set(nodes)
    given: dict[str, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            outside = source not in inside and source.name in body.block.values
            if outside and not body.block.is_weight(source.name):
                given.setdefault(body.operand(node, source))
    variables = [text for text in given if text.isidentifier()]
    texts, lines = dict(body.texts), body.lines
    body.lines = []
    for node in nodes:
        body.op(node)
    results = [
        node for node in nodes if node.name in body.block.values and not inside >= set(node.users)
    ]
    names = [body.texts[node.name, body.made(node.name)] for node in results]
    function = body.names.fresh(f"{region}_region")
    statements = [*body.lines, f"return {', '.join(names)}"]
    body.lines = lines
    body.lines.append(f"def {function}({', '.join(variables)}):")
    body.lines += [f"    {line}" for line in statements]
    body.texts = texts
    for node, name in zip(results, names, strict=True):
        name = name if name.isidentifier() else body.names.fresh(node.name)
        body.texts[node.name, body.made(node.name)] = name
    left = ", ".join(body.texts[node.name, body.made(node.name)] for node in results)
    body.lines.append(f"{left} = {checkpoint_text(function, variables)}")

"""Flow: one block with a candidate for each region, made concrete.

Where every value is made, in which layouts it is needed, and the conversions between. Emission
prints a flow; the finished plan's collectives are counted from it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.fx

from autopar.graph.model_graph import STREAM, Block, Value
from autopar.graph.ops import is_tensor
from autopar.layouts.convert import Step, convert
from autopar.layouts.effects import param_layout
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.typing import OpTyping, boundary_layout, input_layout, type_region
from autopar.plugin import Candidate

Choices = Mapping[str, Candidate]
"""Region name → the candidate chosen for it."""


@dataclass(frozen=True)
class Flow:
    """`typings`: every op with a region, and layer calls (needs by argument, no `makes`).
    `made`: the layout in which each value exists first. `params`: how weights are stored.
    `conversions`: (value, needed layout) → steps, for every need that differs from what is made."""

    block: Block
    choices: Choices
    setting: Setting
    typings: Mapping[str, OpTyping]
    made: Mapping[str, Layout]
    params: Mapping[str, Layout]
    conversions: Mapping[tuple[str, Layout], tuple[Step, ...]]
    returns_loss: bool = False

    def need(self, node: torch.fx.Node, source: str) -> Layout:
        """The layout in which a node takes a value."""
        value = self.block.values[source]
        if node.op == "output" and self.returns_loss:
            return Layout(partial=self.made[source].partial)
        if node.op == "output":
            return boundary_layout(value, self.choices[STREAM], self.setting).restrict(value.names)
        typing = self.typings.get(node.name)
        if typing is not None:
            return normal(value, typing.needs[source])
        return normal(value, input_layout(value, self.setting))


def normal(value: Value, layout: Layout) -> Layout:
    """A layout as far as it concerns this value, so that equal layouts compare equal."""
    layout = layout.restrict(value.names)
    return layout if value.needs_grad else layout.forward_only()


def make_flow(
    block: Block,
    choices: Choices,
    setting: Setting,
    layers: Mapping[str, tuple[Block, Candidate]],
    returns_loss: bool,
) -> Flow:
    """The flow of a block. `layers`: for the skeleton, each layer's block and stream candidate.
    `returns_loss`: the output is a loss, which leaves as a partial sum where it is one. Each rank's
    backward starts from 1, so ranks that all have the same loss must not add up."""
    typings: dict[str, OpTyping] = {}
    for candidate in choices.values():
        typings.update(type_region(block, candidate).ops)
    made: dict[str, Layout] = {}
    for node in block.graph.nodes:
        if node.op == "call_function" and block.ops[node.name].kind == "layer":
            callee, stream = layers[str(node.args[1])]
            typings[node.name] = _call_typing(node, callee, stream, setting)
            for user in node.users:
                inner = callee.values[callee.outputs()[user.args[1]].name]
                value = block.values[user.name]
                made[user.name] = normal(value, boundary_layout(inner, stream, setting))
    for node in block.graph.nodes:
        if is_tensor(node) and node.name not in made and not block.is_weight(node.name):
            made[node.name] = _made(block, node, typings, choices[STREAM], setting)
    weights = _weights(block, typings, setting)
    flow = Flow(block, choices, setting, typings, made, weights, {}, returns_loss)
    conversions = {
        (source, need): convert(block.values[source], start, need, setting)
        for node, source, need in needs(flow)
        if (start := made.get(source, weights.get(source, Layout()))) != need
    }
    return Flow(block, choices, setting, typings, made, weights, conversions, returns_loss)


def needs(flow: Flow) -> Iterator[tuple[torch.fx.Node, str, Layout]]:
    """Every (node, value, layout) in which a node takes a value, in graph order."""
    for node in flow.block.graph.nodes:
        if node.name in flow.block.prologue:
            continue
        if node.op in ("call_function", "output"):
            for source in dict.fromkeys(node.all_input_nodes):
                if source.name in flow.block.values:
                    yield node, source.name, flow.need(node, source.name)


def _call_typing(
    node: torch.fx.Node, callee: Block, stream: Candidate, setting: Setting
) -> OpTyping:
    arguments: tuple[torch.fx.Node, ...] = tuple(node.args[0])  # type: ignore[arg-type]
    inside = [callee.values[name] for name in callee.inputs()]
    return OpTyping(
        {
            argument.name: boundary_layout(value, stream, setting)
            for argument, value in zip(arguments, inside, strict=True)
        },
        Layout(),
    )


def _made(
    block: Block,
    node: torch.fx.Node,
    typings: Mapping[str, OpTyping],
    stream: Candidate,
    setting: Setting,
) -> Layout:
    value = block.values[node.name]
    if node.op == "placeholder":
        return normal(value, boundary_layout(value, stream, setting))
    if node.name in typings:
        return normal(value, typings[node.name].makes)
    return normal(value, input_layout(value, setting))


def _weights(
    block: Block, typings: Mapping[str, OpTyping], setting: Setting
) -> Mapping[str, Layout]:
    """How each parameter, buffer and constant is stored: joined over its uses."""
    out = {}
    for node in block.graph.nodes:
        if node.op == "placeholder" and block.is_weight(node.name):
            value = block.values[node.name]
            used = tuple(
                normal(value, typings[u.name].needs[node.name]) if u.name in typings else Layout()
                for u in node.users
                if u.op == "call_function" and u.name not in block.prologue
            )
            out[node.name] = param_layout(used) if used else Layout()
    return out

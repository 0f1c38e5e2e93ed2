"""Where gradients flow in captured graphs."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.capture.captured import Capture, CapturedGraph, ParamMeta
from autopar.capture.functional import packet
from autopar.errors import AutoparError

_CUTS = (torch.ops.aten.detach, torch.ops.aten.detach_)


def layer_nodes(graph: Graph) -> list[Node]:
    """The skeleton's layer calls in order."""
    return [node for node in graph.nodes if is_layer(node)]


def is_layer(node: Node) -> bool:
    """Whether the node calls a layer."""
    return node.op == "call_function" and str(node.target) == "autopar.layer.default"


def output_nodes(graph: Graph) -> Sequence[Node]:
    """What the graph returns."""
    (output,) = (n for n in graph.nodes if n.op == "output")
    outputs: Sequence[Node] = output.args[0]
    return outputs


def with_gradient(
    captured: CapturedGraph,
    trainable: set[str],
    layers: Mapping[str, Sequence[bool]],
) -> set[Node]:
    """The nodes whose value needs a gradient: reached from a trainable parameter or an input that
    requires one through floating-point values. `layers` says it of each layer's outputs."""
    wanted = {i.node for i in captured.inputs if i.requires_grad}
    wanted |= {node for node, own in captured.params.items() if own in trainable}
    found: set[Node] = set()
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            needs = node.name in wanted
        elif node.op == "output" or packet(node) in _CUTS:
            needs = False
        elif is_layer(node):
            needs = any(layers[node.args[1]])
        elif node.target is operator.getitem and _layer_of(node) is not None:
            needs = layers[_layer_of(node)][node.args[1]]  # type: ignore[index]
        else:
            needs = any(n in found for n in node.all_input_nodes) and _floating(node)
        if needs:
            found.add(node)
    return found


def _layer_of(node: Node) -> str | None:
    source = node.args[0]
    assert isinstance(source, Node)
    return source.args[1] if is_layer(source) else None  # type: ignore[return-value]


def differentiable(value: Tensor) -> bool:
    """Whether a tensor of this dtype can have a gradient: real or complex."""
    return value.is_floating_point() or value.is_complex()


def _floating(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, Tensor) and differentiable(v) for v in values)


def reached(graph: Graph, roots: Sequence[Node], needing: set[Node]) -> set[Node]:
    """The nodes that get a gradient from `roots` in the backward."""
    found: set[Node] = set()
    todo = [root for root in roots if root in needing]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(n for n in node.all_input_nodes if n in needing)
    return found


@dataclass(frozen=True)
class _LayerGradients:
    """Of one layer: its block, which outputs need a gradient, and the parameters (names in the
    block) that get one from them."""

    block: CapturedGraph
    outputs: tuple[bool, ...]
    params: frozenset[str]


def check_gradients(capture: Capture) -> tuple[str, ...]:
    """Check that gradients reach what needs them; returns notes on parameters that get none.

    Raises AutoparError where the loss reaches no trainable parameter at all.
    """
    owner = {alias: p.names[0] for p in capture.params for alias in p.names}
    trainable = {p.names[0] for p in capture.params if p.trainable}
    layers = {}
    known: dict[tuple[int, frozenset[str]], _LayerGradients] = {}
    for layer in capture.layers:
        block = capture.blocks[layer.block]
        own = frozenset(n for n in block.params.values() if owner[f"{layer.path}.{n}"] in trainable)
        if (layer.block, own) not in known:
            known[layer.block, own] = _layer_gradients(block, own)
        layers[layer.path] = known[layer.block, own]
    flags = {path: layer.outputs for path, layer in layers.items()}
    needing = with_gradient(capture.skeleton, trainable, flags)
    (loss,) = output_nodes(capture.skeleton.graph)
    if loss not in needing:
        raise AutoparError("the loss depends on no trainable parameter: there is nothing to train")
    back = reached(capture.skeleton.graph, [loss], needing)
    got = {owner[name] for name in _reached_params(capture.skeleton, back)}
    for node in layer_nodes(capture.skeleton.graph):
        path = str(node.args[1])
        _check_inputs(node, layers[path].block, needing)
        if node in back:
            got |= {owner[f"{path}.{name}"] for name in layers[path].params}
    return _without_gradient(capture.params, got)


def _layer_gradients(block: CapturedGraph, trainable: frozenset[str]) -> _LayerGradients:
    needing = with_gradient(block, set(trainable), {})
    outputs = output_nodes(block.graph)
    back = reached(block.graph, outputs, needing)
    return _LayerGradients(
        block, tuple(node in needing for node in outputs), frozenset(_reached_params(block, back))
    )


def _reached_params(captured: CapturedGraph, back: set[Node]) -> set[str]:
    names = {node.name for node in back}
    return {own for node, own in captured.params.items() if node in names}


def _check_inputs(node: Node, block: CapturedGraph, needing: set[Node]) -> None:
    tensors = node.args[0]
    assert isinstance(tensors, (list, tuple)) and len(tensors) == len(block.inputs)
    for tensor, given in zip(tensors, block.inputs, strict=True):
        lost = tensor in needing and not given.requires_grad
        assert not lost, f"{node.args[1]}: its input {given.node} lost its gradient in the capture"


def _without_gradient(params: tuple[ParamMeta, ...], got: set[str]) -> tuple[str, ...]:
    missing = [p.names[0] for p in params if p.trainable and p.names[0] not in got]
    if not missing:
        return ()
    shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return (f"{len(missing)} trainable parameters get no gradient from the loss: {shown}",)

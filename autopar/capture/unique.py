"""One graph for all layers that compute the same."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor

from autopar.capture.captured import CapturedGraph
from autopar.capture.stub import LayerCall

Build = Callable[[LayerCall], CapturedGraph]


def unique_blocks(
    calls: Sequence[LayerCall], build: Build
) -> tuple[tuple[CapturedGraph, ...], tuple[int, ...]]:
    """(blocks, the block's index for each call), blocks in the order of their first layer.

    Calls of one signature share a graph if the graphs of the first, the second and the last are
    equal; if not (a layer computes with its own index), each layer's graph is compared. A layer
    whose inputs need no gradient where others' do is a kind of its own: its backward sends less.
    """
    groups: dict[tuple[str, tuple[bool, ...]], list[LayerCall]] = {}
    for call in calls:
        groups.setdefault((call.signature, tuple(call.needs_grad)), []).append(call)
    hash_of: dict[str, str] = {}
    graph_of: dict[str, CapturedGraph] = {}

    def add(call: LayerCall, paths: Sequence[str]) -> str:
        graph = build(call)
        frozen = [n for n, p in call.candidate.module.named_parameters() if not p.requires_grad]
        text = structural_hash(graph) + repr((frozen, call.needs_grad))
        graph_of.setdefault(text, graph)
        hash_of.update(dict.fromkeys(paths, text))
        return text

    for group in groups.values():
        paths = [call.candidate.path for call in group]
        samples = {0, min(1, len(group) - 1), len(group) - 1}
        if len({add(group[i], paths) for i in sorted(samples)}) > 1:
            for call in group:
                add(call, [call.candidate.path])
    order = list(dict.fromkeys(hash_of[call.candidate.path] for call in calls))
    index = tuple(order.index(hash_of[call.candidate.path]) for call in calls)
    return tuple(graph_of[text] for text in order), index


def structural_hash(captured: CapturedGraph) -> str:
    """SHA-256 of what the graph computes, whatever its nodes are called."""
    number = {node: i for i, node in enumerate(captured.graph.nodes)}
    inputs = [given.node for given in captured.inputs]
    digest = hashlib.sha256()
    for node in captured.graph.nodes:
        weights = (captured.params.get(node.name), captured.buffers.get(node.name))
        constant = captured.constants.get(node.name)
        what: tuple[Any, ...] = (
            node.op,
            str(node.target) if node.op != "placeholder" else weights,
            inputs.index(node.name) if node.name in inputs else None,
            torch.fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}"),
            _described(node.meta.get("val")),
            constant.tolist() if constant is not None and constant.device.type != "meta" else None,
        )
        digest.update(repr(what).encode())
    return digest.hexdigest()


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(_described(v) for v in value)
    return value

"""Dropping block inputs that a block doesn't read and outputs that nobody does."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from autopar.capture.captured import CapturedGraph, Layer
from autopar.capture.clean import drop_dead
from autopar.capture.gradients import layer_nodes, output_nodes


def pruned(
    skeleton: CapturedGraph, blocks: Sequence[CapturedGraph], layers: Sequence[Layer]
) -> tuple[CapturedGraph, ...]:
    """The blocks without unused inputs and outputs; the skeleton's calls are changed to fit.

    Repeated until nothing changes, since an output that only feeds an unused input of the next
    layer is unused as well.
    """
    result = list(blocks)
    block_of = {layer.path: layer.block for layer in layers}
    changed = True
    while changed:
        drop_dead(skeleton.graph)
        calls: dict[int, list[Node]] = {i: [] for i in range(len(result))}
        for node in layer_nodes(skeleton.graph):
            calls[block_of[str(node.args[1])]].append(node)
        changed = False
        for index, nodes in calls.items():
            if nodes:
                kept = _keep_outputs(result[index], nodes)
                result[index], dropped = _drop_inputs(result[index], nodes)
                changed |= kept or dropped
    return tuple(without_unused_weights(block) for block in result)


def _keep_outputs(block: CapturedGraph, calls: Sequence[Node]) -> bool:
    """Drop the outputs that no call site reads; whether there were any."""
    outputs = output_nodes(block.graph)
    used = sorted({int(user.args[1]) for call in calls for user in call.users})  # type: ignore[arg-type]
    if len(used) == len(outputs):
        return False
    (output,) = (n for n in block.graph.nodes if n.op == "output")
    output.args = (tuple(outputs[i] for i in used),)
    drop_dead(block.graph)
    for call in calls:
        call.meta["val"] = tuple(call.meta["val"][i] for i in used)
        for user in list(call.users):
            assert user.target is operator.getitem
            user.args = (call, used.index(int(user.args[1])))  # type: ignore[arg-type]
    return True


def _drop_inputs(block: CapturedGraph, calls: Sequence[Node]) -> tuple[CapturedGraph, bool]:
    by_name = {node.name: node for node in block.graph.nodes if node.op == "placeholder"}
    kept = [i for i, given in enumerate(block.inputs) if by_name[given.node].users]
    if len(kept) == len(block.inputs):
        return block, False
    for i, given in enumerate(block.inputs):
        if i not in kept:
            block.graph.erase_node(by_name[given.node])
    for call in calls:
        tensors = call.args[0]
        assert isinstance(tensors, (list, tuple))
        call.args = ([tensors[i] for i in kept], *call.args[1:])
    return replace(block, inputs=tuple(block.inputs[i] for i in kept)), True


def without_unused_weights(captured: CapturedGraph) -> CapturedGraph:
    """Parameters, buffers and constants that nothing reads any more leave the graph."""
    inputs = {given.node for given in captured.inputs}
    for node in list(captured.graph.nodes):
        if node.op == "placeholder" and not node.users and node.name not in inputs:
            captured.graph.erase_node(node)
    left = {node.name for node in captured.graph.nodes}
    return replace(
        captured,
        params=_only(captured.params, left),
        buffers=_only(captured.buffers, left),
        constants={n: t for n, t in captured.constants.items() if n in left},
    )


def _only(names: Mapping[str, str], left: set[str]) -> dict[str, str]:
    return {node: own for node, own in names.items() if node in left}

"""How layers follow each other in the skeleton: chains of alike layers, and what all of them take.

A layer's call is a node `layer(tensors, path)` with one getitem for each output.
"""

from collections.abc import Mapping, Sequence

import torch.fx

from autopar.graph.model_graph import Block, ModelGraph


def layer_calls(skeleton: Block) -> list[torch.fx.Node]:
    """The calls of layers, in order."""
    return [op.node for op in skeleton.ops.values() if op.kind == "layer"]


def ops_after_layers(skeleton: Block) -> frozenset[str]:
    """What follows the last layer; none without layers."""
    kinds = [op.kind for op in skeleton.ops.values()]
    if "layer" not in kinds:
        return frozenset()
    last = len(kinds) - 1 - kinds[::-1].index("layer")
    return frozenset(list(skeleton.ops)[last + 1 :])


def shared_inputs(blocks: Sequence[Block], block_of: Mapping[str, int]) -> list[frozenset[str]]:
    """Of each block the inputs without a gradient that are the same tensor in several calls of
    layers (masks, rotary tables)."""
    taken: dict[torch.fx.Node, list[tuple[int, str]]] = {}
    for call in layer_calls(blocks[0]):
        index = block_of[str(call.args[1])]
        tensors: tuple[torch.fx.Node, ...] = tuple(call.args[0])  # type: ignore[arg-type]
        for given, name in zip(tensors, blocks[index].inputs(), strict=True):
            if not blocks[index].values[name].needs_grad:
                taken.setdefault(given, []).append((index, name))
    found: list[set[str]] = [set() for _ in blocks]
    for places in taken.values():
        for index, name in places if len(places) > 1 else ():
            found[index].add(name)
    return [frozenset(names) for names in found]


def index_of(call: torch.fx.Node) -> int:
    """A layer's index in its container."""
    return int(str(call.args[1]).rpartition(".")[2])


def carried_argument(call: torch.fx.Node, after: torch.fx.Node) -> int | None:
    """Which argument of the next call is this call's only output (all others being the same
    tensors), or None where they don't follow so."""
    here: tuple[torch.fx.Node, ...] = tuple(call.args[0])  # type: ignore[arg-type]
    there: tuple[torch.fx.Node, ...] = tuple(after.args[0])  # type: ignore[arg-type]
    users = list(call.users)
    if len(here) != len(there) or len(users) != 1 or len(users[0].users) != 1:
        return None
    differ = [i for i, (a, b) in enumerate(zip(here, there, strict=True)) if a is not b]
    if len(differ) != 1 or there[differ[0]] is not users[0]:
        return None
    return differ[0]


def groups(model: ModelGraph, layers: int) -> Mapping[str, tuple[str, ...]]:
    """Each layer's path → the paths of its group: `layers` consecutive ones (fewer at the end) of a
    chain of alike layers, each of which hands its only output to the next."""
    block_of = {layer.path: layer.block for layer in model.layers}
    chains: list[list[torch.fx.Node]] = []
    for call in layer_calls(model.skeleton):
        if chains and _follows(chains[-1], call, block_of):
            chains[-1].append(call)
        else:
            chains.append([call])
    found: dict[str, tuple[str, ...]] = {}
    for chain in chains:
        paths = [str(call.args[1]) for call in chain]
        for start in range(0, len(paths), layers):
            group = tuple(paths[start : start + layers])
            found.update(dict.fromkeys(group, group))
    return found


def _follows(
    chain: Sequence[torch.fx.Node], call: torch.fx.Node, block_of: Mapping[str, int]
) -> bool:
    before, path = chain[-1], str(call.args[1])
    container, _, key = path.rpartition(".")
    if not key.isdigit() or block_of[path] != block_of[str(before.args[1])]:
        return False
    if (
        container != str(before.args[1]).rpartition(".")[0]
        or index_of(call) != index_of(before) + 1
    ):
        return False
    carried = carried_argument(before, call)
    if carried is None:
        return False
    return len(chain) < 2 or carried == carried_argument(chain[0], chain[1])

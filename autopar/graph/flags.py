"""Which tensors carry a gradient, and which are computed from the batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.fx

from autopar.capture.captured import Capture
from autopar.graph.dims import BlockDims
from autopar.graph.factors import leaves
from autopar.graph.ops import arguments, class_of, is_tensor, op_name, shape_of


@dataclass
class Flags:
    """Names of the nodes of one graph that need a gradient, and that come from the batch."""

    needs_grad: set[str] = field(default_factory=set)
    from_batch: set[str] = field(default_factory=set)
    walked: bool = False


def _prefix(capture: Capture, block: int) -> str:
    return next(f"{layer.path}." for layer in capture.layers if layer.block == block)


NO_GRADIENT = frozenset({"zeros_like", "ones_like", "full_like", "empty_like", "detach"})


def read_flags(
    capture: Capture,
    graphs: list[torch.fx.Graph],
    block_of: Mapping[str, int],
    repeated: Sequence[set[str]] | None = None,
) -> list[Flags]:
    """Flags of the skeleton (first) and of each block; a block's inputs take the union over its
    calls. `repeated`: constants that repeat along the batch, which are made for a rank's share."""
    all_flags = [Flags(set(), set(names)) for names in repeated or [set() for _ in graphs]]
    trainable = {name for p in capture.params if p.trainable for name in p.names}
    for i, block in enumerate((capture.skeleton, *capture.blocks)):
        prefix = "" if i == 0 else _prefix(capture, i - 1)
        all_flags[i].needs_grad |= {
            node for node, name in block.params.items() if prefix + name in trainable
        }
    all_flags[0].from_batch |= {i.node for i in capture.skeleton.inputs}
    _walk(graphs[0], all_flags[0], graphs, all_flags, block_of)
    return all_flags


def _walk(
    graph: torch.fx.Graph,
    flags: Flags,
    graphs: list[torch.fx.Graph],
    all_flags: list[Flags],
    block_of: Mapping[str, int],
) -> None:
    results: dict[str, list[tuple[bool, bool]]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if class_of(op_name(node)) == "layer":
            index = block_of[str(node.args[1])]
            results[node.name] = _enter(node, flags, graphs[index], all_flags[index])
            continue
        if node.args and isinstance(node.args[0], torch.fx.Node) and node.args[0].name in results:
            grad, batch = results[node.args[0].name][node.args[1]]
        else:
            inputs = node.all_input_nodes
            values = node.meta["val"]
            first = values[0] if isinstance(values, (list, tuple)) else values
            grad = (
                any(n.name in flags.needs_grad for n in inputs)
                and (first.is_floating_point() or first.is_complex())
                and op_name(node) not in NO_GRADIENT
            )
            batch = any(n.name in flags.from_batch for n in inputs)
        if grad:
            flags.needs_grad.add(node.name)
        if batch:
            flags.from_batch.add(node.name)


def _enter(
    node: torch.fx.Node, caller: Flags, graph: torch.fx.Graph, flags: Flags
) -> list[tuple[bool, bool]]:
    tensors: tuple[torch.fx.Node, ...] = tuple(node.args[0])  # type: ignore[arg-type]
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    before = (len(flags.needs_grad), len(flags.from_batch))
    for argument, placeholder in zip(
        tensors, placeholders[len(placeholders) - len(tensors) :], strict=True
    ):
        if argument.name in caller.needs_grad:
            flags.needs_grad.add(placeholder.name)
        if argument.name in caller.from_batch:
            flags.from_batch.add(placeholder.name)
    if not flags.walked or before != (len(flags.needs_grad), len(flags.from_batch)):
        _walk(graph, flags, [], [], {})
        flags.walked = True
    outputs = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
    return [(o.name in flags.needs_grad, o.name in flags.from_batch) for o in outputs]


REPEATS = frozenset({"expand", "full", "zeros", "ones", "full_like", "zeros_like", "ones_like"})


def repeated_constants(graph: torch.fx.Graph, known: BlockDims, flags: Flags) -> set[str]:
    """Values that depend on no input and are the same for every sample, by how they are made: a
    rank makes only as many of them as it has samples."""
    found = set()
    for node in graph.nodes:
        if node.op != "call_function" or node.name in flags.from_batch | flags.needs_grad:
            continue
        if not is_tensor(node) or op_name(node) not in REPEATS:
            continue
        batch = [any(f.hint == "batch" for f in leaves(dim)) for dim in known.dims[node][0]]
        source = arguments(node).get("self")
        if isinstance(source, torch.fx.Node):
            before = (1,) * (len(batch) - len(shape_of(source))) + shape_of(source)
            batch = [b and length == 1 for b, length in zip(batch, before, strict=True)]
        if any(batch):
            found.add(node.name)
    return found

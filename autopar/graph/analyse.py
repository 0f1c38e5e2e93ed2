"""Capture → ModelGraph: named dims over all blocks at once, regions within each."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch.fx

from autopar.capture.captured import Capture, CapturedGraph
from autopar.capture.price import op_work
from autopar.capture.saved import storages
from autopar.capture.skeleton import batch_size
from autopar.collector import collector_paused
from autopar.graph.again import layer_once, region_once
from autopar.graph.batch_mixing import batch_sums
from autopar.graph.chains import shared_inputs
from autopar.graph.dims import BlockDims, broken_cuts, is_cut, join_inputs, read_dims
from autopar.graph.factors import Factor, find, freeze, leaves, resolve, set_hint, size, unify
from autopar.graph.flags import Flags, read_flags, repeated_constants
from autopar.graph.model_graph import Block, ModelGraph, Op, SavedTensor, Value
from autopar.graph.normalise import normalise, serving_counts
from autopar.graph.ops import class_of, is_tensor, op_name
from autopar.graph.padding import mark_padded
from autopar.graph.regions import BlockRegions, find_regions
from autopar.graph.rules import Dims


@collector_paused()
def analyse(capture: Capture) -> ModelGraph:
    """Named dims and regions of a captured model.

    Errors: AutoparError where no tensor of the batch has a first dim to split.
    """
    graphs = [normalise(g.graph) for g in (capture.skeleton, *capture.blocks)]
    captured = [capture.skeleton, *capture.blocks]
    block_of = {layer.path: layer.block + 1 for layer in capture.layers}
    batch_size = _batch_size(capture)
    flags = read_flags(capture, [g for g, _ in graphs], block_of)
    known = _read_all(capture, [g for g, _ in graphs], flags, block_of)
    repeated = [
        repeated_constants(graph, known[i], flags[i]) for i, (graph, _) in enumerate(graphs)
    ]
    flags = read_flags(capture, [g for g, _ in graphs], block_of, repeated)
    mixing: dict[str, str] = {}
    for i, (graph, counts) in enumerate(graphs):
        all_counts, mixed = batch_sums(graph, known[i], flags[i], counts, i == 0)
        graphs[i] = (graph, all_counts)
        mixing |= {f"{captured[i].name}/{name}": why for name, why in mixed.items()}
    regions = [
        find_regions(graph, captured[i], known[i], flags[i], _prologue(graph, counts))
        for i, (graph, counts) in enumerate(graphs)
    ]
    _name_leaves([g for g, _ in graphs], known, regions)
    mark_padded(regions)
    found = [
        _block(captured[i], graph, counts, known[i], flags[i], regions[i])
        for i, (graph, counts) in enumerate(graphs)
    ]
    shared = shared_inputs(found, block_of)
    blocks = tuple(_run_again(block, i > 0, shared[i]) for i, block in enumerate(found))
    layers = tuple(replace(layer, block=layer.block + 1) for layer in capture.layers)
    return ModelGraph(capture, blocks, layers, batch_size, tuple(mixing.values()))


def _read_all(
    capture: Capture,
    graphs: list[torch.fx.Graph],
    flags: list[Flags],
    block_of: Mapping[str, int],
) -> list[BlockDims]:
    """The dims of every graph.

    A batch or a sequence of which a part is taken, or which is put together, (class tokens, shifted
    labels) is no concatenation everywhere: there the trace is broken, and all is read again."""
    untraced = [_cut_inputs(g, f) for g, f in zip(graphs, flags, strict=True)]
    while True:
        known = _read_once(capture, graphs, block_of, untraced)
        more = [broken_cuts(d) - names for d, names in zip(known, untraced, strict=True)]
        if not any(more):
            return known
        for names, found in zip(untraced, more, strict=True):
            names |= found


def _read_once(
    capture: Capture,
    graphs: list[torch.fx.Graph],
    block_of: Mapping[str, int],
    untraced: list[set[str]],
) -> list[BlockDims]:
    dims: list[BlockDims | None] = [None] * len(graphs)

    def enter(path: str, given: Sequence[Dims]) -> BlockDims:
        """The block of a layer, read at its first call, when its inputs' dims are known."""
        index = block_of[path]
        found = dims[index]
        if found is None:
            hook = functools.partial(join_inputs, given=given)
            found = read_dims(graphs[index], None, hook, untraced[index])
            dims[index] = found
        return found

    dims[0] = read_dims(graphs[0], enter, _batch_hook(capture), untraced[0])
    known = [d for d in dims if d is not None]
    assert len(known) == len(graphs), "a block that the skeleton doesn't call"
    return known


def _cut_inputs(graph: torch.fx.Graph, flags: Flags) -> set[str]:
    """Concatenations and cuts of what is computed from the batch without a gradient."""
    return {
        node.name
        for node in graph.nodes
        if node.op == "call_function"
        and is_cut(node)
        and node.name in flags.from_batch
        and node.name not in flags.needs_grad
    }


def _batch_size(capture: Capture) -> int:
    values = {n.name: n.meta["val"] for n in capture.skeleton.graph.nodes if n.op == "placeholder"}
    return batch_size([tuple(values[i.node].shape) for i in capture.skeleton.inputs])


def _batch_hook(capture: Capture):  # type: ignore[no-untyped-def]
    """Joins the first dims of the batch's tensors (those of the batch's size) and names them."""
    size_ = _batch_size(capture)
    names = {i.node for i in capture.skeleton.inputs}

    def join(known: dict[torch.fx.Node, list[list[list[Factor]]]]) -> None:
        first = [
            d[0][0] for n, d in known.items() if n.name in names and d[0] and size(d[0][0]) == size_
        ]
        for dim in first:
            unify(first[0], dim)
        if size_ > 1:
            set_hint(first[0], "batch")

    return join


def _prologue(graph: torch.fx.Graph, counts: tuple[torch.fx.Node, ...]) -> frozenset[str]:
    found = serving_counts(graph, counts)
    return frozenset(n.name for n in found if n.op == "call_function" or n in counts)


def _name_leaves(
    graphs: list[torch.fx.Graph], dims: list[BlockDims], regions: list[BlockRegions]
) -> None:
    """Give every leaf a name of its own, model-wide: its hint, its region's role, or its size."""
    taken: dict[str, int] = {}
    for found in regions:
        for internal in found.internal:
            for leaf in internal.leaves:
                leaf.hint = leaf.hint or internal.role
    inside = {leaf for found in regions for internal in found.internal for leaf in internal.leaves}
    for leaf in _all_leaves(graphs, dims):
        if not leaf.name:
            stem = leaf.hint or f"dim_{leaf.size}"
            if stem == "vocab" and leaf not in inside:
                stem = "rows"  # a table that isn't over a vocabulary
            taken[stem] = taken.get(stem, 0) + 1
            leaf.name = stem if taken[stem] == 1 else f"{stem}_{taken[stem]}"


def _all_leaves(graphs: list[torch.fx.Graph], dims: list[BlockDims]) -> Iterator[Factor]:
    for graph, known in zip(graphs, dims, strict=True):
        for node in graph.nodes:
            for tensor in known.dims.get(node, ()):
                for dim in tensor:
                    yield from leaves(dim)


def _block(
    captured: CapturedGraph,
    graph: torch.fx.Graph,
    counts: tuple[torch.fx.Node, ...],
    known: BlockDims,
    flags: Flags,
    regions: BlockRegions,
) -> Block:
    values = {}
    ops = {}
    for node in graph.nodes:
        if is_tensor(node):
            values[node.name] = Value(
                tuple(freeze(dim) for dim in known.dims[node][0]),
                node.meta["val"].element_size(),
                node.name in flags.needs_grad,
                node.name in flags.from_batch,
            )
        if node.op == "call_function":
            info = known.ops[node]
            ops[node.name] = Op(
                node,
                class_of(op_name(node)) or "opaque",
                regions.owner.get(node.name),
                frozenset(leaf.name for dim in info.contract for leaf in leaves(dim)),
                frozenset(leaf.name for dim in info.closed for leaf in leaves(dim)),
                {leaf.name: why for dim, why in info.unlowered for leaf in leaves(dim)},
                known.opaque.get(node.name, ""),
                op_work(node) if node.name in known.opaque else None,
                frozenset(n.name for n in info.shares),
            )
    routes = regions.routes()
    kept = storages(graph)
    names = tuple(n.name for n in counts)
    prologue = _prologue(graph, counts)
    assert all(
        find(f).name
        for d in known.dims.values()
        for t in d
        for x in t
        for f in resolve(x)
        if find(f).segments is None and find(f).order_of is None
    )
    return Block(
        captured,
        graph,
        values,
        ops,
        regions.freeze(routes),
        tuple(SavedTensor(*record) for record in kept.records),
        names,
        prologue,
        known.opaque,
        routes,
        kept.views,
        kept.strides,
    )


def _run_again(block: Block, is_layer: bool, shared: frozenset[str]) -> Block:
    """The block with what may run twice and which inputs all layers share."""
    layer = layer_once(block, is_layer)
    regions = tuple(
        replace(r, once=region_once(block, r.name), layer_once=layer) for r in block.regions
    )
    return replace(block, regions=regions, shared=shared)

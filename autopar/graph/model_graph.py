"""ModelGraph: a model's unique blocks with named dims and regions, frozen."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.fx

from autopar.capture.captured import Capture, CapturedGraph, Layer, ParamMeta
from autopar.capture.opaque_code import OpaqueWork
from autopar.capture.probe import draws_for_all
from autopar.graph.factors import DimExpr, expr_leaves
from autopar.graph.ops import drops
from autopar.graph.routes import Route
from autopar.hashed_once import hashed_once
from autopar.plugin import Region

STREAM = "stream"


@hashed_once
@dataclass(frozen=True)
class Value:
    """A tensor in a block: its dims, element size, and whether it carries a gradient."""

    dims: tuple[DimExpr, ...]
    item_bytes: int
    needs_grad: bool
    from_batch: bool
    """Computed from the batch (or from what is): its batch dim comes split over the data axes."""

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names of the dims that it carries."""
        return frozenset(leaf.name for expr in self.dims for leaf in expr_leaves(expr))


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that autograd keeps for the backward: the op that keeps it, which of its inputs or
    results it is (None: made inside the op), its shape and element size."""

    op: str
    value: str | None
    shape: tuple[int, ...]
    item_bytes: int


@dataclass(frozen=True)
class Op:
    """One op of a block: the dims that it contracts, those among them whose partial sums it adds up
    itself, those that can't be emitted split, its region (None: an
    input op, which needs no gradient and runs unsplit but for the batch)."""

    node: torch.fx.Node
    kind: str
    region: str | None
    contracted: frozenset[str]
    closed: frozenset[str]
    unlowered: Mapping[str, str]
    opaque: str = ""
    """What can't be analysed about it: it has no rule, or is used in a way that none covers."""
    work: OpaqueWork | None = None
    """What an opaque op does; None where nobody knows."""
    shares: frozenset[str] = frozenset()
    """Inputs that are sums over its rows: each rank takes its own part of them."""


@dataclass(frozen=True)
class Block:
    """A unique block (or the skeleton): its normalised graph, dims, regions.

    `params` and `buffers` map placeholder names to names within the block. `counts` are the nodes
    that the losses divide by. Keys of `values` and `ops` are node names; an op with several
    outputs has no value of its own, its getitems do.
    """

    captured: CapturedGraph
    graph: torch.fx.Graph
    values: Mapping[str, Value]
    ops: Mapping[str, Op]
    regions: tuple[Region, ...]
    saved: tuple[SavedTensor, ...]
    counts: tuple[str, ...]
    prologue: frozenset[str]
    """Ops that serve the counts alone; forward gets those from outside."""
    opaque: Mapping[str, str]
    routes: Mapping[str, Route]
    """Region → how its tokens can be sent to the ranks that hold their experts."""
    views: Mapping[str, str]
    """Value → the input of its op that it is a view of, in the unsplit model."""
    strides: Mapping[str, tuple[int, ...]]
    """Of every value in the unsplit model."""
    shared: frozenset[str] = frozenset()
    """Inputs without a gradient that several layers take alike: what keeps one keeps it for all."""

    @property
    def name(self) -> str:
        """The block's class name."""
        return self.captured.name

    @property
    def params(self) -> Mapping[str, str]:
        """Placeholder names of parameters → names within the block."""
        return self.captured.params

    @property
    def stream(self) -> Region:
        """The region that owns the block's boundary."""
        return self.region(STREAM)

    def region(self, name: str) -> Region:
        """A region by name."""
        return next(r for r in self.regions if r.name == name)

    def root(self, name: str) -> str:
        """The value whose storage a value lies in, in the unsplit model."""
        while name in self.views:
            name = self.views[name]
        return name

    def is_weight(self, name: str) -> bool:
        """Whether a placeholder is a parameter, a buffer or a lifted constant."""
        captured = self.captured
        return name in captured.params or name in captured.buffers or name in captured.constants

    def node(self, name: str) -> torch.fx.Node:
        """A node by name."""
        return self._nodes[name]

    @functools.cached_property
    def _nodes(self) -> Mapping[str, torch.fx.Node]:
        return {node.name: node for node in self.graph.nodes}

    @functools.cached_property
    def met(self) -> frozenset[str]:
        """Values in whose storage ops of several regions make or take something."""
        regions: dict[str, set[str | None]] = {}
        for node in self.graph.nodes:
            if node.name in self.values:
                # Of several results the op before makes each.
                makers = [node] if node.name in self.ops else list(node.all_input_nodes)
                ops = [self.ops[one.name] for one in (*makers, *node.users) if one.name in self.ops]
                regions.setdefault(self.root(node.name), set()).update(op.region for op in ops)
        several = {root for root, some in regions.items() if len(some - {None}) > 1}
        return frozenset(name for name in self.values if self.root(name) in several)

    def by_sample(self, name: str) -> bool:
        """Whether a value has samples of its own: it carries the batch, and comes from it."""
        value = self.values[name]
        carried = any(leaf.name == "batch" for dim in value.dims for leaf in expr_leaves(dim))
        return carried and (value.needs_grad or value.from_batch)

    def inputs(self) -> tuple[str, ...]:
        """The block's tensor inputs that its graph still uses or takes, in call order."""
        return tuple(i.node for i in self.captured.inputs)

    def outputs(self) -> tuple[torch.fx.Node, ...]:
        """The nodes that the block returns."""
        result = next(n for n in reversed(self.graph.nodes) if n.op == "output")
        return tuple(result.args[0])


@dataclass(frozen=True)
class ModelGraph:
    """The whole model: `blocks[0]` is the skeleton; `layers[i].block` indexes `blocks`.

    `dims` gives the size of every dim that blocks share ("batch" is the global batch).
    """

    capture: Capture
    blocks: tuple[Block, ...]
    layers: tuple[Layer, ...]
    batch_size: int
    mixing: tuple[str, ...] = ()
    """Why the batch can't be split: ops on inputs that mix its samples."""

    @property
    def skeleton(self) -> Block:
        """What lies outside the repeated layers."""
        return self.blocks[0]

    def instances(self) -> Iterator[tuple[str, Block]]:
        """("" for the skeleton, else the layer's path; its block), in order."""
        yield "", self.skeleton
        for layer in self.layers:
            yield layer.path, self.blocks[layer.block]

    def param(self, name: str) -> ParamMeta:
        """A parameter by its full name."""
        return next(p for p in self.capture.params if name in p.names)

    @functools.cached_property
    def region_paths(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """By layer and region, the full paths of the modules in which its ops were traced."""
        from autopar.graph.module_paths import region_paths  # built on top of this module

        return {
            (path, region.name): region_paths(block, region.name, path)
            for path, block in self.instances()
            for region in block.regions
        }

    def unused_weights(self) -> tuple[str, ...]:
        """Parameters and buffers that no graph reads: they are kept, whole, and never change."""
        used: set[str] = set()
        for path, block in self.instances():
            for name in (*block.params.values(), *block.captured.buffers.values()):
                used.add(f"{path}.{name}" if path else name)
        params = [p.names[0] for p in self.capture.params if not used & set(p.names)]
        return (*params, *(name for name in self.capture.buffers if name not in used))

    def summary(self) -> str:
        """Blocks, regions, named dims, flops and saved bytes as text."""
        from autopar.inspection import summarise_model  # built on top of this module

        return summarise_model(self)

    @property
    def drawing(self) -> tuple[str, ...]:
        """Opaque ops that draw random numbers and can't run on a share of the samples."""
        return tuple(
            op.opaque
            for block in self.blocks
            for op in block.ops.values()
            if op.opaque and draws_for_all(op.node)
        )

    @property
    def shared_dropout(self) -> tuple[str, ...]:
        """Dropout ops with one mask for all samples: of positions, say, or of a weight."""
        return tuple(
            f"{name} of {op.node.args[0]} in {block.name}"
            for block in self.blocks
            for name, op in block.ops.items()
            if not op.opaque and drops(op.node) and not block.by_sample(name)
        )

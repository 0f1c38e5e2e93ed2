"""What autograd keeps from the forward for the backward, and what runs again instead.

Non-reentrant checkpoints of torch keep what goes into the function that they run, and stop the
second run as soon as the last tensor that the backward needs is there again: ops and collectives
after that run once.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch.fx

from autopar.graph.model_graph import STREAM, Block, ModelGraph, SavedTensor
from autopar.graph.ops import VIEW_CLASSES
from autopar.layouts.effects import form_residents
from autopar.layouts.flow import normal
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.typing import RegionTyping, boundary_layout, input_layout
from autopar.layouts.work import batch_share, internal_bytes
from autopar.plugin import Resident

Storage = tuple[str, Layout]
"""The value that owns a storage, and its layout (splits alone)."""


@dataclass(frozen=True)
class Kept:
    """`storages`: tensors of the graph, with bytes; `inside_bytes`: what ops make and keep for
    themselves (statistics, masks)."""

    storages: Mapping[Storage, int] = field(default_factory=dict)
    inside_bytes: int = 0

    @property
    def bytes(self) -> int:
        """All of it, each storage once."""
        return self.inside_bytes + sum(self.storages.values())


def saved_residents(
    block: Block, typing: RegionTyping, setting: Setting, group: tuple[str, ...], path: str
) -> Iterator[Resident]:
    """What one microbatch of the region keeps, and where it runs again what it needs then.

    `group`: the layers that run again together with the layer `path`. A layer's stream answers for
    the layer's input. While a group runs again, all that its layers would have kept is there.
    """
    for name, op_typing in typing.ops.items():
        yield from form_residents(block, block.ops[name], op_typing, setting)
    again = typing.candidate.recompute
    kept = saved(block, typing, setting)
    if again is None:
        yield Resident("saved", kept.bytes)
        return
    taken = Kept()
    if again.scope == "region":
        taken = crossing(block, typing, setting)
    elif typing.candidate.region == STREAM and path == group[0]:
        taken = layer_inputs(block, typing, setting)
    yield Resident("saved", taken.bytes)
    fresh = {k: v for k, v in kept.storages.items() if k not in taken.storages}
    yield Resident("transient", replace(kept, storages=fresh).bytes * len(group))


def saved(block: Block, typing: RegionTyping, setting: Setting) -> Kept:
    """What autograd keeps of the region's ops, each storage in each layout once, without inputs
    that all layers share."""
    storages: dict[Storage, int] = {}
    inside = 0
    for one in block.saved:
        op_typing = typing.ops.get(one.op)
        if op_typing is None:
            continue
        if one.value is None and block.ops[one.op].opaque:
            share = batch_share(block, block.ops[one.op], op_typing, setting)
            inside += int(math.prod(one.shape) * one.item_bytes * share)
        elif one.value is None:
            inside += internal_bytes(block, one, op_typing, setting)
        elif not block.is_weight(one.value):
            layout = _saved_layout(block, one, typing, setting)
            _keep(storages, block, one.value, layout, setting)
    for name, op_typing in typing.ops.items():
        work = block.ops[name].work
        if work is not None:
            share = batch_share(block, block.ops[name], op_typing, setting)
            inside += int(work.saved_bytes * share)
    return Kept(storages, inside)


def crossing(block: Block, typing: RegionTyping, setting: Setting) -> Kept:
    """The tensors that the region's ops take from outside, as they take them."""
    storages: dict[Storage, int] = {}
    for op_typing in typing.ops.values():
        for name, layout in op_typing.needs.items():
            if name not in typing.ops and name in block.values and not block.is_weight(name):
                owner = _owner(block, name, typing)
                _keep(storages, block, owner, normal(block.values[name], layout), setting)
    return Kept(storages)


def layer_inputs(block: Block, stream: RegionTyping, setting: Setting) -> Kept:
    """What a layer is called with."""
    storages: dict[Storage, int] = {}
    for name in block.inputs():
        layout = boundary_layout(block.values[name], stream.candidate, setting)
        _keep(storages, block, name, layout, setting)
    return Kept(storages)


def shared_residents(
    model: ModelGraph, setting: Setting, layers: Collection[str]
) -> Iterator[Resident]:
    """Inputs that several of the layers at these paths keep are there once."""
    found: dict[str, int] = {}
    for op in model.skeleton.ops.values():
        if op.kind != "layer" or op.node.args[1] not in layers:
            continue
        index = next(x.block for x in model.layers if x.path == op.node.args[1])
        block = model.blocks[index]
        saved_here = {one.value for one in block.saved}
        tensors: tuple[torch.fx.Node, ...] = tuple(op.node.args[0])  # type: ignore[arg-type]
        for given, name in zip(tensors, block.inputs(), strict=True):
            if name in block.shared and name in saved_here:
                value = block.values[name]
                size = setting.local_numel(value.dims, input_layout(value, setting))
                found[given.name] = size * value.item_bytes
    yield Resident("saved", sum(found.values()))


def _keep(
    storages: dict[Storage, int], block: Block, name: str, layout: Layout, setting: Setting
) -> None:
    value = block.values[name]
    layout = Layout(layout.splits, dispatched=layout.dispatched).restrict(value.names)
    if name in block.shared and layout == Layout(input_layout(value, setting).splits):
        return
    storages[name, layout] = setting.local_numel(value.dims, layout) * value.item_bytes


def _owner(block: Block, name: str, typing: RegionTyping) -> str:
    """The value whose storage a view of it is."""
    while name in block.ops and block.ops[name].kind in VIEW_CLASSES:
        sources = [n.name for n in block.node(name).all_input_nodes]
        if len(sources) != 1 or sources[0] not in block.values or sources[0] in typing.ops:
            return name
        (name,) = sources
    return name


def _saved_layout(block: Block, one: SavedTensor, typing: RegionTyping, setting: Setting) -> Layout:
    assert one.value is not None
    own = typing.ops[one.op]
    if one.value in own.needs:
        return own.needs[one.value]
    if one.value in typing.ops:
        return typing.ops[one.value].makes
    # A view inside the region of a value outside: in the layout in which the region takes it.
    taken = [t.needs[one.value] for t in typing.ops.values() if one.value in t.needs]
    return taken[0] if taken else input_layout(block.values[one.value], setting)

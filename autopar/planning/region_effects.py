"""The effects of one region under one candidate, and of what belongs to no region."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import torch

from autopar.graph.model_graph import Block, ModelGraph, Value
from autopar.layouts.again import Running, again_effects, running_effects
from autopar.layouts.effects import (
    compute_effects,
    param_effects,
    param_layout,
    shard_numel,
)
from autopar.layouts.flow import normal
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.saved import Held, held, saved_residents
from autopar.layouts.stages import Cut, Here
from autopar.layouts.state_ratio import StateRatio
from autopar.layouts.traffic import loss_transients
from autopar.layouts.typing import OpTyping, RegionTyping
from autopar.mesh import AxisPart, split_size
from autopar.plugin import Collective, Compute, Effect, GradientSync, ParamPlan, Resident


def ops_here(typing: RegionTyping, here: Here | None) -> dict[str, OpTyping]:
    """A region's ops; `here`: those that this part of the skeleton has."""
    return {name: op for name, op in typing.ops.items() if here is None or here.has(name)}


def op_effects(
    block: Block,
    typing: RegionTyping,
    setting: Setting,
    path: str,
    group: tuple[str, ...],
    here: Here | None = None,
) -> Iterator[Effect]:
    """Ops and saved tensors of a region of the layer `path` ("": the skeleton), which runs again in
    the backward with its `group`. (Conversions at its boundary are edges.) `here`: only what this
    part of the skeleton has."""
    running = running_effects(block, ops_here(typing, here), setting)
    yield from itertools.chain(*running.values())
    found = held_here(block, typing, setting, path, group, here)
    yield from other_effects(block, typing, running, found, setting, path, group, here)


def held_here(
    block: Block,
    typing: RegionTyping,
    setting: Setting,
    path: str,
    group: tuple[str, ...],
    here: Here | None = None,
) -> Held:
    """What the region, or what of it this part of the skeleton has, holds."""
    own = RegionTyping(typing.candidate, ops_here(typing, here))
    return held(block, own, setting, group, path)


def other_effects(
    block: Block,
    typing: RegionTyping,
    running: Running,
    found: Held,
    setting: Setting,
    path: str,
    group: tuple[str, ...],
    here: Here | None = None,
) -> Iterator[Effect]:
    """The same without what ops do that run once: `running`. `found`: what is held."""
    candidate, ops = typing.candidate, ops_here(typing, here)
    yield from again_effects(block, candidate, running, setting, path == group[-1])
    yield from saved_residents(block, RegionTyping(candidate, ops), setting, group, path, found)
    yield from loss_transients(block, ops, setting)


def param_layouts(block: Block, typing: RegionTyping) -> Mapping[str, Layout]:
    """How the region's own parameters are stored, as far as the region's uses decide."""
    owned = {p.name for p in block.region(typing.candidate.region).params}
    nodes = {n.name: n for n in block.graph.nodes}
    out = {}
    for placeholder, name in block.params.items():
        if name in owned:
            value = block.values[placeholder]
            uses = tuple(
                normal(value, typing.ops[u.name].needs[placeholder])
                for u in nodes[placeholder].users
                if u.name in typing.ops
            )
            out[name] = param_layout(uses) if uses else Layout()
    return out


def one_param(
    block: Block,
    plan: ParamPlan,
    name: str,
    layout: Layout,
    setting: Setting,
    state_ratio: StateRatio,
    neighbours: bool,
    here: Here | None = None,
) -> Iterator[Effect]:
    """The effects of one parameter stored in a layout; none where it doesn't lie here."""
    placeholder = next(p for p, n in block.params.items() if n == name)
    if here is not None and not here.has(placeholder):
        return
    value = block.values[placeholder]
    node = next(n for n in block.graph.nodes if n.name == placeholder)
    order = [axis for axis, _ in setting.mesh.axes]
    own = plan.sync.axes if plan.sync else ()
    varying = sorted(layout.varying - set(own), key=lambda part: order.index(part.axis))
    shape = setting.local_shape(value.dims, layout)
    dtype = node.meta["val"].dtype
    yield from param_effects(
        name,
        shape,
        dtype,
        value.needs_grad,
        tuple(varying),
        plan,
        state_ratio,
        setting.microbatches,
        neighbours,
        _comes_back(block, here),
    )
    if plan.sync is not None and value.needs_grad:
        yield from sync_effects(name, shape, dtype, plan.sync)
    if here is not None and value.needs_grad and (sums := here.sums(placeholder)):
        size = shard_numel(shape, split_size(plan.state)) * dtype.itemsize
        yield Collective("all_reduce", size, sums, "grad_sync", "step", name)


def _comes_back(block: Block, here: Here | None) -> bool:
    """Whether a gradient comes back to what a layer returns, or a part of the skeleton hands on."""
    given = [out.name for out in block.outputs()]
    if here is not None and here.part < len(here.cut.boundaries):
        given = list(here.cut.boundaries[here.part])
    return any(block.values[name].needs_grad for name in given)


def handed_on(
    value: Value, name: str, layout: Layout, setting: Setting, forward: bool, axis: AxisPart
) -> Collective:
    """A value sent to the next stage, or its gradient to the one before."""
    size = crossing_bytes(value, layout, setting)
    return Collective(
        "send", size, (axis,), "forward" if forward else "backward", "microbatch", name
    )


def crossing_bytes(value: Value, layout: Layout, setting: Setting) -> int:
    """A value that crosses from stage to stage, on one rank."""
    return setting.local_numel(value.dims, layout) * value.item_bytes


def messages_bytes(value: Value, layout: Layout, setting: Setting) -> int:
    """Room at a boundary for the value onwards and for its gradient back, if it has one."""
    return crossing_bytes(value, layout, setting) * (1 + value.needs_grad)


def boundary_effects(
    block: Block, cut: Cut, part: int, layout_of: Callable[[str], Layout], setting: Setting
) -> Iterator[Resident]:
    """What a part holds to hand over: values that it passes on, for each microbatch in flight, and
    at each of its boundaries a message each way."""
    for name in cut.passed_on(part):
        yield Resident("saved", crossing_bytes(block.values[name], layout_of(name), setting))
    for boundary in (part - 1, part):
        for name in cut.boundaries[boundary] if 0 <= boundary < len(cut.boundaries) else ():
            size = messages_bytes(block.values[name], layout_of(name), setting)
            yield Resident("transient", size)


def sync_effects(
    what: str, shape: tuple[int, ...], dtype: torch.dtype, sync: GradientSync
) -> Iterator[Effect]:
    """What a gradient's own sync sends, moves and keeps; `shape` is the local gradient's."""
    numel = math.prod(shape)
    for send in sync.sends:
        item = getattr(torch, send.dtype).itemsize if send.dtype else dtype.itemsize
        size = math.ceil(send.fraction * numel) * (item + send.index_bytes)
        if send.op == "all_gather":
            size *= split_size(sync.axes)
        yield Collective(send.op, size, sync.axes, "grad_sync", "step", what)
    name = str(dtype).removeprefix("torch.")
    if sync.passes:
        moved = math.ceil(sync.passes * numel * dtype.itemsize)
        yield Compute("optimizer", 0, moved, name, "optimizer")
    for _ in sync.state:
        yield Resident("optimizer", numel * dtype.itemsize)


def input_effects(block: Block, setting: Setting, here: Here | None = None) -> Iterator[Effect]:
    """Ops that belong to no region: they run whole but for the batch, whatever is chosen. Those of
    the counts alone run in every part."""
    for op in block.ops.values():
        name = op.node.name
        if here is not None and name not in block.prologue and not here.has(name):
            continue
        if op.region is None and op.kind != "layer" and op.node.name in block.values:
            yield from compute_effects(block, op, None, setting)


def unused_effects(model: ModelGraph) -> Iterator[Effect]:
    """Weights that no graph reads lie whole on every rank; they get no gradient and no state."""
    for name in model.unused_weights():
        buffer = model.capture.buffers.get(name)
        if buffer is not None:
            yield Resident("parameter", buffer.numel() * buffer.element_size())
        else:
            param = model.param(name)
            yield Resident("parameter", math.prod(param.shape) * param.dtype.itemsize)


def buffer_effects(block: Block, here: Here | None = None) -> Iterator[Effect]:
    """Buffers are whole on every rank."""
    for node in block.graph.nodes:
        if here is not None and not here.has(node.name):
            continue
        if node.name in block.captured.buffers or node.name in block.captured.constants:
            value = node.meta["val"]
            yield Resident("parameter", value.numel() * value.element_size())


def scalar_collectives(
    counts: int, loss_item_bytes: int, setting: Setting, loss_sums: tuple[str, ...]
) -> Iterator[Collective]:
    """The step's scalars: what losses divide by, the loss, and the gradients' squared norm."""
    mesh = setting.mesh
    if counts and setting.data:
        yield Collective("all_reduce", 8 * counts, setting.data, "forward", "step", "counts")
    parts = tuple(mesh.part(a) for a, size in mesh.axes if a in loss_sums and size > 1)
    if parts:
        yield Collective("all_reduce", loss_item_bytes, parts, "forward", "step", "loss")
    world = tuple(mesh.part(a) for a, size in mesh.axes if size > 1)
    if world:
        # The squares are summed in float64, whatever the gradients are in.
        yield Collective("all_reduce", 8, world, "optimizer", "step", "gradient norm")

"""The effects of one region under one candidate, and of what belongs to no region."""

import math
from collections.abc import Iterator, Mapping

import torch

from autopar.graph.model_graph import Block, ModelGraph
from autopar.layouts.effects import (
    closing_collectives,
    compute_effects,
    param_effects,
    param_layout,
    saved_bytes,
)
from autopar.layouts.flow import normal
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.typing import RegionTyping
from autopar.mesh import split_size
from autopar.plugin import Collective, Compute, Effect, GradientSync, ParamPlan, Resident


def region_effects(
    block: Block, typing: RegionTyping, setting: Setting, state_ratio: float, neighbours: bool
) -> Iterator[Effect]:
    """Ops, saved tensors and parameters of a region (conversions at its boundary are edges).
    `neighbours`: it is a layer's."""
    candidate = typing.candidate
    for name, op_typing in typing.ops.items():
        yield from compute_effects(block, block.ops[name], op_typing, setting)
        yield from closing_collectives(block, block.ops[name], op_typing, setting)
    yield Resident("saved", saved_bytes(block, typing, setting))
    for name, layout in param_layouts(block, typing).items():
        plan = candidate.param(name)
        yield from one_param(block, plan, name, layout, setting, state_ratio, neighbours)


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
    state_ratio: float,
    neighbours: bool,
) -> Iterator[Effect]:
    """The effects of one parameter stored in a layout."""
    placeholder = next(p for p, n in block.params.items() if n == name)
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
    )
    if plan.sync is not None and value.needs_grad:
        yield from sync_effects(name, shape, dtype, plan.sync)


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


def input_effects(block: Block, setting: Setting) -> Iterator[Effect]:
    """Ops that belong to no region: they run whole but for the batch, whatever is chosen."""
    for op in block.ops.values():
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


def buffer_effects(block: Block) -> Iterator[Effect]:
    """Buffers are whole on every rank."""
    for node in block.graph.nodes:
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

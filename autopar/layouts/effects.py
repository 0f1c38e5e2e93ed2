"""What a typed region costs in kind: ops, saved tensors, parameters. Sizes are divisions of the
whole graph's, never a new trace; what they cost in seconds is the cost models' business."""

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import torch

from autopar.capture.source_line import source_line
from autopar.errors import AutoparError
from autopar.graph.model_graph import Block, Op
from autopar.graph.ops import arguments
from autopar.layouts.convert import Step
from autopar.layouts.copies import (
    Near,
    added_bytes,
    beside_pointwise,
    copied_bytes,
    in_product,
    uncopied_bytes,
)
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.passes import merging
from autopar.layouts.shapes import kernel_shape, skipped_share
from autopar.layouts.state_ratio import StateRatio
from autopar.layouts.traffic import (
    backward_bytes,
    chained_bytes,
    chained_gradient_bytes,
    mask_bytes,
)
from autopar.layouts.typing import OpTyping
from autopar.layouts.work import (
    batch_share,
    first_output,
    forward_flops,
    moved_bytes,
    special_count,
)
from autopar.mesh import Split, split_size
from autopar.plugin import (
    BUCKET,
    Collective,
    Compute,
    Effect,
    Exchange,
    OpForm,
    ParamPlan,
    Phase,
    Resident,
)

COST_CLASS = {
    "pointwise": "pointwise",
    "contraction": "matmul",
    "channelwise": "pointwise",
    "feature_dropout": "pointwise",
    "buffer_update": "pointwise",
    "scan": "copy",
    "difference": "copy",
    "normalisation": "normalisation",
    "batch_norm": "normalisation",
    "channel_norm": "normalisation",
    "convolution": "matmul",
    "window": "reduction",
    "reduction": "reduction",
    "index": "embedding",
    "repeat": "copy",
    "repeat_interleave": "copy",
    "top_k": "sort",
    "sort": "sort",
    "search": "sort",
    "scatter": "copy",
    "index_add": "copy",
    "index_put": "copy",
    "count": "reduction",
    "grouped": "matmul",
    "view": "view",
    "permute": "view",
    "concat_split": "view",
    "getitem": "view",
    "pad": "copy",
    "attention": "attention",
    "embedding": "embedding",
    "loss": "loss",
    "constant": "pointwise",
}


def compute_effects(
    block: Block, op: Op, typing: OpTyping | None, setting: Setting, near: Near = None
) -> Iterator[Compute]:
    """The forward and backward of one op on one rank, one microbatch. An input op has no typing.
    `near`: the typed ops of its region."""
    node = op.node
    if op.opaque:
        yield from _opaque_effects(block, op, typing, setting)
        return
    kind = COST_CLASS[op.kind]
    value = block.values.get(node.name) or first_output(block, node)
    tensor = (
        node.meta["val"][0] if isinstance(node.meta["val"], (list, tuple)) else node.meta["val"]
    )
    dtype = str(getattr(tensor, "dtype", "float32")).removeprefix("torch.")
    if kind == "view" or value is None:
        yield from _view_effects(block, op, typing, setting, dtype)
        return
    flops = forward_flops(block, op, typing, setting)
    moved = moved_bytes(block, op, typing, setting) + mask_bytes(block, op, typing, setting)
    shape, skipped = kernel_shape(block, op, typing, setting, flops), skipped_share(op)
    passes = 1 if typing is None or typing.form is None else typing.form.passes
    flops, moved = passes * flops, passes * moved
    between = min(moved, chained_bytes(block, op, typing, setting, near))
    special = special_count(block, op, typing, setting, backward=False)
    if not in_product(block, op, typing, near):
        yield Compute(kind, flops, moved, dtype, "forward", shape, skipped, between, special)
    yield from merging(block, op, typing, setting, "forward")
    if not value.needs_grad:
        return
    yield from merging(block, op, typing, setting, "backward")
    moved = passes * backward_bytes(block, op, typing, setting)
    between = min(moved, chained_gradient_bytes(block, op, typing, setting, near))
    special = special_count(block, op, typing, setting, backward=True)
    if moved:  # of a contraction: two products
        yield Compute(kind, 2 * flops, moved, dtype, "backward", shape, skipped, between, special)
    else:
        yield Compute("view", 0, 0, dtype, "backward")
    yield from _sums(block, op, typing, setting, dtype)


def _view_effects(
    block: Block, op: Op, typing: OpTyping | None, setting: Setting, dtype: str
) -> Iterator[Compute]:
    """Of an op that moves nothing but where no view will do."""
    copied = copied_bytes(block, op, typing, setting)
    uncopied = uncopied_bytes(block, op, typing, setting)
    joins = beside_pointwise(block, op)
    yield Compute("copy" if copied else "view", 0, copied, dtype, "forward", between=joins * copied)
    if uncopied:
        yield Compute("copy", 0, uncopied, dtype, "backward", between=joins * uncopied)
    yield from _sums(block, op, typing, setting, dtype)


def _sums(
    block: Block, op: Op, typing: OpTyping | None, setting: Setting, dtype: str
) -> Iterator[Compute]:
    """Adding up gradients: a kernel that takes the sum, or makes a part of it, need only read."""
    if added := added_bytes(block, op, typing, setting):
        yield Compute("sum", 0, added, dtype, "backward", between=2 * added // 3)


def _opaque_effects(
    block: Block, op: Op, typing: OpTyping | None, setting: Setting
) -> Iterator[Compute]:
    node, work = op.node, op.work
    if work is None:
        raise AutoparError(
            f"the op {node.target} ({node.name}, in {block.name}) at {source_line(node)} has no "
            "price: it isn't torch's own and has no flop formula. Give it one with "
            "torch.utils.flop_counter.register_flop_formula before compiling"
        )
    share = batch_share(block, op, typing, setting)
    values = node.meta["val"]
    first = values[0] if isinstance(values, (list, tuple)) else values
    dtype = str(first.dtype).removeprefix("torch.")
    yield Compute("opaque", int(work.flops * share), int(work.bytes * share), dtype, "forward")
    made = [
        block.values[n] for n in (node.name, *(u.name for u in node.users)) if n in block.values
    ]
    if any(value.needs_grad for value in made):
        flops, moved = int(work.backward_flops * share), int(work.backward_bytes * share)
        yield Compute("opaque", flops, moved, dtype, "backward")


def closing_collectives(
    block: Block, op: Op, typing: OpTyping, setting: Setting
) -> Iterator[Collective]:
    """What an op exchanges inside. A cross-entropy over split classes all-reduces one maximum and
    two sums for each row; a batch norm over a split batch gathers each rank's mean and variance,
    and all-reduces two sums of each channel in the backward. An op in a form of its own exchanges
    what that says."""
    if typing.form is not None:
        yield from _exchanges(block, op, typing, typing.form, setting)
    parts = closed_parts(block, op, typing)
    if parts and op.kind == "batch_norm":
        yield from _norm_collectives(block, op, typing, setting, parts)
    elif parts:
        logits = arguments(op.node)["self"].name
        value = block.values[logits]
        rows = setting.local_numel(value.dims[:-1], typing.needs[logits]) * value.item_bytes
        yield Collective("all_reduce", rows, parts, "forward", "microbatch", op.node.name)
        yield Collective("all_reduce", 2 * rows, parts, "forward", "microbatch", op.node.name)


def _exchanges(
    block: Block, op: Op, typing: OpTyping, form: OpForm, setting: Setting
) -> Iterator[Collective]:
    for one in form.exchanges:
        size = _taken_bytes(block, op, typing, one, setting)
        if one.phase == "forward" or block.values[op.node.name].needs_grad:
            for _ in range(one.times):
                yield Collective(one.op, size, form.axes, one.phase, "microbatch", op.node.name)


def _taken_bytes(
    block: Block, op: Op, typing: OpTyping, exchange: Exchange, setting: Setting
) -> int:
    args, total = arguments(op.node), 0
    for name in exchange.of:
        source = args[name].name
        value = block.values[source]
        item = max(value.item_bytes, 4) if exchange.wide else value.item_bytes
        total += setting.local_numel(value.dims, typing.needs[source]) * item
    return total


def form_residents(block: Block, op: Op, typing: OpTyping, setting: Setting) -> Iterator[Resident]:
    """What an op in a form of its own holds while it runs: copies of what it exchanges."""
    form = typing.form
    if form is not None and form.copies and form.exchanges:
        largest = max(_taken_bytes(block, op, typing, e, setting) for e in form.exchanges)
        yield Resident("transient", form.copies * largest)


def _norm_collectives(
    block: Block, op: Op, typing: OpTyping, setting: Setting, parts: Split
) -> Iterator[Collective]:
    source = arguments(op.node)["input"]
    value = block.values[source.name]
    channels = setting.local_length(value.dims[1], typing.needs[source.name])
    item = max(value.item_bytes, 4)  # statistics are in float32 at least
    gathered = 2 * channels * item * split_size(parts)
    yield Collective("all_gather", gathered, parts, "forward", "microbatch", op.node.name)
    if value.needs_grad:
        sums = 2 * channels * item
        yield Collective("all_reduce", sums, parts, "backward", "microbatch", op.node.name)


def closed_parts(block: Block, op: Op, typing: OpTyping) -> Split:
    """The axes over which an op adds up its own partial sums."""
    for name in typing.needs:
        value = block.values.get(name)
        for dim, split in typing.needs[name].splits if value is not None else ():
            if dim in op.closed:
                return split
    return ()


def step_effects(steps: tuple[Step, ...], what: str) -> Iterator[Collective]:
    """The collectives of a conversion, once a microbatch."""
    for step in steps:
        directions: tuple[tuple[Phase, tuple[str, int] | None], ...] = (
            ("forward", step.forward),
            ("backward", step.backward),
        )
        for phase, found in directions:
            if found is not None:
                yield Collective(found[0], found[1], step.parts, phase, "microbatch", what)  # type: ignore[arg-type]


def padded_bytes(shape: tuple[int, ...], item_bytes: int, pieces: int) -> int:
    """ZeRO shards dim 0, padded so that all pieces are equal."""
    rows = shape[0] if shape else 1
    return math.ceil(rows / pieces) * pieces * math.prod(shape[1:]) * item_bytes


def shard_numel(shape: tuple[int, ...], pieces: int) -> int:
    """Elements of the largest shard."""
    rows = shape[0] if shape else 1
    return math.ceil(rows / pieces) * math.prod(shape[1:])


def param_effects(
    what: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    trainable: bool,
    sums: Split,
    plan: ParamPlan,
    state_ratio: StateRatio,
    microbatches: int,
    neighbours: bool,
    backward: bool = True,
) -> Iterator[Effect]:
    """What one parameter entails: residence, gathering, gradient sums and the optimizer's pass.

    `shape` is local to the tensor splits, `sums` the parts over which its gradient is partial,
    `plan` says what ZeRO shards, `state_ratio` what is kept for each element. `neighbours`: it is
    a layer's, so that collectives of the layers around it are under way at the same time.
    `backward`: that of its layer runs, which it does not where nothing before it is trained.
    """
    item, whole = dtype.itemsize, math.prod(shape)
    shard = shard_numel(shape, split_size(plan.state))
    if not trainable:
        yield Resident("parameter", (shard if plan.param else whole) * item)
        if plan.param:
            gathered = padded_bytes(shape, item, split_size(plan.state))
            yield from _gathers(what, gathered, plan, backward)
            yield Resident("transient", gathered * (2 if neighbours else 1))
        return
    gradient, master = state_ratio.gradient_item(item), state_ratio.master_bytes
    if not (plan.param and master and state_ratio.gathers_master):
        yield Resident("parameter", (shard if plan.param else whole) * item)
    if master:
        yield Resident("master", shard * master)
    # Gradients that nothing is added to any more are scattered as soon as they are there.
    scattered = bool(plan.grad) or microbatches == 1
    yield Resident("gradient", (shard if scattered else whole) * gradient)
    yield Resident("optimizer", math.ceil(shard * state_ratio.state_bytes(item)))
    name = str(dtype).removeprefix("torch.")
    stepped = math.ceil(shard * state_ratio.stepped_bytes(item))
    yield Compute("optimizer", 0, stepped, name, "optimizer", special=shard)  # Adam's roots
    if (
        microbatches > 1 and not state_ratio.adds_in_products
    ):  # every microbatch's but the first is added to what is there
        added = (shard if scattered else whole) * (item + 2 * gradient)
        added = math.ceil(added * (microbatches - 1) / microbatches)
        yield Compute("pointwise", 0, added, name, "backward")
    if plan.state:
        pieces = split_size(plan.state)
        value_bytes, gradient_bytes = (padded_bytes(shape, b, pieces) for b in (item, gradient))
        yield from _shard_effects(what, value_bytes, gradient_bytes, plan)
        values, gradients = _whole_copies(plan, scattered, neighbours)
        yield Resident("transient", values * value_bytes + gradients * gradient_bytes)
    rest = tuple(part for part in sums if part not in plan.state)
    if rest:
        yield Collective("all_reduce", shard * gradient, rest, "grad_sync", "step", what, BUCKET)


def _whole_copies(plan: ParamPlan, scattered: bool, neighbours: bool) -> tuple[int, int]:
    """How many whole values and gradients exist at the peak, in the backward, beside what is
    resident.

    Gradients that accumulate whole: the flat buffer that they are scattered from. Others: the
    gradient, and that buffer of the layer before. Stage 3: the gathered value as well, and for
    layers that of the next one, which FSDP2 prefetches.
    """
    if not scattered:
        return 0, 1
    if not plan.param:
        return 0, 2
    return (2, 2) if neighbours else (1, 1)


def _shard_effects(
    what: str, value_bytes: int, gradient_bytes: int, plan: ParamPlan
) -> Iterator[Collective]:
    """ZeRO's collectives (Rajbhandari et al. 2020). Stage 3 gathers for every forward and every
    backward; else once a step, and where gradients accumulate whole (1) one sum a step is due. The
    next unit's is under way while one is used, so they hide behind compute."""
    yield from _gathers(what, value_bytes, plan, True)
    per: Literal["microbatch", "step"] = "microbatch" if plan.grad else "step"
    yield Collective(
        "reduce_scatter", gradient_bytes, plan.state, "backward", per, what, _unit(plan), True
    )


def _gathers(what: str, size: int, plan: ParamPlan, backward: bool) -> Iterator[Collective]:
    per: Literal["microbatch", "step"] = "microbatch" if plan.param else "step"
    phases: tuple[Phase, ...] = ("forward", "backward") if plan.param and backward else ("forward",)
    for phase in phases:
        yield Collective("all_gather", size, plan.state, phase, per, what, _unit(plan), True)


def _unit(plan: ParamPlan) -> str:
    return "shards of " + ("parameters" if plan.param else "gradients" if plan.grad else "state")


def param_layout(needs: Mapping[str, Layout] | tuple[Layout, ...]) -> Layout:
    """How a parameter is stored, given the layouts that its uses need: theirs where they agree.

    Where they differ on a part it is whole there and its gradient partial (V): every use then
    converts from that. So it is where ranks would hold two chunks of it.
    """
    layouts = list(needs.values()) if isinstance(needs, Mapping) else list(needs)
    first = layouts[0]
    balanced = any(p.balanced for layout in layouts for _, s in layout.splits for p in s)
    if not balanced and all(layout == first for layout in layouts):
        return first
    parts = {p for layout in layouts for p in layout.split_parts() | layout.varying}
    return Layout(varying=frozenset(parts))

"""What autograd keeps from the forward for the backward, and what runs again instead.

Non-reentrant checkpoints of torch keep what goes into the function that they run, and stop the
second run as soon as the last tensor that the backward needs is there again: ops and collectives
after that run once.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.graph.chains import layer_calls, ops_after_layers
from autopar.graph.model_graph import STREAM, Block, ModelGraph, SavedTensor
from autopar.layouts.effects import form_residents
from autopar.layouts.flow import normal
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.program import runs_alone
from autopar.layouts.typing import OpTyping, RegionTyping, boundary_layout, input_layout
from autopar.layouts.views import folded, folds, viewed
from autopar.layouts.vocabulary import kept_instead
from autopar.layouts.work import batch_share, internal_bytes
from autopar.plugin import Candidate, Resident

Storage = tuple[str, Layout]
"""The value that owns a storage, and its layout (without what no element depends on)."""


@dataclass(frozen=True)
class Kept:
    """`storages`: tensors of the graph, with bytes; `inside_bytes`: what ops make and keep for
    themselves (statistics, masks); `shared`: inputs that all layers share, as they come, whose
    bytes aren't among the region's."""

    storages: Mapping[Storage, int] = field(default_factory=dict)
    inside_bytes: int = 0
    shared: frozenset[Storage] = frozenset()

    @property
    def bytes(self) -> int:
        """All of it, each storage once."""
        return self.inside_bytes + sum(self.storages.values())


@dataclass(frozen=True)
class Held:
    """What one microbatch of a region keeps until its backward, and bytes that are there beside
    that for a while: while ops exchange what they take, and while the region, or its layer, runs
    again."""

    kept: Kept
    transient_bytes: tuple[int, ...] = ()
    again_bytes: int = 0


def held(
    block: Block, typing: RegionTyping, setting: Setting, group: tuple[str, ...], path: str
) -> Held:
    """What one microbatch of the region holds.

    `group`: the layers that run again together with the layer `path`. A layer's stream answers for
    the layer's input. While a group runs again, all that its layers would have kept is there.
    """
    forms = tuple(
        resident.bytes
        for name, own in typing.ops.items()
        for resident in form_residents(block, block.ops[name], own, setting)
    )
    again = typing.candidate.recompute
    kept = saved(block, typing, setting)
    if again is None:
        return Held(kept, forms)
    taken = Kept()
    if again.scope == "region":
        taken = crossing(block, typing, setting)
    elif typing.candidate.region == STREAM:
        given = layer_inputs(block, typing, setting)
        # What all layers share is an argument of the group's call as well.
        taken = given if path == group[0] else Kept(shared=given.shared)
    fresh = {k: v for k, v in kept.storages.items() if k not in taken.storages}
    taken = replace(taken, shared=taken.shared | kept.shared)
    size = replace(kept, storages=fresh).bytes * len(group)
    if again.scope == "layers" and typing.candidate.region == STREAM and path != group[0]:
        # The first layer's input is kept anyway.
        inputs = layer_inputs(block, typing, setting).storages
        size -= sum(bytes_ for key, bytes_ in fresh.items() if key in inputs)
    return Held(taken, forms, size)


def saved_residents(
    block: Block,
    typing: RegionTyping,
    setting: Setting,
    group: tuple[str, ...],
    path: str,
    found: Held,
) -> Iterator[Resident]:
    """What is `held` as effects of the region alone: what other regions keep as well counts for
    each of them, so their sum is never too small (`met` says what that may be)."""
    late = 0 if path else _late_bytes(block, typing, setting, group, found)
    yield Resident("saved", found.kept.bytes - late)
    if late:
        yield Resident("saved", late, "end")
    yield from moments(found, runs_alone(typing.candidate), path)


def met(block: Block, kept: Kept) -> Mapping[Storage, int]:
    """Of what a region keeps, the storages that other regions may keep as well."""
    return {one: size for one, size in kept.storages.items() if one[0] in block.met}


def moments(found: Held, alone: bool, path: str) -> Iterator[Resident]:
    """What is there while a region's ops exchange what they take, and while something runs again;
    where the region does alone, both happen then."""
    if alone:
        most = max([*found.transient_bytes, found.again_bytes])
        yield Resident("transient", most, "alone" if path else "end")
        return
    yield from (Resident("transient", size) for size in found.transient_bytes)
    if found.again_bytes:
        yield Resident("transient", found.again_bytes, "again" if path else "end")


def _late_bytes(
    block: Block, typing: RegionTyping, setting: Setting, group: tuple[str, ...], whole: Held
) -> int:
    """What a region of the skeleton keeps more for its ops after the last layer's call. `whole`:
    what it holds for all."""
    after = ops_after_layers(block)
    ops = {name: op for name, op in typing.ops.items() if name not in after}
    if len(ops) == len(typing.ops):
        return 0
    early = held(block, replace(typing, ops=ops), setting, group, "")
    return whole.kept.bytes - early.kept.bytes


def saved(block: Block, typing: RegionTyping, setting: Setting) -> Kept:
    """What autograd keeps of the region's ops, each storage in each layout once."""
    storages: dict[Storage, int] = {}
    shared: set[Storage] = set()
    split_rows = {
        name: instead
        for name, own in typing.ops.items()
        if (instead := kept_instead(block, block.ops[name], own, setting)) is not None
    }
    inside = sum(size for _, size in split_rows.values())
    for one in block.saved:
        if one.op not in typing.ops:
            continue
        if one.op in split_rows and (one.value == split_rows[one.op][0] or one.shape == ()):
            continue
        found = _keeps(block, one, typing, setting)
        if isinstance(found, int):
            inside += found
        elif _is_shared(block, *found, setting):
            shared.add(found)
        else:
            _keep(storages, block, *found, setting)
    for name, op_typing in typing.ops.items():
        work = block.ops[name].work
        if work is not None:
            share = batch_share(block, block.ops[name], op_typing, setting)
            inside += int(work.saved_bytes * share)
    return Kept(storages, inside, frozenset(shared))


def _keeps(block: Block, one: SavedTensor, typing: RegionTyping, setting: Setting) -> Storage | int:
    """The storage that an op keeps alive, or the bytes of what it makes for itself."""
    own, value, copied = typing.ops[one.op], one.value, folded(block, one)
    if copied is not None and folds(block, one, copied, own.needs[copied], setting):
        value = copied
    if value is not None:
        layout = own.needs[value] if value in own.needs else typing.ops[value].makes
        return owner_of(block, value, layout, typing, setting)
    if copied is not None:
        dims = block.values[copied].dims
        return one.item_bytes * setting.local_numel(dims, own.needs[copied])
    if block.ops[one.op].opaque:
        share = batch_share(block, block.ops[one.op], own, setting)
        return int(math.prod(one.shape) * one.item_bytes * share)
    return internal_bytes(block, one, own, setting)


def crossing(block: Block, typing: RegionTyping, setting: Setting) -> Kept:
    """The tensors that the region's ops take from outside, as they take them."""
    storages: dict[Storage, int] = {}
    shared: set[Storage] = set()
    for op_typing in typing.ops.values():
        for name, layout in op_typing.needs.items():
            if name not in typing.ops and name in block.values and not block.is_weight(name):
                taken = normal(block.values[name], layout)
                owner = owner_of(block, name, taken, typing, setting)
                if _is_shared(block, *owner, setting):
                    shared.add(owner)
                else:
                    _keep(storages, block, *owner, setting)
    return Kept(storages, shared=frozenset(shared))


def layer_inputs(block: Block, stream: RegionTyping, setting: Setting) -> Kept:
    """What a layer is called with."""
    storages: dict[Storage, int] = {}
    shared: set[Storage] = set()
    for name in block.inputs():
        layout = boundary_layout(block.values[name], stream.candidate, setting)
        if _is_shared(block, name, layout, setting):
            shared.add((name, layout))
        else:
            _keep(storages, block, name, layout, setting)
    return Kept(storages, shared=frozenset(shared))


def shared_tensors(
    model: ModelGraph, setting: Setting, layers: Collection[str]
) -> Mapping[str, Mapping[str, tuple[Storage, int]]]:
    """Of the layers at these paths, by path and input that others share: whose storage it lies in
    outside of layers, and the bytes of that."""
    block_of = {layer.path: model.blocks[layer.block] for layer in model.layers}
    known: dict[str, tuple[Storage, int]] = {}
    found: dict[str, dict[str, tuple[Storage, int]]] = {}
    for call in layer_calls(model.skeleton):
        path = str(call.args[1])
        if path not in layers:
            continue
        block, tensors = block_of[path], tuple(call.args[0])  # type: ignore[arg-type]
        for given, name in zip(tensors, block.inputs(), strict=True):
            if name in block.shared:
                if given.name not in known:
                    known[given.name] = _as_it_comes(model.skeleton, given.name, setting)
                found.setdefault(path, {})[name] = known[given.name]
    return found


def _as_it_comes(skeleton: Block, name: str, setting: Setting) -> tuple[Storage, int]:
    """Whose storage a value of the skeleton lies in that no region makes, and the bytes of that."""
    layout = input_layout(skeleton.values[name], setting)
    nothing = RegionTyping(Candidate(STREAM), {})
    owner, layout = owner_of(skeleton, name, layout, nothing, setting)
    value = skeleton.values[owner]
    layout = layout.restrict(value.names)
    return (owner, layout), setting.local_numel(value.dims, layout) * value.item_bytes


def _keep(
    storages: dict[Storage, int], block: Block, name: str, layout: Layout, setting: Setting
) -> None:
    if not block.is_weight(name):
        value = block.values[name]
        layout = _placed(layout).restrict(value.names)
        storages[name, layout] = setting.local_numel(value.dims, layout) * value.item_bytes


def _is_shared(block: Block, name: str, layout: Layout, setting: Setting) -> bool:
    """Whether all layers keep this tensor."""
    if name not in block.shared:
        return False
    value = block.values[name]
    return _placed(layout).restrict(value.names) == _placed(input_layout(value, setting))


def owner_of(
    block: Block, name: str, layout: Layout, typing: RegionTyping, setting: Setting
) -> Storage:
    """Whose storage a value lies in that is taken in a layout. Ops of other regions, which choose
    for themselves, are taken to copy where the unsplit model's do."""
    while True:
        value, own = block.values[name], _typing_of(block, name, typing, setting)
        if own is not None and moved(normal(value, own.makes), normal(value, layout)):
            return name, layout
        views = own is not None and name in block.ops
        source = viewed(block, name, own, setting) if own and views else block.views.get(name)
        if source is None:
            return name, layout
        if own is not None and source in own.needs:
            layout = own.needs[source]
        name = source


def _typing_of(block: Block, name: str, typing: RegionTyping, setting: Setting) -> OpTyping | None:
    """How the op that makes a value is typed, as far as the region knows; of one among several
    results how the op that made them all takes its inputs."""
    if name in typing.ops:
        own = typing.ops[name]
        sources = [n.name for n in block.node(name).all_input_nodes]
        several = [n for n in sources if n not in block.values and n in typing.ops]
        return replace(own, needs=typing.ops[several[0]].needs) if several else own
    value = block.values[name]
    if value.needs_grad or block.is_weight(name):
        return None
    sources = [block.views[name]] if name in block.views else []
    if name in block.ops:
        sources += [n.name for n in block.node(name).all_input_nodes if n.name in block.values]
    needs = {source: input_layout(block.values[source], setting) for source in sources}
    return OpTyping(needs, input_layout(value, setting))


def moved(made: Layout, taken: Layout) -> bool:
    """Whether a conversion from one layout to the other makes a new tensor."""
    return _placed(made) != _placed(taken)


def _placed(layout: Layout) -> Layout:
    """A layout without what is about gradients alone."""
    return replace(layout, varying=frozenset())

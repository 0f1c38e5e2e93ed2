"""What a finished program does in a step: every effect on one rank, in the order of its layers."""

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.graph.chains import layer_calls, ops_after_layers
from autopar.graph.model_graph import STREAM
from autopar.layouts.again import again_effects, reach, running_effects, steps_again
from autopar.layouts.effects import step_effects
from autopar.layouts.flow import Choices, Flow, needs
from autopar.layouts.kept_once import kept_once
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.program import Program, runs_alone
from autopar.layouts.saved import Held, Kept, held, moments
from autopar.layouts.stages import Cut, Here
from autopar.layouts.state_ratio import StateRatio
from autopar.layouts.traffic import loss_transients
from autopar.layouts.typing import OpTyping, RegionTyping
from autopar.planning.books import skeleton_name
from autopar.planning.region_effects import (
    boundary_effects,
    buffer_effects,
    handed_on,
    input_effects,
    one_param,
    scalar_collectives,
    unused_effects,
)
from autopar.planning.skeleton_parts import SkeletonPart, SkeletonParts
from autopar.plugin import Effect, Resident


@dataclass(frozen=True)
class Own:
    """What a layer does, or what one part has of the skeleton: ops that belong to no region and
    buffers, all else but conversions and what its regions keep; this; and what they keep of ops
    after the last layer."""

    outside: tuple[Effect, ...]
    inside: tuple[Effect, ...]
    kept: tuple[Kept, ...]
    late: tuple[Kept, ...] = ()


@dataclass(frozen=True)
class Known:
    """What was worked out of a program: by layers that run alike, and by parts that have the same
    of the skeleton. `wanted`: by part, the conversions that its ops need."""

    wanted: Mapping[int, Collection[tuple[str, Layout]]]
    layers: dict[Hashable, tuple[tuple[Effect, ...], tuple[Kept, ...]]] = field(
        default_factory=dict
    )
    skeletons: dict[SkeletonPart | None, Own] = field(default_factory=dict)
    parts: SkeletonParts = field(default_factory=SkeletonParts)


def stage_effects(
    program: Program, state_ratio: StateRatio
) -> Iterator[Iterator[tuple[str, Effect]]]:
    """For each stage (one, where there are none) every effect of a step on one rank."""
    if program.cut is None:
        yield program_effects(program, state_ratio)
        return
    assert program.setting.schedule is not None
    table = program.setting.schedule.table
    known = Known(_wanted(program.flows[""], program.cut))
    for stage in range(table.stages):
        parts = range(stage, table.parts, table.stages)
        found = [part_effects(program, state_ratio, part, known) for part in parts]
        yield itertools.chain(*found, _scalars(program))


def program_effects(program: Program, state_ratio: StateRatio) -> Iterator[tuple[str, Effect]]:
    """Every effect of a step, with the layer that it belongs to."""
    places = dict.fromkeys(path for path, _ in program.model.instances())
    yield from _instances(program, places, state_ratio, Known({}))
    for effect in unused_effects(program.model):
        yield "", effect
    yield from _scalars(program)


def part_effects(
    program: Program, state_ratio: StateRatio, part: int, known: Known
) -> Iterator[tuple[str, Effect]]:
    """Every effect of one part, with the layer that it belongs to. `known`: of layers of others."""
    setting, cut = program.setting, program.cut
    assert cut is not None and setting.schedule is not None
    here = program.heres[part]
    flow, name = program.flows[""], skeleton_name(part // setting.schedule.table.stages)
    places = {"": here, **dict.fromkeys(cut.layers[part])}
    for path, effect in _instances(program, places, state_ratio, known):
        yield path or name, effect
    for effect in itertools.chain(
        boundary_effects(flow.block, cut, part, flow.made.__getitem__, setting),
        unused_effects(program.model) if part == 0 else (),
        _sends(flow, here, setting),
    ):
        yield name, effect


def _instances(
    program: Program, places: Mapping[str, Here | None], state_ratio: StateRatio, known: Known
) -> Iterator[tuple[str, Effect]]:
    """Every effect of the layers at these paths, and of the skeleton (""), or what one part has of
    it. Of layers that run alike they are worked out once."""
    kept: list[tuple[str, Kept]] = []
    late: list[Kept] = []
    for path, here in places.items():
        if path == "":
            effects, own, after = _of_skeleton(program, state_ratio, here, known)
            late += after
        else:
            effects, own = _of_layer(program, path, state_ratio, known)
        for effect in effects:
            yield path, effect
        kept += [(path, one) for one in own]
    calls = {str(call.args[1]): i for i, call in enumerate(layer_calls(program.model.skeleton))}
    kept.sort(key=lambda one: calls.get(one[0], -1))
    yield from kept_once(program, kept, late)


def _of_layer(
    program: Program, path: str, state_ratio: StateRatio, known: Known
) -> tuple[tuple[Effect, ...], tuple[Kept, ...]]:
    """What a layer does, and what its regions keep."""
    flow, chosen, group = program.flows[path], program.choices[path], program.group(path)
    key = (id(flow), tuple(chosen.items()), len(group), path == group[0], path == group[-1])
    if key not in known.layers:
        own = _own(program, path, state_ratio)
        effects = (*own.outside, *_conversions(program, path), *own.inside)
        known.layers[key] = effects, own.kept
    return known.layers[key]


def _of_skeleton(
    program: Program, state_ratio: StateRatio, here: Here | None, known: Known
) -> tuple[tuple[Effect, ...], tuple[Kept, ...], tuple[Kept, ...]]:
    """What the skeleton does, or what one part has of it; what its regions keep, and of this what
    they keep of ops after the last layer."""
    alike = None if here is None else known.parts.of(program.model.skeleton, here)
    if alike not in known.skeletons:
        known.skeletons[alike] = _own(program, "", state_ratio, here)
    own = known.skeletons[alike]
    wanted = None if here is None else known.wanted.get(here.part, set())
    effects = (*own.outside, *_conversions(program, "", wanted), *own.inside)
    return effects, own.kept, own.late


def _own(program: Program, path: str, state_ratio: StateRatio, here: Here | None = None) -> Own:
    block, setting = program.block(path), program.setting
    regions = _held(program, path, here)
    after = _held(program, path, here, late=True) if path == "" else {}
    helds = (*regions.items(), *after.items())
    return Own(
        (*input_effects(block, setting, here), *buffer_effects(block, here)),
        tuple(_inside(program, path, helds, state_ratio, here)),
        tuple(one.kept for one in regions.values()),
        tuple(one.kept for one in after.values()),
    )


def _held(program: Program, path: str, here: Here | None, late: bool = False) -> Mapping[str, Held]:
    """What each region holds of the ops before the last layer call, or (`late`) of those after."""
    flow, group = program.flows[path], program.group(path)
    after = frozenset() if path else ops_after_layers(flow.block)
    return {
        region: held(
            flow.block,
            RegionTyping(
                candidate,
                {n: op for n, op in ops_of(flow, region, here).items() if (n in after) == late},
            ),
            program.setting,
            group,
            path,
        )
        for region, candidate in program.choices[path].items()
    }


def ops_of(flow: Flow, region: str, here: Here | None) -> dict[str, OpTyping]:
    """The ops of a region, or those of a part."""
    ops = flow.block.ops
    return {
        name: typing
        for name, typing in flow.typings.items()
        if ops[name].region == region and (here is None or here.has(name))
    }


def _sends(flow: Flow, here: Here, setting: Setting) -> Iterator[Effect]:
    """Values to the next part, gradients to the one before."""
    for forward, boundary in ((True, here.part), (False, here.part - 1)):
        if 0 <= boundary < len(here.cut.boundaries):
            for name in here.cut.boundaries[boundary]:
                value = flow.block.values[name]
                if forward or value.needs_grad:
                    yield handed_on(value, name, flow.made[name], setting, forward, here.axis)


def _scalars(program: Program) -> Iterator[tuple[str, Effect]]:
    skeleton = program.flows[""]
    (loss,) = skeleton.block.outputs()
    sums = tuple(part.axis for part in skeleton.made[loss.name].partial)
    if program.setting.schedule is not None:  # the other stages have none of it
        sums += (program.setting.schedule.axis,)
    item = skeleton.block.values[loss.name].item_bytes
    for effect in scalar_collectives(len(skeleton.block.counts), item, program.setting, sums):
        yield "", effect


def _inside(
    program: Program,
    path: str,
    helds: Sequence[tuple[str, Held]],
    state_ratio: StateRatio,
    here: Here | None,
) -> Iterator[Effect]:
    """What regions of the layer `path` do, or those of the skeleton ("") (in one part of it), but
    for conversions and what they keep (`helds`)."""
    flow, choices, setting = program.flows[path], program.choices[path], program.setting
    block, group = flow.block, program.group(path)
    for region in flow.choices:
        ops = ops_of(flow, region, here)
        running = running_effects(block, ops, setting)
        yield from itertools.chain(*running.values())
        yield from again_effects(block, choices[region], running, setting, path == group[-1])
        yield from loss_transients(block, ops, setting)
    yield from _for_a_while(path, helds, choices)
    for owner in block.regions:
        chosen = choices[owner.name]
        for param in owner.params:
            placeholder = next(p for p, n in block.params.items() if n == param.name)
            layout = flow.params.get(placeholder, Layout())
            plan = chosen.param(param.name)
            yield from one_param(
                block, plan, param.name, layout, setting, state_ratio, path != "", here
            )


def _for_a_while(
    path: str, helds: Sequence[tuple[str, Held]], choices: Choices
) -> Iterator[Effect]:
    """What is there while ops exchange what they take, and while something runs again."""
    alone: list[Resident] = []
    for region, one in helds:
        does_alone = runs_alone(choices[region])
        found = moments(one, does_alone, path)
        if does_alone:
            alone += found
        else:
            yield from found
    if alone:  # one region runs again at a time
        yield max(alone, key=lambda resident: resident.bytes)


def _conversions(
    program: Program, path: str, wanted: Collection[tuple[str, Layout]] | None = None
) -> Iterator[Effect]:
    """Every conversion, or those that are wanted."""
    flow, choices, last = program.flows[path], program.choices[path], program.group(path)[-1]
    for (name, need), steps in flow.conversions.items():
        if wanted is None or (name, need) in wanted:
            yield from step_effects(steps, name)
            if runs_again(flow, choices, name, need, path == last):
                yield from steps_again(steps, name)


def _wanted(flow: Flow, cut: Cut) -> Mapping[int, set[tuple[str, Layout]]]:
    """By part, in which layouts its nodes take values of the skeleton."""
    found: dict[int, set[tuple[str, Layout]]] = {}
    for node, source, need in needs(flow):
        for part in cut.parts.get(node.name, ()):
            found.setdefault(part, set()).add((source, need))
    return found


def runs_again(flow: Flow, choices: Choices, name: str, need: Layout, ends: bool) -> bool:
    """Whether a conversion is part of a second run: its first user is, and where a region runs
    again alone, the value is made inside (others are converted before, and kept)."""
    block = flow.block
    users = [
        u
        for u in block.graph.nodes
        if u.op in ("call_function", "output") and any(n.name == name for n in u.all_input_nodes)
        if u.name not in block.prologue and flow.need(u, name) == need
    ]
    region = block.ops[users[0].name].region if users[0].op == "call_function" else STREAM
    again = None if region is None else reach(block, choices[region], ends)
    made = block.ops[name].region if name in block.ops else None
    return (
        again is not None
        and again.takes(users[0].name)
        and (again.scope == "layers" or made == region or block.is_weight(name))
    )

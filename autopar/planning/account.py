"""What a finished program costs, counted from what will really run: the plan's own figures."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.graph.chains import layer_calls, ops_after_layers
from autopar.graph.model_graph import STREAM
from autopar.layouts.again import again_effects, reach, running_effects, steps_again
from autopar.layouts.convert import Step
from autopar.layouts.effects import (
    COST_CLASS,
    compute_effects,
    step_effects,
)
from autopar.layouts.flow import Choices, Flow, needs
from autopar.layouts.kept_once import kept_once
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.program import Program, runs_alone
from autopar.layouts.saved import Held, Kept, held, moments
from autopar.layouts.stages import Here
from autopar.layouts.state_ratio import StateRatio
from autopar.layouts.traffic import loss_transients
from autopar.layouts.typing import OpTyping, RegionTyping
from autopar.plan import CollectiveTotal, Predicted, StagePredicted
from autopar.planning.books import Books, Stage, books_of, skeleton_name
from autopar.planning.prices import Prices
from autopar.planning.region_effects import (
    boundary_effects,
    buffer_effects,
    handed_on,
    input_effects,
    one_param,
    scalar_collectives,
    unused_effects,
)
from autopar.planning.weights import Place, Row, Spent
from autopar.plugin import Effect, Resident


@dataclass(frozen=True)
class Account:
    """The predicted figures of a program, and its collectives by kind, group and phase."""

    predicted: Predicted
    collectives: tuple[CollectiveTotal, ...]


def account(program: Program, prices: Prices, state_ratio: StateRatio, tokens: int) -> Account:
    """Price a finished program."""
    every = books_by_stage(program, prices, state_ratio)
    collectives = tuple(
        CollectiveTotal(op, axes, phase, algorithm, int(b), int(n), s, stage)
        for stage, books in enumerate(every)
        for (op, axes, phase, algorithm), (b, n, s) in sorted(books.groups.items())
    )
    return Account(_predicted(program, prices, every, tokens), collectives)


def books_by_stage(program: Program, prices: Prices, state_ratio: StateRatio) -> list[Books]:
    """The books of each stage; without stages, of the one that every rank is."""
    return [
        books_of(effects, stage_of(program, stage), prices, program.setting.microbatches)
        for stage, effects in enumerate(stage_effects(program, state_ratio))
    ]


def stage_of(program: Program, stage: int) -> Stage:
    """A stage; without stages, the one that every rank is."""
    if program.cut is None:
        return Stage(((1,),), {path: 0 for path in program.choices})
    assert program.setting.schedule is not None
    table = program.setting.schedule.table
    chunks = {}
    for chunk in range(table.chunks):
        chunks[skeleton_name(chunk)] = chunk
        chunks.update(dict.fromkeys(program.cut.layers[chunk * table.stages + stage], chunk))
    return Stage(table.in_flight(stage), chunks, not table.splits_backward)


Known = dict[tuple[object, ...], tuple[tuple[Effect, ...], tuple[Kept, ...]]]
"""What layers do, and what they keep: those that run alike do the same."""


def stage_effects(
    program: Program, state_ratio: StateRatio
) -> Iterator[Iterator[tuple[str, Effect]]]:
    """For each stage (one, where there are none) every effect of a step on one rank."""
    if program.cut is None:
        yield program_effects(program, state_ratio)
        return
    assert program.setting.schedule is not None
    table = program.setting.schedule.table
    known: Known = {}
    for stage in range(table.stages):
        parts = range(stage, table.parts, table.stages)
        found = [part_effects(program, state_ratio, part, known) for part in parts]
        yield itertools.chain(*found, _scalars(program))


def program_effects(program: Program, state_ratio: StateRatio) -> Iterator[tuple[str, Effect]]:
    """Every effect of a step, with the layer that it belongs to."""
    places = dict.fromkeys(path for path, _ in program.model.instances())
    yield from _instances(program, places, state_ratio, {})
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
        flow, chosen, group = program.flows[path], program.choices[path], program.group(path)
        place = len(group), path == group[0], path == group[-1]
        key = (id(flow), tuple(chosen.items()), *place)
        if path == "" or key not in known:
            regions = _held(program, path, here)
            after = _held(program, path, here, late=True) if path == "" else {}
            helds = (*regions.items(), *after.items())
            effects = instance_effects(program, path, helds, state_ratio, here)
            known[key] = tuple(effects), tuple(one.kept for one in regions.values())
            late += [one.kept for one in after.values()]
        for effect in known[key][0]:
            yield path, effect
        kept += [(path, one) for one in known[key][1]]
    calls = {str(call.args[1]): i for i, call in enumerate(layer_calls(program.model.skeleton))}
    kept.sort(key=lambda one: calls.get(one[0], -1))
    yield from kept_once(program, kept, late)


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


def instance_effects(
    program: Program,
    path: str,
    helds: Sequence[tuple[str, Held]],
    state_ratio: StateRatio,
    here: Here | None = None,
) -> Iterator[Effect]:
    """Every effect of the layer `path`, or of the skeleton ("") (of what one part has of it), but
    for what its regions keep (`helds`)."""
    flow, choices, setting = program.flows[path], program.choices[path], program.setting
    block, group = flow.block, program.group(path)
    yield from input_effects(block, setting, here)
    yield from buffer_effects(block, here)
    for name, need, steps in _conversions(flow, here):
        yield from step_effects(steps, name)
        if runs_again(flow, choices, name, need, path == group[-1]):
            yield from steps_again(steps, name)
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


def _conversions(flow: Flow, here: Here | None) -> Iterator[tuple[str, Layout, tuple[Step, ...]]]:
    """Every conversion, or those for ops of a part."""
    wanted = None
    if here is not None:
        found = needs(flow)
        wanted = {(source, need) for node, source, need in found if here.has(node.name)}
    for key, steps in flow.conversions.items():
        if wanted is None or key in wanted:
            yield *key, steps


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


def model_flops(program: Program) -> int:
    """Flops of matrix products (convolutions and experts' included) and attention of one step on
    the whole model, forward and backward: what model flops utilisation counts."""
    setting = program.setting
    whole = Setting(setting.mesh, (), setting.microbatches)
    of_block: dict[int, int] = {}
    total = 0
    for path, block in program.model.instances():
        if id(block) not in of_block:
            ops = program.flows[path].typings
            of_block[id(block)] = sum(
                effect.flops
                for op in block.ops.values()
                if op.node.name in ops and COST_CLASS.get(op.kind) in ("matmul", "attention")
                for effect in compute_effects(block, op, None, whole)
            )
        total += of_block[id(block)]
    return total * setting.microbatches


def spent_in_step(every: Sequence[Books], setting: Setting) -> Spent:
    """What a step is made of: the plain windows of the slowest stage, as often as the step waits
    for them, those of every stage once in the pipeline, and the windows of the stage that has most
    once a step in the place of one of its plain ones."""
    per_slowest, per_stage = float(setting.microbatches), 0.0
    if setting.schedule is not None:
        table = setting.schedule.table
        per_slowest, per_stage = table.per_slowest, table.per_stage
    stages = range(len(every))
    slowest = max(stages, key=lambda i: every[i].microbatch_s)
    # Where a stage's own windows count less than once, no other than the slowest stage may do
    # without one of them: that is less than the step, but nothing is below 0.
    late = max(stages, key=lambda i: every[i].once_s) if per_stage >= 1 else slowest
    windows: dict[Place, Row] = {}
    times: dict[Place, float] = {}
    for i, books in enumerate(every):
        plain = per_stage + (per_slowest if i == slowest else 0.0) - (1.0 if i == late else 0.0)
        windows |= {(i, name): row for name, row in {**books.plain, **books.ends}.items()}
        times |= {(i, name): plain for name in books.plain}
        times |= {(i, name): 1.0 for name in books.ends if i == late}
    return Spent(windows, times, every[late].waited_once_s)


def step_seconds(every: Sequence[Books], setting: Setting) -> float:
    """The time of a step, from the books of its stages."""
    if setting.schedule is None:
        return every[0].step_s
    each = [books.microbatch_s / setting.microbatches for books in every]
    late_s = max(books.once_s for books in every)
    table = setting.schedule.table
    return table.per_slowest * max(each) + table.per_stage * sum(each) + late_s


def _predicted(program: Program, prices: Prices, every: Sequence[Books], tokens: int) -> Predicted:
    """Times are those of the slowest stage, memory that of the fullest."""
    slowest = max(every, key=lambda books: books.step_s)
    fullest = max(every, key=lambda books: sum(books.memory.values()))
    schedule = program.setting.schedule
    step_s = step_seconds(every, program.setting)
    flops = model_flops(program)
    dtypes = {
        str(n.meta["val"].dtype).removeprefix("torch.")
        for _, block in program.model.instances()
        for n in block.graph.nodes
        if n.name in block.params
    }
    rates = dict(prices.cluster.device.flops_per_s)
    peak = max((rates[d] for d in dtypes if d in rates), default=max(rates.values()))
    stages = tuple(StagePredicted(b.step_s, sum(b.memory.values())) for b in every)
    return Predicted(
        step_s,
        slowest.seconds.get("compute", 0.0),
        slowest.seconds.get("communication", 0.0),
        slowest.seconds.get("optimizer", 0.0),
        step_s - slowest.step_s if schedule is not None else 0.0,
        sum(fullest.memory.values()),
        fullest.memory,
        flops,
        tokens / step_s,
        flops / (step_s * program.setting.mesh.world * peak),
        stages if schedule is not None else (),
    )

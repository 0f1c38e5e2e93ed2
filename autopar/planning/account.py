"""What a finished program costs, counted from what will really run: the plan's own figures."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.graph.model_graph import Block
from autopar.layouts.effects import (
    closing_collectives,
    compute_effects,
    saved_bytes,
    step_effects,
)
from autopar.layouts.flow import Choices, Flow
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.program import Program
from autopar.layouts.typing import RegionTyping
from autopar.plan import CollectiveTotal, Predicted
from autopar.planning.joined import whole_calls
from autopar.planning.prices import Prices
from autopar.planning.region_effects import (
    buffer_effects,
    input_effects,
    one_param,
    scalar_collectives,
    unused_effects,
)
from autopar.plugin import Collective, Compute, Effect, Resident


@dataclass(frozen=True)
class Account:
    """The predicted figures of a program, and its collectives by kind, group and phase."""

    predicted: Predicted
    collectives: tuple[CollectiveTotal, ...]


def account(program: Program, prices: Prices, state_ratio: float, tokens: int) -> Account:
    """Price a finished program."""
    seconds: dict[str, float] = defaultdict(float)
    memory: Counter[str] = Counter()
    groups: dict[tuple[str, tuple[str, ...], str, str], list[float]] = {}
    transients: Counter[str] = Counter()
    for path, effect, calls in whole_calls(program_effects(program, state_ratio)):
        one = _one_call(effect, calls) if isinstance(effect, Collective) else effect
        price = calls * prices.cost(one)
        times = program.setting.microbatches
        if isinstance(effect, Collective):
            times = times if effect.per == "microbatch" else 1
            seconds["communication"] += price * times
            axes = tuple(part.axis for part in effect.axes)
            key = (effect.op, axes, effect.phase, prices.explain(one))
            total = groups.setdefault(key, [0, 0, 0.0])
            total[0] += effect.bytes * times
            total[1] += calls * times
            total[2] += price * times
        elif isinstance(effect, Compute):
            late = effect.phase == "optimizer"
            seconds["optimizer" if late else "compute"] += price * (1 if late else times)
        elif isinstance(effect, Resident):
            kind = transients if effect.what == "transient" else memory
            kind[path if effect.what == "transient" else effect.what] += math.ceil(price)
    skeleton = transients.pop("", 0)
    memory["transient"] = skeleton + max(transients.values(), default=0)
    memory["overhead"] = prices.overhead_bytes()
    predicted = _predicted(program, prices, seconds, memory, tokens)
    collectives = tuple(
        CollectiveTotal(op, axes, phase, algorithm, int(b), int(n), s)
        for (op, axes, phase, algorithm), (b, n, s) in sorted(groups.items())
    )
    return Account(predicted, collectives)


def _one_call(total: Collective, calls: int) -> Collective:
    """One of the equal calls that a joined collective is sent in."""
    return replace(total, bytes=math.ceil(total.bytes / calls))


def program_effects(program: Program, state_ratio: float) -> Iterator[tuple[str, Effect]]:
    """Every effect of a step, with the layer that it belongs to."""
    setting = program.setting
    for path, block in program.model.instances():
        flow = program.flows[path]
        chosen = program.choices[path]
        for effect in instance_effects(block, flow, chosen, setting, state_ratio, path != ""):
            yield path, effect
    for effect in unused_effects(program.model):
        yield "", effect
    skeleton = program.flows[""]
    (loss,) = skeleton.block.outputs()
    sums = tuple(part.axis for part in skeleton.made[loss.name].partial)
    item = skeleton.block.values[loss.name].item_bytes
    for effect in scalar_collectives(len(skeleton.block.counts), item, setting, sums):
        yield "", effect


def instance_effects(
    block: Block,
    flow: Flow,
    choices: Choices,
    setting: Setting,
    state_ratio: float,
    neighbours: bool,
) -> Iterator[Effect]:
    """Every effect of one layer (`neighbours`), or of the skeleton."""
    yield from input_effects(block, setting)
    yield from buffer_effects(block)
    for (name, _), steps in flow.conversions.items():
        yield from step_effects(steps, name)
    for region, candidate in flow.choices.items():
        ops = {n: t for n, t in flow.typings.items() if block.ops[n].region == region}
        for name, typing in ops.items():
            yield from compute_effects(block, block.ops[name], typing, setting)
            yield from closing_collectives(block, block.ops[name], typing, setting)
        yield Resident("saved", saved_bytes(block, RegionTyping(candidate, ops), setting))
    for owner in block.regions:
        chosen = choices[owner.name]
        for param in owner.params:
            placeholder = next(p for p, n in block.params.items() if n == param.name)
            layout = flow.params.get(placeholder, Layout())
            plan = chosen.param(param.name)
            yield from one_param(block, plan, param.name, layout, setting, state_ratio, neighbours)


def model_flops(program: Program) -> int:
    """Matrix and attention flops of one step on the whole model, forward and backward: what model
    flops utilisation counts."""
    setting = program.setting
    whole = Setting(setting.mesh, (), setting.microbatches)
    total = 0
    for path, block in program.model.instances():
        ops = program.flows[path].typings
        for op in block.ops.values():
            if op.node.name in ops and op.kind in ("contraction", "attention"):
                effects = compute_effects(block, op, None, whole)
                total += sum(e.flops for e in effects) * setting.microbatches
    return total


def _predicted(
    program: Program,
    prices: Prices,
    seconds: Mapping[str, float],
    memory: Mapping[str, int],
    tokens: int,
) -> Predicted:
    step_s = sum(seconds.values())
    flops = model_flops(program)
    dtypes = {
        str(n.meta["val"].dtype).removeprefix("torch.")
        for _, block in program.model.instances()
        for n in block.graph.nodes
        if n.name in block.params
    }
    rates = dict(prices.cluster.device.flops_per_s)
    peak = max((rates[d] for d in dtypes if d in rates), default=max(rates.values()))
    order = ("parameter", "gradient", "optimizer", "saved", "transient", "overhead")
    by_kind = {kind: int(memory[kind]) for kind in order if memory.get(kind)}
    return Predicted(
        step_s,
        seconds.get("compute", 0.0),
        seconds.get("communication", 0.0),
        seconds.get("optimizer", 0.0),
        sum(by_kind.values()),
        by_kind,
        flops,
        tokens / step_s,
        flops / (step_s * program.setting.mesh.world * peak),
    )

"""What each region of a finished program takes of a step: the account's seconds, shared out.

Compute is shared out as it is priced: the price of what runs at the same time (`Alongside`) is a
weighted sum of the device's and the host's seconds, and a region's part is that sum of its own. The
communication that shows is shared out in proportion to what each region's adds by the same weights,
so that what hides behind compute counts little, and what is waited for in full.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from autopar.graph.model_graph import STREAM
from autopar.layouts.again import steps_again
from autopar.layouts.effects import step_effects
from autopar.layouts.flow import needs
from autopar.layouts.layout import Layout
from autopar.layouts.program import Program
from autopar.layouts.stages import Here
from autopar.layouts.state_ratio import StateRatio
from autopar.layouts.typing import RegionTyping
from autopar.plan import Plan, RegionCost
from autopar.planning.books import Window, enter, one_call
from autopar.planning.joined import empty_call, whole_calls
from autopar.planning.prices import Prices
from autopar.planning.program_effects import runs_again, stage_effects
from autopar.planning.region_effects import one_param, op_effects
from autopar.planning.weights import largest
from autopar.plugin import BUCKET, Alongside, Collective, Compute, Effect

Where = tuple[str, str]
"""(layer path, region)."""
Seconds = tuple[float, float, float]
"""Compute, communication that shows, optimizer."""


@dataclass
class _Share:
    """What one place does in each window of a stage, and seconds that it waits once a step."""

    windows: dict[str, Window] = field(default_factory=lambda: defaultdict(Window))
    waited_once_s: float = 0.0

    def add(self, effect: Effect, price: float, host_s: float, prices: Prices) -> None:
        """One effect of a microbatch, or of a step."""
        if isinstance(effect, Collective):
            self.waited_once_s += enter(self.windows, effect, price, host_s, prices)
        elif isinstance(effect, Compute):
            self.windows[effect.phase].compute_s += price
            self.windows[effect.phase].compute_host_s += host_s


def region_costs(
    program: Program, plan: Plan, prices: Prices, state_ratio: StateRatio
) -> tuple[RegionCost, ...]:
    """Seconds of a step by region, on the ranks that hold it, in the order of the plan's regions;
    last, what belongs to no region: ops on inputs, scalars, what stages send each other."""
    microbatches = program.setting.microbatches
    spent: dict[Where, list[Seconds]] = defaultdict(list)
    rest: list[Seconds] = []
    for stage, effects in enumerate(stage_effects(program, state_ratio)):
        whole = _whole(effects, prices)
        shares = _shares(list(_owned(program, state_ratio, stage)), prices)
        by_place, left = _shared_out(whole, shares, prices, microbatches)
        rest.append(left)
        for where, seconds in by_place.items():
            spent[where].append(seconds)
    rows = []
    for choice in plan.regions:
        found = [one for layer in choice.layers for one in spent[layer, choice.region]]
        rows.append(RegionCost(choice.layers, choice.region, *_sum(found)))
    return (*rows, RegionCost((), "", *_sum(rest)))


def _sum(found: Iterable[Seconds]) -> Seconds:
    compute, communication, optimizer = ([one[i] for one in found] for i in range(3))
    return sum(compute), sum(communication), sum(optimizer)


# ---------------------------------------------------------------- windows, whole and by place


def _whole(effects: Iterable[tuple[str, Effect]], prices: Prices) -> _Share:
    """All that a stage does."""
    whole = _Share()
    for _, effect, calls in whole_calls(effects):
        if isinstance(effect, Collective | Compute):
            one = one_call(effect, calls) if isinstance(effect, Collective) else effect
            price, host_s = prices.apart(one)
            whole.add(effect, calls * price, calls * host_s, prices)
    return whole


def _shares(owned: list[tuple[Where, Effect]], prices: Prices) -> Mapping[Where, _Share]:
    """What each region does; of a joined call each has its part by bytes."""
    layers = ((where[0], effect) for where, effect in owned)
    calls: dict[tuple[str, Collective], tuple[int, float, float]] = {}
    for path, effect, times in whole_calls(layers):
        if isinstance(effect, Collective) and effect.unit:
            price, host_s = prices.apart(one_call(effect, times))
            calls[path, empty_call(effect)] = effect.bytes, times * price, times * host_s
    shares: dict[Where, _Share] = defaultdict(_Share)
    for where, effect in owned:
        if isinstance(effect, Collective) and effect.unit:
            key = ("" if effect.unit == BUCKET else where[0], empty_call(effect))
            size, price, host_s = calls[key]
            part = effect.bytes / size if size else 0.0
            shares[where].add(effect, part * price, part * host_s, prices)
        elif isinstance(effect, Collective | Compute):
            shares[where].add(effect, *prices.apart(effect), prices)
    return shares


def _shared_out(
    whole: _Share, shares: Mapping[Where, _Share], prices: Prices, microbatches: int
) -> tuple[Mapping[Where, Seconds], Seconds]:
    """The stage's seconds by region, and what is left for no region."""
    spent = {where: [0.0, share.waited_once_s, 0.0] for where, share in shares.items()}
    left = [0.0, whole.waited_once_s - sum(s.waited_once_s for s in shares.values()), 0.0]

    def give(kind: int, total_s: float, part: Callable[[Window], float], window: str) -> None:
        of_whole = part(whole.windows[window])
        scale = total_s / of_whole if of_whole else 0.0
        left[kind] += total_s
        for where, share in shares.items():
            own = scale * part(share.windows[window])
            spent[where][kind] += own
            left[kind] -= own

    for phase, window in list(whole.windows.items()):
        times = 1 if phase == "optimizer" else microbatches
        computing, every, late = window.computing(), window.all(), window.all(once=True)
        alone, together = (_weights(prices, work) for work in (computing, every))
        compute_s, all_s = prices.cost(computing), prices.cost(every)

        def of_compute(one: Window, weights: Seconds = alone) -> float:
            return weights[0] * one.compute_s + weights[1] * one.compute_host_s

        def of_calls(one: Window, weights: Seconds = together) -> float:
            device, host, network = weights
            calls = device * one.waited_s + host * one.collective_host_s
            return calls + network * one.hidden_s

        give(2 if phase == "optimizer" else 0, compute_s * times, of_compute, phase)
        give(1, (all_s - compute_s) * times, of_calls, phase)
        give(1, prices.cost(late) - all_s, lambda one: one.hidden_once_s, phase)
    rest = tuple(left)
    assert all(s >= -1e-9 * (1 + sum(rest)) for s in rest), rest
    named = {where: (times[0], times[1], times[2]) for where, times in spent.items()}
    return named, (max(0.0, left[0]), max(0.0, left[1]), max(0.0, left[2]))


def _weights(prices: Prices, work: Alongside) -> Seconds:
    """Of the weighted sums of which the largest is the price, that one's weights."""
    return largest(prices.rows, (work.device_s, work.host_s, work.network_s))


# ---------------------------------------------------------------- whose effects are whose


def _owned(program: Program, state_ratio: StateRatio, stage: int) -> Iterator[tuple[Where, Effect]]:
    """The effects of a stage that belong to a region."""
    if program.cut is None:
        places: list[tuple[str, Here | None]] = [(p, None) for p, _ in program.model.instances()]
    else:
        assert program.setting.schedule is not None
        table = program.setting.schedule.table
        places = []
        for part in range(stage, table.parts, table.stages):
            places.append(("", program.heres[part]))
            places += [(path, None) for path in program.cut.layers[part]]
    for path, here in places:
        yield from _of_layer(program, state_ratio, path, here)


def _of_layer(
    program: Program, state_ratio: StateRatio, path: str, here: Here | None
) -> Iterator[tuple[Where, Effect]]:
    flow, chosen, group = program.flows[path], program.choices[path], program.group(path)
    block, setting = flow.block, program.setting
    for name, need, payer in _needed(program, path, here):
        steps = flow.conversions[name, need]
        effects = [*step_effects(steps, name)]
        if runs_again(flow, chosen, name, need, path == group[-1]):
            effects += steps_again(steps, name)
        yield from (((path, payer), effect) for effect in effects)
    for region in block.regions:
        candidate = chosen[region.name]
        ops = {n: t for n, t in flow.typings.items() if block.ops[n].region == region.name}
        typing = RegionTyping(candidate, ops)
        for effect in op_effects(block, typing, setting, path, group, here):
            yield (path, region.name), effect
        for param in region.params:
            placeholder = next(p for p, n in block.params.items() if n == param.name)
            layout = flow.params.get(placeholder, Layout())
            lives = candidate.param(param.name)
            args = (block, lives, param.name, layout, setting, state_ratio, path != "", here)
            yield from (((path, region.name), effect) for effect in one_param(*args))


def _needed(program: Program, path: str, here: Here | None) -> Iterator[tuple[str, Layout, str]]:
    """Every conversion with the region that it is for: the one that needs the value, or that made
    it where the stream needs it (tensor parallelism's reductions are its regions', not those of the
    norm that follows). What enters and leaves the layer is the stream's."""
    flow = program.flows[path]
    seen = set()
    for node, name, need in needs(flow):
        if (name, need) not in flow.conversions or (name, need) in seen:
            continue
        if here is not None and not here.has(node.name):
            continue
        seen.add((name, need))
        maker, user = (flow.block.ops.get(one) for one in (name, node.name))
        for op in (user, maker):
            if op is not None and op.region not in (None, STREAM):
                yield name, need, str(op.region)
                break
        else:
            yield name, need, STREAM

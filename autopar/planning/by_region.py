"""What each region of a finished program takes of a step, counted as `account` counts."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from autopar.graph.model_graph import STREAM
from autopar.layouts.again import steps_again
from autopar.layouts.effects import step_effects
from autopar.layouts.flow import needs
from autopar.layouts.layout import Layout
from autopar.layouts.program import Program
from autopar.layouts.stages import Here
from autopar.layouts.typing import RegionTyping
from autopar.plan import Plan, RegionCost
from autopar.planning.account import runs_again, stage_effects, stage_of
from autopar.planning.books import books_of, one_call, tally
from autopar.planning.joined import empty_call, whole_calls
from autopar.planning.prices import Prices
from autopar.planning.region_effects import one_param, op_effects
from autopar.plugin import BUCKET, Collective, Compute, Effect

Where = tuple[str, str]
"""(layer path, region)."""
Spent = defaultdict[tuple[Where, str], float]
KINDS = ("compute", "communication", "optimizer")


def region_costs(
    program: Program, plan: Plan, prices: Prices, state_ratio: float
) -> tuple[RegionCost, ...]:
    """Seconds of a step by region, on the ranks that hold it, in the order of the plan's regions;
    last, what belongs to no region: ops on inputs, scalars, what stages send each other."""
    microbatches = program.setting.microbatches
    spent: Spent = defaultdict(float)
    whole: dict[str, float] = defaultdict(float)
    for stage, found_effects in enumerate(stage_effects(program, state_ratio)):
        effects = list(found_effects)
        books = books_of(effects, stage_of(program, stage), prices, microbatches)
        for kind, seconds in books.seconds.items():
            whole[kind] += seconds
        # What runs beside something else takes less: each bears its share of what is left.
        alone = _alone(effects, prices, microbatches)
        shares = {kind: books.seconds.get(kind, 0.0) / s if s else 0.0 for kind, s in alone.items()}
        owned = list(_owned(program, state_ratio, stage))
        _add(spent, owned, prices, microbatches, shares)
    rows = []
    for choice in plan.regions:
        places = [(layer, choice.region) for layer in choice.layers]
        times = [sum(spent[place, kind] for place in places) for kind in KINDS]
        rows.append(RegionCost(choice.layers, choice.region, *times))
    found: dict[str, float] = defaultdict(float)
    for (_, kind), seconds in spent.items():
        found[kind] += seconds
    rest = {kind: whole[kind] - found[kind] for kind in KINDS}
    assert all(left >= -1e-9 * whole[kind] for kind, left in rest.items()), (rest, whole)
    return (*rows, RegionCost((), "", *(max(0.0, rest[kind]) for kind in KINDS)))


def _add(
    spent: Spent,
    owned: list[tuple[Where, Effect]],
    prices: Prices,
    microbatches: int,
    shares: Mapping[str, float],
) -> None:
    """Price the effects; of a joined call each pays by its bytes. `shares`: by kind, of what they
    take by themselves."""
    layers = ((where[0], effect) for where, effect in owned)
    calls: dict[tuple[str, Collective], tuple[int, float]] = {}
    for path, effect, times in whole_calls(layers):
        if isinstance(effect, Collective) and effect.unit:
            price = times * prices.cost(one_call(effect, times))
            calls[path, empty_call(effect)] = effect.bytes, price
    known: dict[Effect, float] = {}
    for where, effect in owned:
        if isinstance(effect, Collective) and effect.unit:
            path = "" if effect.unit == BUCKET else where[0]
            size, price = calls[path, empty_call(effect)]
            price *= effect.bytes / size if size else 0.0
        elif isinstance(effect, Collective | Compute):
            if effect not in known:
                known[effect] = prices.cost(effect)
            price = known[effect]
        else:
            continue
        kind, times = _kind(effect, microbatches)
        spent[where, kind] += price * times * shares[kind]


def _kind(effect: Collective | Compute, microbatches: int) -> tuple[str, int]:
    """Of its seconds, and how often a step has it."""
    if isinstance(effect, Collective):
        return "communication", 1 if effect.per == "step" else microbatches
    return ("optimizer", 1) if effect.phase == "optimizer" else ("compute", microbatches)


def _alone(
    effects: Iterable[tuple[str, Effect]], prices: Prices, microbatches: int
) -> Mapping[str, float]:
    """Seconds by kind, one after the other."""
    found = dict.fromkeys(KINDS, 0.0)
    for (effect, calls), count in tally(whole_calls(effects)).items():
        assert isinstance(effect, Collective | Compute)
        one = one_call(effect, calls) if isinstance(effect, Collective) else effect
        kind, times = _kind(effect, microbatches)
        found[kind] += prices.cost(one) * calls * count * times
    return found


# ---------------------------------------------------------------- whose effects are whose


def _owned(program: Program, state_ratio: float, stage: int) -> Iterator[tuple[Where, Effect]]:
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
    program: Program, state_ratio: float, path: str, here: Here | None
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

"""Why a plan and not another: the recipe and the best on other meshes, planned for comparison."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import AutoparError
from autopar.plan import Alternative, Plan, Rival
from autopar.planning.by_region import region_costs
from autopar.planning.prices import Prices
from autopar.planning.realise import realise
from autopar.planning.recipe import plan_by_recipe
from autopar.planning.request import Request, make_plan
from autopar.planning.watch import Watch, unwatched
from autopar.summary import cost_of, other_meshes
from autopar.text import strategy_text


def explained(request: Request, plan: Plan, meshes: int, watch: Watch = unwatched) -> Plan:
    """The plan with the recipe's figures, those of the best on so many other meshes, and what each
    region takes."""
    able = [other for other in other_meshes(plan) if math.isfinite(cost_of(other))]
    program = realise(request.model, plan, request.strategies)
    prices = Prices(request.cost_models, program.setting.mesh, request.cluster)
    return replace(
        plan,
        recipe=_recipe(request, watch),
        runners_up=tuple(_best_on(request, other, watch) for other in able[:meshes]),
        region_costs=region_costs(program, plan, prices, request.options.state_ratio),
    )


def rival_of(plan: Plan, why: str) -> Rival:
    """A plan's figures, for another to be compared with."""
    used: Counter[str] = Counter()
    for choice in plan.regions:
        for name, options in choice.strategies.items():
            used[strategy_text(name, options)] += len(choice.layers)
    schedule = plan.schedule.name if plan.schedule else ""
    names = dict(sorted(used.items()))
    return Rival(plan.axes, plan.microbatches, schedule, names, plan.predicted, why)


def _recipe(request: Request, watch: Watch) -> Rival:
    try:
        plan = plan_by_recipe(request, watch=watch)
    except AutoparError as error:
        return Rival({}, 1, "", {}, None, str(error).partition("\n")[0])
    return rival_of(plan, plan.assumptions[-1])


def _best_on(request: Request, other: Alternative, watch: Watch) -> Rival:
    mesh: Mapping[str, int] = dict(other.mesh)
    pins = replace(request.pins, axes=mesh)
    try:
        return rival_of(make_plan(replace(request, pins=pins), watch), "the best on its mesh")
    except AutoparError as error:
        why = str(error).partition("\n")[0]
        return Rival(mesh, other.microbatches, other.schedule, {}, None, why)

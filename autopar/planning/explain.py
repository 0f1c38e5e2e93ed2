"""Why a plan and not another: the recipe and the best on other meshes, planned for comparison."""

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
from autopar.text import strategy_text


def explained(request: Request, plan: Plan, meshes: int, watch: Watch = unwatched) -> Plan:
    """The plan with the recipe's figures, those of the best on so many other meshes, and what each
    region takes."""
    program = realise(request.model, plan, request.strategies)
    prices = Prices(request.cost_models, program.setting.mesh, request.cluster)
    return replace(
        plan,
        recipe=_recipe(request, watch),
        runners_up=tuple(_best_on(request, other, watch) for other in _next_meshes(plan)[:meshes]),
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


def _next_meshes(plan: Plan) -> list[Alternative]:
    """Of each other mesh the setting that the search found best, or that has the lowest bound."""
    found: dict[tuple[tuple[str, int], ...], Alternative] = {}
    for other in sorted(plan.alternatives, key=_cost):
        if dict(other.mesh) != dict(plan.axes) and _cost(other) < float("inf"):
            found.setdefault(tuple(other.mesh.items()), other)
    return list(found.values())


def _cost(other: Alternative) -> float:
    fits = not other.why.startswith("short by")
    seconds = other.step_s if other.step_s is not None else other.bound_s
    return seconds if fits and seconds is not None else float("inf")


def _best_on(request: Request, other: Alternative, watch: Watch) -> Rival:
    mesh: Mapping[str, int] = dict(other.mesh)
    pins = replace(request.pins, axes=mesh)
    try:
        return rival_of(make_plan(replace(request, pins=pins), watch), "the best on its mesh")
    except AutoparError as error:
        why = str(error).partition("\n")[0]
        return Rival(mesh, other.microbatches, other.schedule, {}, None, why)

"""A search that ran out of time is held against the practitioner's recipe: with a limit, too, no
plan is slower than what a rule of thumb gives."""

from dataclasses import replace

from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.planning.infeasible import plan_or_explain
from autopar.planning.pins import Pins
from autopar.planning.recipe import plan_by_recipe
from autopar.planning.request import Request
from autopar.planning.watch import Watch, unwatched

NOTHING_PINNED = Pins({}, None, {}, ())


def plan_in_time(request: Request, watch: Watch = unwatched) -> Plan:
    """The plan of a request; where time ran out, not slower than the recipe's. Errors: those of
    `plan_or_explain`."""
    return not_slower_than_recipe(request, plan_or_explain(request, watch), watch)


def not_slower_than_recipe(request: Request, plan: Plan, watch: Watch = unwatched) -> Plan:
    """The plan of a search with a time limit, or the recipe's, if time ran out and that one is
    faster: with what the search proved. The recipe knows no pins, so that of a request with pins
    the plan stands. It is made after the limit, one mesh at a time."""
    options, proven = request.options, plan.certificate
    ran_out = options.time_limit_s is not None and proven.gap > options.gap
    if not ran_out or request.pins != NOTHING_PINNED:
        return plan
    try:
        recipe = plan_by_recipe(request, watch=watch)
    except AutoparError:
        return plan  # by the recipe nothing fits, or can run
    step_s = recipe.predicted.step_s
    if step_s >= plan.predicted.step_s:
        return plan
    gap = max(0.0, 1.0 - proven.bound_s / step_s)
    certificate = replace(proven, objective_s=step_s, gap=gap, difference_s=0.0)
    note = f"the search ran out of time at {plan.predicted.step_s:.4g} s a step"
    return replace(
        recipe,
        certificate=certificate,
        alternatives=plan.alternatives,
        assumptions=(*recipe.assumptions, note),
    )

"""A search with a time limit is held against the practitioner's recipe, which takes a part of that
time: with a limit, too, no plan is slower than what a rule of thumb gives."""

from dataclasses import replace

from autopar.errors import AutoparError, OutOfTimeError
from autopar.plan import Plan
from autopar.planning.deadline import after
from autopar.planning.infeasible import plan_or_explain
from autopar.planning.pins import Pins
from autopar.planning.recipe import plan_by_recipe
from autopar.planning.request import Request
from autopar.planning.watch import Watch, unwatched

NOTHING_PINNED = Pins({}, None, {}, ())
LEAST = 0.5
"""The share of a time limit that is the search's, however long the recipe takes."""
STEPS = 4
"""Of what is left the recipe gives its steps, each, so much: the last fits, those before often
don't."""


def plan_in_time(request: Request, watch: Watch = unwatched) -> Plan:
    """The plan of a request; with a time limit, not slower than the recipe's, which is made first.
    The recipe knows no pins: of a request with pins the search's plan stands.

    Errors: those of `plan_or_explain`; OutOfTimeError where neither has a plan.
    """
    limit_s = request.options.time_limit_s
    if limit_s is None or request.pins != NOTHING_PINNED:
        return plan_or_explain(request, watch)
    deadline = after(limit_s)
    recipe = _by_recipe(request, watch)
    left_s = deadline.at_least(LEAST * limit_s).left_s
    options = replace(request.options, time_limit_s=left_s)
    try:
        plan = plan_or_explain(replace(request, options=options), watch)
    except OutOfTimeError:
        if recipe is None:
            raise
        return recipe
    return plan if recipe is None else faster(plan, recipe)


def _by_recipe(request: Request, watch: Watch) -> Plan | None:
    limit_s = request.options.time_limit_s
    assert limit_s is not None
    share_s = limit_s * (1 - LEAST)
    own = replace(request, options=replace(request.options, time_limit_s=share_s / STEPS))
    try:
        return plan_by_recipe(own, watch=watch, deadline=after(share_s))
    except AutoparError:
        return None  # by the recipe nothing fits, or can run: the search may know better


def faster(plan: Plan, recipe: Plan) -> Plan:
    """The plan of a search, or the recipe's, if that one is faster, with what the search proved."""
    step_s, proven = recipe.predicted.step_s, plan.certificate
    if step_s >= plan.predicted.step_s:
        return plan
    # A search counts some memory on the safe side: its bound is of plans that fit by that count.
    proven = replace(proven, bound_s=min(proven.bound_s, step_s))
    gap = 1.0 - proven.bound_s / step_s
    certificate = replace(proven, objective_s=step_s, gap=gap, difference_s=0.0)
    note = f"the search, with its time limit, came to {plan.predicted.step_s:.4g} s a step"
    return replace(
        recipe,
        certificate=certificate,
        alternatives=plan.alternatives,
        assumptions=(*recipe.assumptions, note),
    )

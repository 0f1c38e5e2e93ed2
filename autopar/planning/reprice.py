"""A plan that came in from outside, with every figure computed anew."""

import math
from dataclasses import replace

from autopar.errors import AutoparError, InfeasibleError
from autopar.layouts.program import Program
from autopar.layouts.state_ratio import StateRatio
from autopar.plan import Plan, Predicted
from autopar.planning.account import account
from autopar.planning.decide import model_id, opaque_ops, region_choices, schedule_choice, tokens_of
from autopar.planning.infeasible import fullest
from autopar.planning.prices import Prices
from autopar.planning.unproven import unproven
from autopar.text import size

REPRICED = (
    "the figures were computed anew, as they weren't this plan's (it was edited, or the optimizer, "
    "the cost models or their versions are others); that it is the best is not proven"
)


def reprice(program: Program, plan: Plan, prices: Prices, state_ratio: StateRatio) -> Plan:
    """The plan of a verified program with its own figures.

    The certificate, the alternatives and what the plan is compared with stay only where the figures
    are those that it already had: else nothing is proven, and the assumptions say so. Errors:
    InfeasibleError where the program needs more memory than the plan's limit, AutoparError for a
    limit beyond the device.
    """
    model = program.model
    device_bytes = prices.cluster.device.memory_bytes
    if plan.memory_limit_bytes > device_bytes:
        raise AutoparError(
            f"the plan's memory_limit_bytes is {plan.memory_limit_bytes:,}; the cluster's device "
            f"has {device_bytes:,}"
        )
    books = account(program, prices, state_ratio, tokens_of(model))
    _check_memory(books.predicted, plan)
    fresh = replace(
        plan,
        model=model_id(model),
        batch_size=model.batch_size,
        tokens=tokens_of(model),
        schedule=schedule_choice(program),
        regions=region_choices(program),
        collectives=books.collectives,
        predicted=books.predicted,
        opaque=opaque_ops(model),
    )
    if _same_figures(fresh, plan):
        return fresh
    notes = plan.assumptions if REPRICED in plan.assumptions else (*plan.assumptions, REPRICED)
    step_s = books.predicted.step_s
    return replace(
        fresh,
        certificate=unproven(step_s),
        alternatives=(),
        assumptions=notes,
        recipe=None,
        runners_up=(),
        region_costs=(),
    )


def _check_memory(predicted: Predicted, plan: Plan) -> None:
    short = predicted.memory_bytes - plan.memory_limit_bytes
    if short > 0:
        where = fullest(predicted, plan.schedule, plan.memory_limit_bytes)
        raise InfeasibleError(
            f"the plan needs {predicted.memory_bytes:,} bytes ({size(predicted.memory_bytes)}) a "
            f"device. That is {short:,} ({size(short)}) over its memory_limit_bytes of "
            f"{plan.memory_limit_bytes:,} ({size(plan.memory_limit_bytes)}). {where}. Shard more, "
            "or raise the limit where the device has more",
            short,
        )


def _same_figures(fresh: Plan, plan: Plan) -> bool:
    ours, theirs = fresh.predicted, plan.predicted
    close = math.isclose(ours.step_s, theirs.step_s, rel_tol=1e-9)
    counted = [(c.stage, c.op, c.axes, c.phase, c.bytes, c.count) for c in fresh.collectives]
    return (
        close
        and ours.memory == theirs.memory
        and counted
        == [(c.stage, c.op, c.axes, c.phase, c.bytes, c.count) for c in plan.collectives]
    )

"""Why this plan, as a person reads it: what its rivals take, and what they lose on."""

import math
from collections.abc import Iterator, Mapping

from rich.table import Table

from autopar.plan import Plan, Predicted, Rival
from autopar.text import layer_span, seconds, short_mesh, size

PARTS: Mapping[str, str] = {
    "compute_s": "compute",
    "communication_s": "communication",
    "optimizer_s": "optimizer",
    "waiting_s": "waiting",
}


def rivals_table(plan: Plan) -> Table | None:
    """The plan beside the recipe and the best on other meshes; None where it has neither."""
    rivals = [*([("recipe", plan.recipe)] if plan.recipe else [])]
    rivals += [("other mesh", rival) for rival in plan.runners_up]
    if not rivals:
        return None
    table = Table(title="compared with")
    for name in ("", "mesh, microbatches, strategies"):
        table.add_column(name)
    table.add_column("step", justify="right")
    table.add_column("loses on")  # and wins, where it does
    for name, rival in rivals:
        if rival.predicted is None:
            table.add_row(name, _setting(rival), "none", rival.why)
        else:
            apart = "; ".join(difference(plan.predicted, rival.predicted)) or "the same"
            table.add_row(name, _setting(rival), seconds(rival.predicted.step_s), apart)
    return table


def regions_table(plan: Plan) -> Table | None:
    """Where the seconds of a step go, by region; None where that wasn't asked."""
    if not plan.region_costs:
        return None
    staged = ", each on the stage that holds it" if plan.schedule is not None else ""
    table = Table(title=f"seconds of a step by region{staged}")
    for name in ("layers", "region"):
        table.add_column(name)
    for name in ("compute", "exposed communication", "optimizer", "share"):
        table.add_column(name, justify="right")
    spent = [(c, c.compute_s + c.exposed_s + c.optimizer_s) for c in plan.region_costs]
    whole = sum(total for _, total in spent)
    for cost, total in spent:
        table.add_row(
            layer_span(cost.layers) if cost.layers else "",
            cost.region or "inputs, scalars, sends",
            *(seconds(value) for value in (cost.compute_s, cost.exposed_s, cost.optimizer_s)),
            f"{total / whole:.1%}",
        )
    return table


def speed_up(plan: Plan) -> str:
    """How much faster a plan is than the recipe, in a line; "" where that wasn't asked."""
    if plan.recipe is None:
        return ""
    if plan.recipe.predicted is None:
        return f"The recipe has no plan: {plan.recipe.why}"
    theirs, own = plan.recipe.predicted.step_s, plan.predicted.step_s
    return (
        f"Predicted {theirs / own:.2f} times as fast as the recipe ({seconds(own)} against "
        f"{seconds(theirs)} a step)."
    )


def faster(plan: Plan) -> str:
    """Why a rival may be faster than the plan, in a line; "" where none is."""
    rivals = [rival for rival in (plan.recipe, *plan.runners_up) if rival is not None]
    steps = [rival.predicted.step_s for rival in rivals if rival.predicted is not None]
    if min(steps, default=math.inf) >= plan.predicted.step_s:
        return ""
    c = plan.certificate
    apart = f"{'−' if c.difference_s < 0 else '+'}{seconds(abs(c.difference_s))}"
    return (
        "A rival is faster by its whole account. Either a pin excludes it, or the solver's "
        f"objective, by which plans are compared, isn't the whole account: of this plan it differs "
        f"by {apart}, beside a proven gap of {c.gap:.2%}."
    )


def difference(own: Predicted, theirs: Predicted) -> Iterator[str]:
    """What another plan has more of, the most seconds first; what it has less of; its memory."""
    apart = {text: getattr(theirs, key) - getattr(own, key) for key, text in PARTS.items()}
    least = 1e-3 * own.step_s
    more = sorted((-value, text) for text, value in apart.items() if value > least)
    less = sorted((value, text) for text, value in apart.items() if value < -least)
    if more:
        yield ", ".join(f"{text} +{seconds(-value)}" for value, text in more)
    if less:
        yield "has less " + ", ".join(f"{text} −{seconds(-value)}" for value, text in less)
    memory = theirs.memory_bytes - own.memory_bytes
    if memory:
        yield f"memory {'+' if memory > 0 else '−'}{size(abs(memory))}"


def _setting(rival: Rival) -> str:
    if not rival.mesh:
        return ""
    by = f" by {rival.schedule}" if rival.schedule else ""
    times = "" if rival.microbatches == 1 else f", {rival.microbatches} microbatches"
    used = "; ".join(f"{name} ×{count}" for name, count in rival.used.items())
    return f"{short_mesh(rival.mesh)}{by}{times}" + (f"; {used}" if used else "")

"""Why this plan, as a person reads it: what its rivals take, and what they lose on."""

from collections.abc import Iterator, Mapping

from rich.table import Table

from autopar.plan import Plan, Predicted, Rival
from autopar.text import mesh_text, seconds, size

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
    table.add_column("loses on")
    for name, rival in rivals:
        if rival.predicted is None:
            table.add_row(name, _setting(rival), "none", rival.why)
        else:
            lost = ", ".join(losses(plan.predicted, rival.predicted)) or "nothing"
            table.add_row(name, _setting(rival), seconds(rival.predicted.step_s), lost)
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


def losses(own: Predicted, theirs: Predicted) -> Iterator[str]:
    """What another plan has more of, the most seconds first, and how much memory more or less."""
    apart = {text: getattr(theirs, key) - getattr(own, key) for key, text in PARTS.items()}
    for text, more in sorted(apart.items(), key=lambda one: -one[1]):
        if more > 1e-3 * own.step_s:
            yield f"{text} +{seconds(more)}"
    less = [(text, more) for text, more in apart.items() if more < -1e-3 * own.step_s]
    if less:
        yield "and has less: " + ", ".join(f"{text} −{seconds(-more)}" for text, more in less)
    memory = theirs.memory_bytes - own.memory_bytes
    if memory:
        yield f"memory {'+' if memory > 0 else '−'}{size(abs(memory))}"


def _setting(rival: Rival) -> str:
    if not rival.mesh:
        return ""
    mesh = mesh_text({axis: length for axis, length in rival.mesh.items() if length > 1})
    by = f" by {rival.schedule}" if rival.schedule else ""
    times = "" if rival.microbatches == 1 else f", {rival.microbatches} microbatches"
    used = "; ".join(f"{name} ×{count}" for name, count in rival.used.items())
    return f"{mesh or 'one device'}{by}{times}" + (f"; {used}" if used else "")

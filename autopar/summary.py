"""A plan as a person reads it."""

import io
import math
from collections import Counter

from rich.console import Console
from rich.table import Table

from autopar.plan import Alternative, Plan, RegionChoice, ScheduleChoice
from autopar.text import layer_span, mesh_text, seconds, short_mesh, size, strategy_text
from autopar.why import faster, regions_table, rivals_table, speed_up

MOST_MESHES = 6
"""Other meshes that the summary lists."""
CUTS = (
    "  Where stages have several pieces of the model, one cut of its layers is solved; the bound "
    "is of all."
)
AGAIN = (
    "  What fits is counted on the safe side where layers run again (as if later layers of their "
    "part had freed nothing by then): a plan that fits by less than that isn't compared."
)


def summarise(plan: Plan) -> str:
    """The plan as text tables, 100 columns wide."""
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False, color_system=None)
    console.print(
        f"{plan.model.class_name} ({plan.model.parameters:,} parameters, {plan.model.layers} "
        f"layers) on {mesh_text(plan.axes)}; batch {plan.batch_size} in {plan.microbatches} "
        f"microbatch{'es' if plan.microbatches > 1 else ''}"
    )
    if plan.schedule is not None:
        console.print(_stages(plan, plan.schedule))
    console.print(_regions(plan))
    console.print(_collectives(plan))
    console.print(_predicted(plan))
    for table in filter(None, (regions_table(plan), rivals_table(plan))):
        console.print(table)
    for line in [*filter(None, [speed_up(plan), faster(plan)]), *_certificate(plan)]:
        console.print(line)
    return out.getvalue()


def _regions(plan: Plan) -> Table:
    table = Table(title="what was chosen")
    for name in ("layers", "region", "strategies", "splits", "sharded parameters"):
        table.add_column(name)
    for choice in plan.regions:
        table.add_row(
            layer_span(choice.layers),
            choice.region,
            strategies_text(choice),
            ", ".join(f"{dim} over {' · '.join(axes)}" for dim, axes in choice.splits.items()),
            _sharded(choice),
        )
    return table


def _sharded(choice: RegionChoice) -> str:
    axes = Counter(" · ".join(p.state) for p in choice.params.values() if p.state)
    return ", ".join(f"{count} over {names}" for names, count in sorted(axes.items()))


def strategies_text(choice: RegionChoice) -> str:
    """A region's strategies with their options: "data, zero 3 within 2"."""
    names = [strategy_text(name, options) for name, options in choice.strategies.items()]
    return ", ".join(names) or "none (replicated)"


def _stages(plan: Plan, schedule: ScheduleChoice) -> Table:
    """Where layers lie, part by part."""
    count = len(plan.predicted.stages)
    table = Table(
        title=f"{schedule.name} over {schedule.axis}: a stage waits {schedule.bubble:.1%} of a "
        "step, were all equal"
    )
    table.add_column("stage", justify="right")
    table.add_column("layers")
    for name in ("microbatches held", "own time", "memory"):
        table.add_column(name, justify="right")
    for stage, (held, own) in enumerate(
        zip(schedule.in_flight, plan.predicted.stages, strict=True)
    ):
        layers = "; ".join(layer_span(part) for part in schedule.parts[stage::count])
        cells = (str(held), seconds(own.step_s), size(own.memory_bytes))
        table.add_row(str(stage), layers, *cells)
    return table


def _collectives(plan: Plan) -> Table:
    table = Table(title="communication of one step, per rank")
    staged = plan.schedule is not None
    for name in (*(("stage",) if staged else ()), "collective", "over", "phase", "algorithm"):
        table.add_column(name)
    for name in ("bytes", "calls", "time"):
        table.add_column(name, justify="right")
    for total in plan.collectives:
        table.add_row(
            *((str(total.stage),) if staged else ()),
            total.op,
            " · ".join(total.axes),
            total.phase,
            total.algorithm,
            size(total.bytes),
            str(total.count),
            seconds(total.seconds),
        )
    return table


def _predicted(plan: Plan) -> Table:
    p = plan.predicted
    table = Table(title="predicted", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("step time", seconds(p.step_s))
    table.add_row("  compute", seconds(p.compute_s))
    table.add_row("  communication", seconds(p.communication_s))
    table.add_row("  optimizer", seconds(p.optimizer_s))
    if plan.schedule is not None:
        table.add_row("  waiting", seconds(p.waiting_s))
    table.add_row("tokens/s" if plan.tokens != plan.batch_size else "samples/s",
                  f"{p.tokens_per_s:,.0f}")  # fmt: skip
    table.add_row("MFU", f"{p.mfu:.1%}")
    table.add_row("memory per device", size(p.memory_bytes))
    for kind, count in p.memory.items():
        table.add_row(f"  {kind}", size(count))
    table.add_row("memory limit", size(plan.memory_limit_bytes))
    return table


def _certificate(plan: Plan) -> list[str]:
    c = plan.certificate
    proven = (
        f"Certificate: within {c.gap:.2%} of the best of {c.candidates} meshes and microbatch "
        f"counts ({c.solved} solved, {c.pruned} pruned by bound, {c.dropped} impossible; "
        f"{c.solver})."
    )
    lines = [proven if c.candidates else "Certificate: none, no search made this plan."]
    if plan.schedule is not None or any(other.schedule for other in plan.alternatives):
        lines.append(CUTS)
    if any("recompute" in choice.strategies for choice in plan.regions):
        lines.append(AGAIN)
    lines += [_instead(other) for other in other_meshes(plan)[:MOST_MESHES]]
    lines += [f"Assumed: {text}" for text in plan.assumptions]
    lines += [f"Opaque: {text}" for text in plan.opaque]
    return lines


def other_meshes(plan: Plan) -> list[Alternative]:
    """The best alternative on each mesh but the plan's own, by its step or its bound; last, meshes
    on which nothing fits or runs."""
    found: dict[tuple[tuple[str, int], ...], Alternative] = {}
    for other in sorted(plan.alternatives, key=cost_of):
        if dict(other.mesh) != dict(plan.axes):
            found.setdefault(tuple(other.mesh.items()), other)
    return list(found.values())


def cost_of(other: Alternative) -> float:
    """Seconds that an alternative takes, or at least takes; without end where it has no plan."""
    if other.step_s is not None:
        return other.step_s
    fits = other.bound_s is not None and not other.why.startswith("short by")
    return float(other.bound_s or 0.0) if fits else math.inf


def _instead(other: Alternative) -> str:
    cost = seconds(other.step_s) if other.step_s is not None else other.why
    by = f" by {other.schedule}" if other.schedule else ""
    times = "" if other.microbatches == 1 else f", {other.microbatches} microbatches"
    return f"  instead {short_mesh(other.mesh)}{by}{times}: {cost}"

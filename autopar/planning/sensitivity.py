"""How much a plan hangs on the cluster's numbers: what a little more or less would change."""

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from autopar.cluster import ClusterSpec
from autopar.devices import Link
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.planning.account import account
from autopar.planning.decide import tokens_of
from autopar.planning.prices import Prices
from autopar.planning.realise import realise
from autopar.planning.request import Request, make_plan
from autopar.planning.watch import Watch, unwatched
from autopar.text import seconds, short_mesh, strategy_text

SAME = 1e-3
"""Plans whose steps are closer than that, as a share, are as good as each other."""


@dataclass(frozen=True)
class Shift:
    """One number changed. `kept_s`: the step of the plan as it is (None: it no longer fits).
    `best`: what would be planned instead (None: nothing, which `why` explains)."""

    what: str
    kept_s: float | None
    best: Plan | None
    why: str = ""


@dataclass(frozen=True)
class Sensitivity:
    """A plan, and what changes of the cluster would do to it."""

    plan: Plan
    shifts: tuple[Shift, ...]

    def summary(self) -> str:
        """The changes as a table, 100 columns wide."""
        out = io.StringIO()
        console = Console(file=out, width=100, highlight=False, color_system=None)
        table = Table(title=f"what would change ({seconds(self.plan.predicted.step_s)} a step now)")
        table.add_column("change")
        for name in ("this plan", "best plan"):
            table.add_column(name, justify="right")
        table.add_column("chosen then")
        for shift in self.shifts:
            table.add_row(
                shift.what,
                "doesn't fit" if shift.kept_s is None else self._step(shift.kept_s),
                "none" if shift.best is None else self._step(shift.best.predicted.step_s),
                self._chosen(shift),
            )
        console.print(table)
        return out.getvalue()

    def __str__(self) -> str:
        return self.summary()

    def _chosen(self, shift: Shift) -> str:
        if shift.best is None:
            return shift.why
        kept_s = math.inf if shift.kept_s is None else shift.kept_s
        if kept_s * (1 - SAME) <= shift.best.predicted.step_s:
            return "this plan is as good as any"
        return changes(self.plan, shift.best)

    def _step(self, step_s: float) -> str:
        return f"{seconds(step_s)} ({step_s / self.plan.predicted.step_s - 1:+.1%})"


def sensitivity(
    request: Request, plan: Plan, share: float, watch: Watch = unwatched
) -> Sensitivity:
    """What `share` more and less of the devices' memory and of the links' bandwidth change: the
    plan's own step then, and the plan that a search then finds."""
    program = realise(request.model, plan, request.strategies)
    shifts = []
    for what, changed in _shifted(request, share):
        prices = Prices(changed.cost_models, program.setting.mesh, changed.cluster)
        ratio, tokens = changed.options.state_ratio, tokens_of(changed.model)
        predicted = account(program, prices, ratio, tokens).predicted
        fits = predicted.memory_bytes <= changed.options.limit_bytes
        kept_s = predicted.step_s if fits else None
        try:
            shifts.append(Shift(what, kept_s, make_plan(changed, watch)))
        except AutoparError as error:
            shifts.append(Shift(what, kept_s, None, str(error).partition(". ")[0]))
    return Sensitivity(plan, tuple(shifts))


def changes(before: Plan, after: Plan) -> str:
    """What is chosen otherwise, in short: "dp 4 instead of dp 2 · tp 2; 6 regions otherwise"."""
    found = []
    if dict(before.axes) != dict(after.axes):
        found.append(f"{short_mesh(after.axes)} instead of {short_mesh(before.axes)}")
    if before.microbatches != after.microbatches:
        found.append(f"{after.microbatches} microbatches instead of {before.microbatches}")
    if _schedule(before) != _schedule(after):
        found.append(f"{_schedule(after)} instead of {_schedule(before)}")
    old, new = _strategies(before), _strategies(after)
    others = sum(old[place] != new[place] for place in old)
    if others:
        found.append(f"{others} of {len(old)} regions otherwise")
    return "; ".join(found) or "the same"


def _schedule(plan: Plan) -> str:
    return plan.schedule.name if plan.schedule else "no stages"


def _strategies(plan: Plan) -> dict[tuple[str, str], tuple[str, ...]]:
    return {
        (layer, choice.region): tuple(
            strategy_text(name, options) for name, options in choice.strategies.items()
        )
        for choice in plan.regions
        for layer in choice.layers
    }


def _shifted(request: Request, share: float) -> Iterator[tuple[str, Request]]:
    for sign in (1 + share, 1 - share):
        text = f"{sign - 1:+.0%}"
        device = request.cluster.device
        memory = replace(device, memory_bytes=int(device.memory_bytes * sign))
        options = replace(request.options, limit_bytes=int(request.options.limit_bytes * sign))
        cluster = replace(request.cluster, device=memory)
        yield f"memory {text}", replace(request, cluster=cluster, options=options)
        yield f"bandwidth {text}", replace(request, cluster=_faster(request.cluster, sign))


def _faster(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """Every link's bytes a second changed, measured ones as well; latencies stay."""

    def link(one: Link) -> Link:
        return replace(
            one,
            bytes_per_s=one.bytes_per_s * factor,
            switch_bytes_per_s=one.switch_bytes_per_s * factor,
            fits=tuple(replace(fit, bytes_per_s=fit.bytes_per_s * factor) for fit in one.fits),
        )

    return replace(cluster, links=tuple(map(link, cluster.links)))

"""What would have to change for a plan to fit: single changes, each checked by planning with it."""

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from autopar.cluster import with_devices
from autopar.errors import AutoparError, InfeasibleError
from autopar.plan import Plan
from autopar.planning.pins import Pins
from autopar.planning.request import Request, make_plan
from autopar.planning.watch import Watch, unwatched
from autopar.plugin import Strategy
from autopar.registry import select_strategies
from autopar.text import seconds, short_mesh, size

FACTORS = (2, 4, 8, 16, 32, 64)
"""How many times more devices are tried, until some fit."""


@dataclass(frozen=True)
class Change:
    """A change, and the plan that fits with it."""

    what: str
    plan: Plan


@dataclass(frozen=True)
class Advice:
    """`changes` that make it fit, each alone; `refused`: what was tried as well, and why it doesn't
    help."""

    changes: tuple[Change, ...]
    refused: tuple[tuple[str, str], ...]

    def summary(self) -> str:
        """The changes as a table, 100 columns wide."""
        out = io.StringIO()
        console = Console(file=out, width=100, highlight=False, color_system=None)
        table = Table(title="each of these alone would fit")
        for name in ("change", "plan"):
            table.add_column(name)
        for name in ("memory", "step time"):
            table.add_column(name, justify="right")
        for change in self.changes:
            plan = change.plan
            microbatches = "" if plan.microbatches == 1 else f", {plan.microbatches} microbatches"
            table.add_row(
                change.what,
                f"{short_mesh(plan.axes)}{microbatches}",
                size(plan.predicted.memory_bytes),
                seconds(plan.predicted.step_s),
            )
        console.print(table if self.changes else "nothing that was tried would fit")
        for what, why in self.refused:
            console.print(f"Doesn't help: {what} ({why})")
        return out.getvalue()

    def __str__(self) -> str:
        return self.summary()


def advice(request: Request, smallest: Plan, watch: Watch = unwatched) -> Advice:
    """Which changes make a request fit of which nothing does. `smallest`: its plan that needs
    least, which says how much memory would do."""
    changes, refused = [], []
    for what, changed in _lifted(request):
        outcome = _tried(changed, watch)
        if isinstance(outcome, Plan):
            changes.append(Change(what, outcome))
        else:
            refused.append((what, outcome))
    every = Pins({}, None, {}, ())
    if not changes and len(refused) > 1 and request.pins != every:
        outcome = _tried(replace(request, pins=every), watch)
        if isinstance(outcome, Plan):
            changes.append(Change("lift every pin", outcome))
    changes.append(Change(_memory(request, smallest), smallest))
    for factor in FACTORS:
        devices = request.cluster.devices * factor
        what = f"{devices} devices instead of {request.cluster.devices}"
        outcome = _grown(request, devices, watch)
        if isinstance(outcome, Plan):
            changes.append(Change(what, outcome))
            break
        refused.append((what, outcome))
    return Advice(tuple(changes), tuple(refused))


def _tried(request: Request, watch: Watch) -> Plan | str:
    """The plan with a change, or why there is none."""
    try:
        return make_plan(request, watch)
    except InfeasibleError as error:
        return f"still short by {size(error.short_bytes)}"
    except AutoparError as error:
        return str(error).partition(". ")[0].partition("\n")[0]


def _grown(request: Request, devices: int, watch: Watch) -> Plan | str:
    try:
        cluster = with_devices(request.asked, devices)
    except AutoparError as error:
        return str(error)
    return _tried(replace(request, cluster=cluster), watch)


def _memory(request: Request, smallest: Plan) -> str:
    limit, need = request.options.limit_bytes, smallest.predicted.memory_bytes
    device = request.cluster.device.memory_bytes
    if need <= device:
        # Rounded up: that share of the memory is enough.
        share = -(-need * 10**4 // device) / 10**4
        return f"memory_fraction {share} instead of {limit / device:.4g}"
    return f"{size(need)} a device ({need:,} bytes) instead of {size(limit)}"


def _lifted(request: Request) -> Iterator[tuple[str, Request]]:
    """The request with each pin lifted, and with each strategy that was left out."""
    pins = request.pins
    for axis, length in pins.axes.items():
        what = f"allow the axis {axis}" if length == 1 else f"lift the pin {axis} = {length}"
        yield what, replace(request, pins=_without_axis(pins, axis, request.strategies))
    of_axes = _because_of_axes(pins, request.strategies)
    for name, pin in pins.strategies.items():
        if name not in of_axes:
            rest = {other: value for other, value in pins.strategies.items() if other != name}
            what = f"allow {name}" if pin is False else f"lift the pin on {name}"
            yield what, replace(request, pins=replace(pins, strategies=rest))
    if pins.microbatches is not None:
        what = f"lift the pin microbatches = {pins.microbatches}"
        yield what, replace(request, pins=replace(pins, microbatches=None))
    if pins.schedule is not None:
        what = f"lift the pin schedule = {pins.schedule}"
        yield what, replace(request, pins=replace(pins, schedule=None))
    for glob, own in pins.layers:
        others = tuple(other for other in pins.layers if other != (glob, own))
        yield (
            f"lift the pins of layers[{glob!r}]",
            replace(request, pins=replace(pins, layers=others)),
        )
    known = {strategy.name for strategy in request.strategies}
    for strategy in select_strategies(None):
        if strategy.exact and strategy.name not in known:
            more = tuple(sorted((*request.strategies, strategy), key=lambda s: s.name))
            yield f"take {strategy.name} among the strategies", replace(request, strategies=more)


def _because_of_axes(pins: Pins, strategies: tuple[Strategy, ...]) -> set[str]:
    """Strategies that are on because an axis of theirs is pinned above 1."""
    return {
        strategy.name
        for strategy in strategies
        for axis in strategy.axes()
        if pins.axes.get(axis.name, 1) > 1 and pins.strategies.get(strategy.name) is True
    }


def _without_axis(pins: Pins, axis: str, strategies: tuple[Strategy, ...]) -> Pins:
    axes = {name: length for name, length in pins.axes.items() if name != axis}
    owner = {strategy.name for strategy in strategies for a in strategy.axes() if a.name == axis}
    gone = owner & _because_of_axes(pins, strategies)
    rest = {name: pin for name, pin in pins.strategies.items() if name not in gone}
    return replace(pins, axes=axes, strategies=rest)

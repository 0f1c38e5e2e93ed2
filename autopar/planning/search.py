"""The outer search: every mesh and microbatch count, cheapest bound first, an ILP for each."""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar.cluster import ClusterSpec
from autopar.errors import AutoparError, InfeasibleError
from autopar.graph.model_graph import ModelGraph
from autopar.planning.meshes import axes_in_order, settings
from autopar.planning.outer import (
    Dropped,
    Outer,
    check_layers,
    open_setting,
    pointless,
    with_schedule,
)
from autopar.planning.pins import Pins
from autopar.planning.price import Pricer
from autopar.planning.prices import Prices
from autopar.planning.problem import Infeasible
from autopar.planning.schedules import scheduled
from autopar.planning.separable import why_inseparable
from autopar.planning.tried import (
    Answer,
    SearchOptions,
    Tried,
    opened,
    relax,
    settle,
    sharper,
    shortage,
)
from autopar.planning.watch import Progress, Watch, unwatched
from autopar.planning.weights import Weights, first_guess, rows_of
from autopar.planning.works import Works
from autopar.plugin import CostModel, Refusal, Strategy
from autopar.text import size


@dataclass(frozen=True)
class Found:
    """The best program with its prices, and everything that was tried or dropped."""

    answer: Answer
    winner: Outer
    prices: Prices
    bound_s: float
    tried: tuple[Tried, ...]
    dropped: tuple[Dropped, ...]
    inseparable: str | None = field(default=None)


def search(
    model: ModelGraph,
    cluster: ClusterSpec,
    strategies: Sequence[Strategy],
    cost_models: Sequence[CostModel],
    pins: Pins,
    options: SearchOptions,
    watch: Watch = unwatched,
) -> Found:
    """The fastest program that fits. `watch` is told how far the search is.

    Errors: AutoparError where no mesh is legal (with each reason), InfeasibleError where nothing
    fits into memory (short by how much).
    """
    space = _opened(model, cluster, strategies, cost_models, pins, options, watch)
    if not space.opened:
        raise _nothing_legal(cluster, pins, space.dropped)
    return _choose(space, options, watch, lambda dropped: _nothing_legal(cluster, pins, dropped))


@dataclass(frozen=True)
class _Space:
    """All settings: those that can run, with rough bounds, and the others."""

    opened: list[Tried]
    dropped: list[Dropped]
    inseparable: str | None


def _opened(
    model: ModelGraph,
    cluster: ClusterSpec,
    strategies: Sequence[Strategy],
    cost_models: Sequence[CostModel],
    pins: Pins,
    options: SearchOptions,
    watch: Watch,
) -> _Space:
    check_layers(model, pins)
    space = _Space([], [], why_inseparable(model))
    axes, layers = axes_in_order(strategies), len(model.layers)
    works: Works | None = None
    guess = first_guess(rows_of(cost_models)(cluster))
    sizes = (pins.axes, pins.microbatches, model.batch_size, layers)
    for asked in settings(axes, cluster.devices, *sizes):
        watch(Progress(len(space.opened) + len(space.dropped), len(space.dropped)))
        if pointless(model, asked, strategies, pins.axes):
            continue
        alike: dict[bool, Outer | Dropped] = {}
        for setting in scheduled(asked, strategies, pins, layers):
            if isinstance(setting, Refusal):
                space.dropped.append(Dropped(asked, setting.reason))
                continue
            # What a schedule allows depends on how it makes gradients alone.
            kind = setting.schedule is not None and setting.schedule.table.splits_backward
            if kind not in alike:
                alike[kind] = open_setting(model, setting, strategies, pins, space.inseparable)
            outer = alike[kind]
            if isinstance(outer, Dropped):
                space.dropped.append(replace(outer, setting=setting))
                continue
            outer = with_schedule(outer, setting)
            prices = Prices(cost_models, outer.setting.mesh, cluster, guess)
            works = works or Works(prices)
            pricer = Pricer(
                model, outer.setting, prices, outer.candidates, options.state_ratio, works
            )
            same = [t for t in space.opened[-1:] if t.outer.candidates is outer.candidates]
            space.opened.append(opened(outer, pricer, same[0] if same else None))
    return space


Nothing = Callable[[Sequence[Dropped]], AutoparError]
"""The error where every setting was dropped."""


def _choose(space: _Space, options: SearchOptions, watch: Watch, nothing: Nothing) -> Found:
    """Best first: the setting with the lowest bound is relaxed, or solved if it is already, until
    no bound is lower than the best step by more than the gap."""
    best: Tried | None = None
    best_s = math.inf
    guess: Weights | None = None
    tried: list[Tried] = []
    dropped = list(space.dropped)
    queue = [(one.bound_s, i, one) for i, one in enumerate(space.opened)]
    heapq.heapify(queue)
    while queue:
        bound_s, place, one = heapq.heappop(queue)
        if bound_s >= best_s * (1 - options.gap):
            tried.append(one)
            continue
        solved = sum(t.answer is not None for t in tried)
        counts = (len(space.opened) + len(dropped), len(dropped), len(tried) - solved, solved)
        watch(Progress(*counts, best_s if best else None, bound_s))
        if not one.is_relaxed:
            more = relax(one if one.seen or guess is None else one.by(guess), options)
            if isinstance(more, Dropped):
                dropped.append(more)
            elif more.result is not None:
                tried.append(more)
            else:
                heapq.heappush(queue, (more.bound_s, place, more))
            continue
        done = settle(one, options, best_s)
        if done.step_s < best_s:
            best, best_s = done, done.step_s
        weights = sharper(done, options) if done.bound_s < best_s * (1 - options.gap) else None
        if weights is None:
            tried.append(done)
        else:
            heapq.heappush(queue, (done.bound_s, place, done.by(weights)))
            guess = weights
    if not tried:
        raise nothing(dropped)
    if best is None:
        raise _nothing_fits(tried, options)
    assert best.answer is not None
    bounds = [t.bound_s for t in tried if not _never(t.result)]
    return Found(
        best.answer,
        best.outer,
        best.layered.pricer.prices,
        min(bounds),
        tuple(tried),
        tuple(dropped),
        space.inseparable,
    )


def _never(result: Infeasible | None) -> bool:
    """Whether nothing of a setting fits: a cut-off only says that nothing is faster."""
    return isinstance(result, Infeasible) and (result.impossible or result.short_bytes > 0)


def _nothing_legal(cluster: ClusterSpec, pins: Pins, dropped: Sequence[Dropped]) -> AutoparError:
    if not dropped:
        pinned = ", ".join(f"{axis} = {size}" for axis, size in pins.axes.items())
        return AutoparError(
            f"no mesh fills {cluster.devices} devices with {pinned or 'no axis to split over'}: "
            "the product of the axes must be the number of devices"
        )
    reasons = list(dict.fromkeys(f"{d.setting.mesh}: {d.reason}" for d in dropped))
    if len(reasons) == 1:
        return AutoparError(dropped[0].reason)
    listed = "\n  ".join(reasons[:12])
    return AutoparError(f"no mesh of {cluster.devices} devices is legal:\n  {listed}")


def _nothing_fits(tried: Sequence[Tried], options: SearchOptions) -> AutoparError:
    """The smallest program of all settings: those that may need least are looked at first."""
    limit_bytes = options.limit_bytes
    short: list[tuple[int, Tried]] = []
    queue = [
        (t.result.short_bytes, i, t)
        for i, t in enumerate(tried)
        if isinstance(t.result, Infeasible) and not t.result.impossible
    ]
    for at_least, _, each in sorted(queue, key=lambda entry: entry[:2]):
        if short and at_least >= min(size for size, _ in short):
            break
        done = shortage(each, options)
        assert isinstance(done.result, Infeasible)
        if not done.result.impossible:
            short.append((done.result.short_bytes, done))
    if not short:
        return AutoparError("no choice of layouts is possible on any mesh")
    least, one = min(short, key=lambda pair: pair[0])
    setting = one.outer.asked
    need = limit_bytes + least
    return InfeasibleError(
        f"nothing fits into {limit_bytes:,} bytes ({size(limit_bytes)}) a device: the smallest "
        f"plan, on {setting.mesh} with {setting.microbatches} microbatches, needs {need:,} bytes "
        f"({size(need)}), short by {least:,} ({size(least)}). Give more memory or more devices, a "
        "smaller batch, or lift a pin",
        least,
        setting,
    )

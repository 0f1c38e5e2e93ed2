"""One outer candidate: its regions' candidates, or the reason why it can't run."""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.layout import Setting
from autopar.layouts.program import group_of
from autopar.mesh import split_size
from autopar.planning.annotate import Candidates, annotate, is_balanced
from autopar.planning.full_shards import one_full_shard
from autopar.planning.idle_axes import turned_off, unused
from autopar.planning.legal import dropout_fault
from autopar.planning.pins import Pins, matches
from autopar.planning.price import RegionCandidates, SlotKey
from autopar.planning.refine_mesh import refined_choices
from autopar.planning.schedules import owner_of
from autopar.planning.together import whole_layers
from autopar.plugin import Strategy


@dataclass(frozen=True)
class Outer:
    """A setting with what every region may do on it. `asked` is the setting as enumerated;
    `setting` has the axes cut where a candidate splits over a factor of one."""

    asked: Setting
    setting: Setting
    candidates: RegionCandidates


@dataclass(frozen=True)
class Dropped:
    """A setting that can't run, and why. `pin`: a pin is what can't be satisfied."""

    setting: Setting
    reason: str


def open_setting(
    model: ModelGraph,
    setting: Setting,
    strategies: Sequence[Strategy],
    pins: Pins,
    inseparable: str | None,
) -> Outer | Dropped:
    """The candidates of every region on a setting, or why there is no legal program on it.

    `inseparable`: why the loss is no sum over microbatches, or None where it is.
    """
    regions = [region for block in model.blocks for region in block.regions]
    reasons = (strategy.misfit(regions, setting.mesh) for strategy in strategies)
    reason = misfit(model, setting, inseparable) or next(filter(None, reasons), None)
    if reason is not None:
        return Dropped(setting, reason)
    found = region_candidates(model, setting, strategies, pins)
    unique = {id(one): one for one in found.values()}.values()
    owner = owner_of(setting.schedule, strategies)
    reason = turned_off(found, model.region_paths, setting, strategies, pins)
    reason = reason or _unmet(found, model.region_paths, setting, pins, owner)
    reason = reason or unused(found, setting, strategies)
    reason = reason or _dropping(unique, setting) or _gathered(found)
    if reason is not None:
        return Dropped(setting, reason)
    choices = {key: one.choices for key, one in found.items()}
    finer, refined = refined_choices(setting, choices)
    kept = one_full_shard(refined)
    if isinstance(kept, str):
        return Dropped(setting, kept)
    whole = whole_layers(kept, functools.partial(group_of, model))
    if isinstance(whole, str):
        return Dropped(setting, whole)
    return Outer(setting, finer, whole)


def region_candidates(
    model: ModelGraph, setting: Setting, strategies: Sequence[Strategy], pins: Pins
) -> dict[SlotKey, Candidates]:
    """What every region may do on a setting; alike layers share theirs."""
    cache: dict[tuple[object, ...], Candidates] = {}
    found: dict[SlotKey, Candidates] = {}
    everywhere = pins.of(())
    for path, block in model.instances():
        for region in block.regions:
            paths = model.region_paths[path, region.name]
            of_region = pins.of(paths) if pins.layers else everywhere
            pinned = repr(sorted(of_region.items())) if pins.layers else ""
            key = (id(block), region.name, pinned)
            if key not in cache:
                cache[key] = annotate(block, region, strategies, setting, of_region)
            found[path, region.name] = cache[key]
    return found


def with_schedule(outer: Outer, asked: Setting) -> Outer:
    """The same candidates under another schedule."""
    setting = replace(outer.setting, schedule=asked.schedule)
    return replace(outer, asked=asked, setting=setting)


def pointless(
    model: ModelGraph, setting: Setting, strategies: Sequence[Strategy], pinned: Collection[str]
) -> bool:
    """Whether an axis would have nothing to do on this model, and nobody asked for it."""
    regions = [region for block in model.blocks for region in block.regions]
    return any(
        strategy.misfit(regions, setting.mesh) is not None
        for strategy in strategies
        if not any(axis.name in pinned for axis in strategy.axes())
    )


def misfit(model: ModelGraph, setting: Setting, inseparable: str | None) -> str | None:
    """Why a model can't run on a setting whatever its regions do, or None."""
    pieces = split_size(setting.data) * setting.microbatches
    if model.batch_size % pieces:
        axes = " · ".join(f"{part.axis} {part.size}" for part in setting.data) or "one data rank"
        return (
            f"the batch of {model.batch_size} samples isn't divisible by {pieces} ({axes}, "
            f"{setting.microbatches} microbatches)"
        )
    if pieces > 1 and model.mixing:
        return (
            f"the batch can't be split into {pieces}: {'; '.join(model.mixing[:3])}. Compute it "
            "outside the model and the loss, and pass it in the batch"
        )
    if split_size(setting.data) > 1 and model.drawing:
        return (
            f"ranks that share the batch would draw different random numbers for {model.drawing[0]}"
            ". Draw them outside the model and pass them in the batch, or keep dp at 1"
        )
    if split_size(setting.data) > 1 and model.shared_dropout:
        return (
            f"ranks that share the batch would draw different masks for {model.shared_dropout[0]}, "
            "which is the same for all samples: drop what carries the batch instead (after the "
            "samples are added, say), or keep dp at 1"
        )
    if setting.schedule is not None and model.drawing:
        return (
            f"stages would draw different random numbers for {model.drawing[0]}. Draw them outside "
            f"the model and pass them in the batch, or keep {setting.schedule.axis} at 1"
        )
    if setting.microbatches > 1 and inseparable is not None:
        return f"{setting.microbatches} microbatches: {inseparable}"
    return None


def check_layers(model: ModelGraph, pins: Pins) -> None:
    """Errors: AutoparError for a glob of layers that names no module of the model."""
    paths = {path: None for found in model.region_paths.values() for path in found}
    for glob, _ in pins.layers:
        if not matches(glob, paths):
            raise AutoparError(
                f"pin layers[{glob!r}] names no module with ops of its own; there are, for "
                f"example, {', '.join(list(paths)[-6:])}"
            )


def _unmet(
    found: Mapping[SlotKey, Candidates],
    paths: Mapping[SlotKey, tuple[str, ...]],
    setting: Setting,
    pins: Pins,
    owner: str | None,
) -> str | None:
    """Which strategy is pinned on, but legal in none of the regions that its pin is for. `owner`:
    that of the setting's schedule, which is in use."""
    on = [name for name, pin in sorted(pins.strategies.items()) if pin is not False]
    asked = [("", name) for name in on if name != owner]
    asked += [(g, n) for g, p in pins.layers for n, pin in sorted(p.items()) if pin is not False]
    for glob, name in asked:
        meant = [
            candidates
            for key, candidates in found.items()
            if (not glob or matches(glob, paths[key])) and pins.of(paths[key])[name] is not False
        ]
        if meant and not any(c.options(name) is not None for f in meant for c in f.choices):
            refusals: dict[str, None] = {}
            for candidates in meant:
                refusals.update(dict.fromkeys(candidates.refusals.get(name, ())))
            why = "; ".join(list(refusals)[:8]) or "it has nothing to do on this mesh"
            where = f" of layers[{glob!r}]" if glob else ""
            return f"{name!r} is pinned, but legal in no region{where} on {setting.mesh}: {why}"
    return None


def _dropping(found: Collection[Candidates], setting: Setting) -> str | None:
    faults = (dropout_fault(c, f.region, setting) for f in found for c in f.choices)
    return next((f"a region {fault}" for fault in faults if fault), None)


def _gathered(found: Mapping[SlotKey, Candidates]) -> str | None:
    """Why sequences can't be split in balanced chunks, if a region can do so and attention can't:
    every rank would gather them whole, and do all of its work."""
    unique = {id(one): one for one in found.values()}
    each = {key: any(map(is_balanced, one.choices)) for key, one in unique.items()}
    balanced = {key: each[id(one)] for key, one in found.items()}
    if not any(balanced.values()):
        return None
    refusals: dict[str, None] = {}
    for key, one in found.items():
        if one.region.attention and not balanced[key]:
            for reasons in one.refusals.values():
                refusals.update(dict.fromkeys(reasons))
    return "; ".join(list(refusals)[:8]) or None

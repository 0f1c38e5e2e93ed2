"""The axes that an outline leaves out: ranks along them do what as many more microbatches do."""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

from autopar.graph.model_graph import ModelGraph
from autopar.layouts.layout import Setting
from autopar.mesh import Mesh, split_size
from autopar.planning.meshes import axes_in_order
from autopar.planning.outer import region_candidates
from autopar.planning.pins import Pins
from autopar.planning.price import SlotKey
from autopar.plugin import Candidate, Strategy

OF_OPS = ("dims", "recompute")
"""The tiers on which it depends what ops do."""


def plain_axes(
    model: ModelGraph, strategies: Sequence[Strategy], pins: Pins, size: int
) -> frozenset[str]:
    """The axes over which regions split samples and nothing else, and whose absence forbids no
    region anything: tried alone, with each other axis, and with all, each of this size."""
    axes = axes_in_order(strategies) if size > 1 else ()
    names = [axis.name for axis in axes if not axis.splits_layers]
    on = functools.cache(lambda setting: candidates_of(model, setting, strategies, pins))

    def is_plain(name: str, present: frozenset[str]) -> bool:
        mesh = Mesh(tuple((axis.name, size if axis.name in present else 1) for axis in axes))
        data = tuple(mesh.part(a.name) for a in axes if a.splits_batch and a.name in present)
        if model.batch_size % split_size(data):
            return True  # no setting has so many pieces
        setting = Setting(mesh, data, 1)
        seen, left = on(setting), on(without(setting, {name}))
        return all(_is_plain(name, seen[key], left[key]) for key in seen)

    found = set()
    for name in (axis.name for axis in axes if axis.splits_batch):
        beside = dict.fromkeys([frozenset({name}), *(frozenset({name, x}) for x in names)])
        if all(is_plain(name, present) for present in [*beside, frozenset(names)]):
            found.add(name)
    return frozenset(found)


def _is_plain(axis: str, seen: Iterable[Candidate], left: Iterable[Candidate]) -> bool:
    """Whether all that a region may do it may do without the axis as well, but for samples."""
    without = {(c.splits, c.forms, c.recompute) for c in left}
    for candidate in seen:
        splits = []
        for dim, split in candidate.splits:
            kept = tuple(part for part in split if part.axis != axis)
            if kept != split and dim != "batch":
                return False
            splits += [(dim, kept)] if kept else []
        if (tuple(splits), candidate.forms, candidate.recompute) not in without:
            return False
    return True


def without(setting: Setting, axes: Collection[str | None]) -> Setting:
    """The setting with these axes at size 1, and as many more microbatches as they split samples
    into."""
    mesh = Mesh(tuple((a, 1 if a in axes else size) for a, size in setting.mesh.axes))
    gone = tuple(part for part in setting.data if part.axis in axes)
    data = tuple(part for part in setting.data if part.axis not in axes)
    return Setting(mesh, data, setting.microbatches * split_size(gone))


def candidates_of(
    model: ModelGraph,
    setting: Setting,
    strategies: Sequence[Strategy],
    pins: Pins,
    tiers: Collection[str] = OF_OPS,
) -> Mapping[SlotKey, tuple[Candidate, ...]]:
    """What regions may do on a setting by strategies of some tiers: by default, all but how
    parameters live."""
    members = [strategy for strategy in strategies if strategy.tier in tiers]
    found = region_candidates(model, setting, members, pins)
    return {key: one.choices for key, one in found.items()}

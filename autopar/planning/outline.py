"""The outline of a setting: the same without data parallelism and without what its parameters cost.

An axis is *plain* if regions split nothing but samples over it, and may do all else without it.
Ranks along it do what as many more microbatches do, so in an outline they are microbatches;
parameters are left out: their gathers and reductions, their optimizer, their bytes. What is left is
part of what every program of the setting pays. Many settings share an outline: it is priced once
for all of them, and what its layers take at least with a setting's schedule and memory is a bound
before the setting is opened.
"""

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.graph.model_graph import ModelGraph
from autopar.layouts.layout import Setting
from autopar.layouts.state_ratio import StateRatio
from autopar.mesh import Mesh, split_size
from autopar.planning.anywhere import Anywhere
from autopar.planning.layered import Layered
from autopar.planning.meshes import axes_in_order
from autopar.planning.outer import region_candidates
from autopar.planning.pins import Pins
from autopar.planning.price import Pricer, SlotKey
from autopar.planning.refine_mesh import refined_choices
from autopar.planning.relaxed import relaxed
from autopar.planning.schedules import layer_axis
from autopar.planning.tried import least_of
from autopar.planning.whole_price import whole_problem
from autopar.planning.works import Works
from autopar.plugin import Candidate, Strategy

TIERS = ("dims", "recompute")


@dataclass
class Outlines:
    """The outlines of a model's settings that are priced so far. `works`: shared with settings."""

    model: ModelGraph
    strategies: Sequence[Strategy]
    pins: Pins
    works: Works
    state_ratio: StateRatio
    plain: frozenset[str]
    priced: dict[Setting, Pricer | None] = field(default_factory=dict)
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    """Of each in `sizes` (axes, microbatches), the seconds of a batch at least, of all its ranks
    together."""

    @cached_property
    def layers(self) -> str | None:
        """The axis that layers are split over."""
        found = layer_axis(self.strategies)
        return None if found is None else found[0]

    def of(self, setting: Setting) -> Setting:
        """A setting's outline: plain axes, and that of the layers, have size 1."""
        return _without(setting, {*self.plain, self.layers})

    def _plain_size(self, setting: Setting) -> int:
        return split_size(tuple(part for part in setting.data if part.axis in self.plain))

    def least_s(self, setting: Setting) -> float:
        """Seconds of a microbatch of a setting that no program beats, of all stages together: what
        is known of its outline, or of those that cut the same work into fewer pieces."""
        if not self.sizes:
            return 0.0
        outline = self.of(setting)
        own = np.array(_sizes(outline))
        coarser = (own % np.array(self.sizes) == 0).all(axis=1)
        most_s = float(np.array(self.whole_s)[coarser].max(initial=0.0))
        return most_s / (outline.mesh.world * outline.microbatches)

    def is_priced(self, setting: Setting) -> bool:
        """Whether the setting's own outline is."""
        return self.of(setting) in self.priced

    def price(self, setting: Setting) -> None:
        """Prices the setting's outline."""
        outline = self.of(setting)
        pricer = self._pricer(outline)
        self.priced[outline] = pricer
        if pricer is not None:
            layered = Layered(pricer)
            each_s = least_of(layered)[0] if layered.is_possible else math.inf
            self.sizes.append(_sizes(outline))
            self.whole_s.append(each_s * outline.microbatches * outline.mesh.world)

    def bound_s(self, setting: Setting, limit_bytes: int, solver: str) -> float:
        """Seconds that no program of the setting beats, with its schedule and the memory that
        activations need (inf where they don't fit), by its outline's prices."""
        pricer = self.priced[self.of(setting)]
        if pricer is None:
            return 0.0
        if setting.schedule is None:
            low = relaxed(whole_problem(Layered(pricer), limit_bytes), solver)
            return low.bound_s / self._plain_size(setting)
        return Anywhere(Layered(self._staged(pricer, setting)), limit_bytes).bound(solver)

    def _staged(self, pricer: Pricer, setting: Setting) -> Pricer:
        """An outline's prices with a setting's stages."""
        sizes = dict(pricer.setting.mesh.axes)
        sizes |= {axis: size for axis, size in setting.mesh.axes if axis == self.layers}
        mesh = Mesh(tuple(sizes.items()))
        own = replace(pricer.setting, mesh=mesh, schedule=setting.schedule)
        prices = pricer.prices.on(mesh)
        return replace(pricer, setting=own, prices=prices, parts={}, weighed={})

    def _pricer(self, outline: Setting) -> Pricer | None:
        if self.model.batch_size % (outline.microbatches * split_size(outline.data)):
            return None
        found = candidates_of(self.model, outline, self.strategies, self.pins)
        if not all(found.values()):
            return None
        setting, refined = refined_choices(outline, found)
        prices = self.works.prices.on(setting.mesh)
        args = (self.model, setting, prices, refined, self.state_ratio, self.works)
        return Pricer(*args, with_params=False)


def _sizes(outline: Setting) -> tuple[int, ...]:
    return (*(size for _, size in outline.mesh.axes), outline.microbatches)


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
        seen, left = on(setting), on(_without(setting, {name}))
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


def _without(setting: Setting, axes: Collection[str | None]) -> Setting:
    """The setting with these axes at size 1, and as many more microbatches as they split samples
    into."""
    mesh = Mesh(tuple((a, 1 if a in axes else size) for a, size in setting.mesh.axes))
    gone = tuple(part for part in setting.data if part.axis in axes)
    data = tuple(part for part in setting.data if part.axis not in axes)
    return Setting(mesh, data, setting.microbatches * split_size(gone))


def candidates_of(
    model: ModelGraph, setting: Setting, strategies: Sequence[Strategy], pins: Pins
) -> Mapping[SlotKey, tuple[Candidate, ...]]:
    """What regions may do on a setting, but for how parameters live."""
    members = [strategy for strategy in strategies if strategy.tier in TIERS]
    found = region_candidates(model, setting, members, pins)
    return {key: one.choices for key, one in found.items()}

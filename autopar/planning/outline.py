"""The outline of a setting: the same without data parallelism and without what its parameters cost.

An axis is *plain* if regions split nothing but samples over it, and may do all else without it.
Ranks along it do what as many more microbatches do, so in an outline they are microbatches;
parameters are left out: their gathers and reductions, their optimizer, their bytes. What is left is
part of what every program of the setting pays. Many settings share an outline: it is priced once
for all of them, and what its layers take at least with a setting's schedule and memory is a bound
before the setting is opened.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.graph.model_graph import ModelGraph
from autopar.layouts.layout import Setting
from autopar.layouts.state_ratio import StateRatio
from autopar.mesh import Mesh, Split, split_size
from autopar.planning.anywhere import Anywhere
from autopar.planning.kinds import Kind
from autopar.planning.layered import Layered
from autopar.planning.loose import Multipliers
from autopar.planning.outline_params import ParamFronts
from autopar.planning.pins import Pins
from autopar.planning.plain_axes import candidates_of, without
from autopar.planning.price import Pricer, RegionCandidates, SlotKey
from autopar.planning.refine_mesh import refined_choices
from autopar.planning.relaxed import relaxed
from autopar.planning.schedules import layer_axis
from autopar.planning.tried import least_of
from autopar.planning.whole_price import whole_problem
from autopar.planning.works import Works
from autopar.plugin import Candidate, Strategy


@dataclass
class Outlines:
    """The outlines of a model's settings that are priced so far. `works`: shared with settings."""

    model: ModelGraph
    strategies: Sequence[Strategy]
    pins: Pins
    works: Works
    state_ratio: StateRatio
    plain: frozenset[str]
    params: ParamFronts
    priced: dict[Setting, Pricer | None] = field(default_factory=dict)
    least: list[tuple[float, Mesh, int]] = field(default_factory=list)
    """In the order in which they were priced: seconds of a batch at least, of all ranks of an
    outline together; its mesh and microbatches."""
    asked: dict[tuple[Mesh, int], tuple[int, float]] = field(default_factory=dict)
    """By an outline's mesh and microbatches, how many of `least` were compared, and the most that
    they say of it."""
    multipliers: dict[Hashable, Multipliers] = field(default_factory=dict)
    """By form of a setting, those of the last that was bounded."""
    whole: set[Mesh] = field(default_factory=set)
    """The meshes on which the whole batch in one microbatch is priced."""
    ways: dict[Mesh, frozenset[Hashable]] = field(default_factory=dict)
    """What regions may do on an outline's mesh."""
    coarser: dict[tuple[Mesh, Mesh], bool] = field(default_factory=dict)
    typed: dict[Mesh, tuple[Mapping[SlotKey, tuple[Candidate, ...]], Pricer]] = field(
        default_factory=dict
    )
    """What regions may do on a mesh, with their layouts: the same for most numbers of
    microbatches."""

    @cached_property
    def layers(self) -> str | None:
        """The axis that layers are split over."""
        found = layer_axis(self.strategies)
        return None if found is None else found[0]

    def of(self, setting: Setting) -> Setting:
        """A setting's outline: plain axes, and that of the layers, have size 1."""
        return without(setting, {*self.plain, self.layers})

    def _plain_size(self, setting: Setting) -> int:
        return split_size(tuple(part for part in setting.data if part.axis in self.plain))

    def least_s(self, setting: Setting) -> float:
        """Seconds of a microbatch of a setting that no program beats, of all stages together: what
        is known of its outline, or of those that cut the same work into fewer pieces."""
        outline = self.of(setting)
        mesh, microbatches = outline.mesh, outline.microbatches
        compared, most_s = self.asked.get((mesh, microbatches), (0, 0.0))
        for whole_s, other, fewer in self.least[compared:]:
            # What says no more needn't be compared.
            if whole_s > most_s and microbatches % fewer == 0 and self._cuts_more(outline, other):
                most_s = whole_s
        self.asked[mesh, microbatches] = len(self.least), most_s
        return most_s / (mesh.world * microbatches)

    def _cuts_more(self, outline: Setting, other: Mesh) -> bool:
        """Whether an outline's mesh cuts work into more pieces than another, in no way that the
        other doesn't have: what some sizes forbid, larger ones may allow."""
        pair = outline.mesh, other
        if pair not in self.coarser:
            sizes = dict(other.axes)
            divides = all(size % sizes[axis] == 0 for axis, size in outline.mesh.axes)
            self.coarser[pair] = divides and self._ways(outline) <= self.ways[other]
        return self.coarser[pair]

    def _ways(self, outline: Setting) -> frozenset[Hashable]:
        """What regions may do on an outline's mesh, with the whole batch in one microbatch."""
        if outline.mesh not in self.ways:
            found = self._candidates(replace(outline, microbatches=1))
            # Alike layers share theirs: the first stands for all.
            firsts = {id(found[key]): key for key in reversed(list(found))}
            self.ways[outline.mesh] = frozenset(
                (key, _way(candidate)) for key in firsts.values() for candidate in found[key]
            )
        return self.ways[outline.mesh]

    def _candidates(self, outline: Setting) -> Mapping[SlotKey, tuple[Candidate, ...]]:
        return candidates_of(self.model, outline, self.strategies, self.pins)

    def is_priced(self, setting: Setting) -> bool:
        """Whether the setting's own outline is."""
        return self.of(setting) in self.priced

    def is_begun(self, setting: Setting) -> bool:
        """Whether something on its mesh is."""
        return self.of(setting).mesh in self.whole

    def price(self, setting: Setting) -> None:
        """Prices the setting's outline. If nothing is known of its mesh, first the whole batch in
        one microbatch: that bounds all others on the mesh, and on finer ones."""
        outline = self.of(setting)
        if outline.mesh not in self.whole:
            self.whole.add(outline.mesh)
            outline = replace(outline, microbatches=1)
            pricer = self._whole(outline)
        else:
            pricer = self.priced[outline] = self._pricer(outline)
        if pricer is not None:
            self._ways(outline)
            layered = Layered(pricer)
            each_s = least_of(layered)[0] if layered.is_possible else math.inf
            whole_s = each_s * outline.microbatches * outline.mesh.world
            self.least.append((whole_s, outline.mesh, outline.microbatches))

    def bound_s(self, setting: Setting, limit_bytes: int, solver: str) -> float:
        """Seconds that no program of the setting beats, with its schedule and the memory that
        activations need (inf where they don't fit), by its outline's prices."""
        pricer = self.priced[self.of(setting)]
        if pricer is None:
            return 0.0
        if setting.schedule is None:
            # Of so many ranks' microbatches, one after the other.
            size = self._plain_size(setting)
            whole = self._with_params(pricer, setting, size)
            return relaxed(whole_problem(whole, limit_bytes), solver).bound_s / size
        anywhere = self._anywhere(pricer, setting, limit_bytes)
        bound_s, found = anywhere.bound(solver), anywhere.relaxed(solver)
        if found is not None:
            self.multipliers[found.by.form] = found.by
        return bound_s

    def rough_s(self, setting: Setting, limit_bytes: int) -> float:
        """As `bound_s`, at once: by the multipliers of the last setting with as many parts (0 where
        there was none)."""
        pricer = self.priced[self.of(setting)]
        if pricer is None or setting.schedule is None:
            return 0.0
        return self._anywhere(pricer, setting, limit_bytes).bound_by(self.multipliers)

    def _anywhere(self, pricer: Pricer, setting: Setting, limit_bytes: int) -> Anywhere:
        return Anywhere(self._with_params(self._staged(pricer, setting), setting), limit_bytes)

    def _with_params(self, pricer: Pricer, setting: Setting, steps: int = 1) -> Layered:
        """An outline's layers beside what their parameters come to under a setting, which pays so
        often what it pays once a step."""
        layered, fronts = Layered(pricer), self.params.of(setting)
        kinds: dict[int, Kind] = {}
        for path, kind in layered.kinds.items():  # alike layers have alike parameters
            if id(kind) not in kinds:
                kinds[id(kind)] = kind.beside(fronts[path] * [1, steps, 1, 1, 1, 1])
        return layered.with_kinds(kinds)

    def _staged(self, pricer: Pricer, setting: Setting) -> Pricer:
        """An outline's prices with a setting's stages."""
        sizes = dict(pricer.setting.mesh.axes)
        sizes |= {axis: size for axis, size in setting.mesh.axes if axis == self.layers}
        mesh = Mesh(tuple(sizes.items()))
        own = replace(pricer.setting, mesh=mesh, schedule=setting.schedule)
        prices = pricer.prices.on(mesh)
        return replace(pricer, setting=own, prices=prices, weighed={})

    def _whole(self, outline: Setting) -> Pricer | None:
        """Of the whole batch seconds alone matter."""
        if self.model.batch_size % split_size(outline.data):
            return None
        found = _running_once(self._candidates(outline))
        return self._made(outline, found) if all(found.values()) else None

    def _pricer(self, outline: Setting) -> Pricer | None:
        if self.model.batch_size % (outline.microbatches * split_size(outline.data)):
            return None
        found = self._candidates(outline)
        if not all(found.values()):
            return None
        known, pricer = self.typed.get(outline.mesh, (None, None))
        if pricer is not None and known == found:
            return pricer.sized(outline.microbatches)
        pricer = self._made(outline, found)
        self.typed[outline.mesh] = found, pricer
        return pricer

    def _made(self, outline: Setting, found: RegionCandidates) -> Pricer:
        setting, refined = refined_choices(outline, found)
        prices = self.works.prices.on(setting.mesh)
        args = (self.model, setting, prices, refined, self.state_ratio, self.works)
        return Pricer(*args, with_params=False)


def _running_once(found: RegionCandidates) -> RegionCandidates:
    """Without what runs again, which is never faster; regions that share candidates still do."""
    unique = {id(one): one for one in found.values()}
    once = {k: tuple(c for c in one if c.recompute is None) for k, one in unique.items()}
    return {key: once[id(one)] for key, one in found.items()} if all(once.values()) else found


def _way(candidate: Candidate) -> Hashable:
    """What a candidate does, on however many ranks."""
    splits = tuple((dim, _axes(split)) for dim, split in candidate.splits)
    forms = tuple(
        (form.op, form.function, tuple((*dims, _axes(split)) for *dims, split in form.moves))
        for form in candidate.forms
    )
    return splits, forms, candidate.recompute


def _axes(split: Split) -> tuple[str, ...]:
    return tuple(part.axis for part in split)

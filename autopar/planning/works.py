"""What a region's ops come to on one rank, worked out once for all settings where it is the same.

Most settings of a search have the same local sizes as another one: 4 data ranks with 2 microbatches
each run what 8 data ranks run in one. So a setting is reduced to its likeness, where each axis that
splits the batch, and nothing else, is as small as it can be and microbatches make up for it.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.graph.model_graph import Block
from autopar.layouts.again import Running, running_effects
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.saved import Held, met
from autopar.layouts.stages import Cut, Here, make_cut
from autopar.layouts.typing import RegionTyping, type_region
from autopar.mesh import AxisPart, Mesh, Split
from autopar.planning.prices import Bill, Prices
from autopar.planning.region_effects import held_here, ops_here, other_effects, param_layouts
from autopar.planning.skeleton_parts import SkeletonParts
from autopar.planning.spans import Runs, runs_of
from autopar.plugin import Candidate, Collective, Compute, Effect, Resident

Key = tuple[object, ...]


@dataclass(frozen=True)
class Work:
    """Of one microbatch of a region's ops: the device's and the host's seconds by window and bytes,
    without their collectives, which depend on the links that an axis spans; those; and the layouts
    in which its parameters lie."""

    spent: tuple[tuple[str, float, float], ...]
    held: Bill
    collectives: tuple[Collective, ...]
    params: Mapping[str, Layout]


@dataclass(frozen=True)
class Once:
    """What a region's ops do if each runs once: by op, in sum and as collectives."""

    running: Running
    spent: Mapping[str, tuple[float, float]]
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Likeness:
    """A setting's reduced form; `sizes` has the mesh's own sizes of the axes that were reduced."""

    setting: Setting
    sizes: Mapping[str, int]

    def of_candidate(self, candidate: Candidate) -> Candidate | None:
        """The candidate's splits on the reduced mesh, and what runs again; None where it splits
        over a reduced axis something else than the batch over all of them."""
        splits = []
        for dim, split in candidate.splits:
            mine = [part for part in split if part.axis in self.sizes]
            if mine and (dim != "batch" or len(mine) != len(self.sizes)):
                return None
            splits.append((dim, resized(split, self.setting.mesh)))
        if self.sizes and not any(dim == "batch" for dim, _ in splits):
            return None
        if any(part.axis in self.sizes for form in candidate.forms for part in form.axes):
            return None
        return replace(bare(candidate), splits=tuple(splits))


def likeness(setting: Setting) -> Likeness:
    """The reduced form of a setting."""
    sizes = {part.axis: part.size for part in setting.data}
    least = {axis: least_factor(size) for axis, size in sizes.items()}
    mesh = Mesh(tuple((axis, least.get(axis, size)) for axis, size in setting.mesh.axes))
    microbatches = setting.microbatches
    for axis, size in sizes.items():
        microbatches *= size // least[axis]
    reduced = Setting(mesh, resized(setting.data, mesh), microbatches)
    return Likeness(reduced, sizes)


def least_factor(size: int) -> int:
    """The least factor above 1, of 1 itself."""
    return next((n for n in range(2, size + 1) if size % n == 0), size)


def resized(split: Iterable[AxisPart], mesh: Mesh) -> Split:
    """The parts, whole axes all, as another mesh has them."""
    return tuple(replace(part, size=mesh.size(part.axis)) for part in split)


@dataclass(frozen=True)
class Works:
    """The works of one model's regions, by what they depend on; shared by all settings. `prices`:
    of any mesh."""

    prices: Prices
    typings: dict[Key, RegionTyping] = field(default_factory=dict)
    once: dict[Key, Once] = field(default_factory=dict)
    works: dict[Key, Work] = field(default_factory=dict)
    bare: dict[Candidate, Candidate] = field(default_factory=dict)
    fixed: dict[tuple[int, AxisPart], tuple[Here, ...]] = field(default_factory=dict)
    runs: dict[tuple[int, ...], Runs] = field(default_factory=dict)
    parts: SkeletonParts = field(default_factory=SkeletonParts)

    def runs_of(self, kinds: tuple[int, ...]) -> Runs:
        """The runs of layers of these kinds: the same for most settings."""
        if kinds not in self.runs:
            self.runs[kinds] = runs_of(kinds)
        return self.runs[kinds]

    def fixed_heres(
        self, skeleton: Block, layers: int, parts: int, axis: AxisPart
    ) -> tuple[Here, ...]:
        """The skeleton as each of some parts has it wherever its layers are cut."""
        if (parts, axis) not in self.fixed:
            rest = layers - parts + 1
            early = make_cut(skeleton, [*([1] * (parts - 1)), rest])
            late = make_cut(skeleton, [rest, *([1] * (parts - 1))])
            same = {n: p for n, p in early.parts.items() if late.parts.get(n) == p}
            cut = Cut(((),) * parts, same, ())
            self.fixed[parts, axis] = tuple(Here(cut, part, axis) for part in range(parts))
        return self.fixed[parts, axis]

    def only(self, candidate: Candidate) -> Candidate:
        """The candidate bare."""
        if candidate not in self.bare:
            self.bare[candidate] = bare(candidate)
        return self.bare[candidate]

    def typing(self, block: Block, candidate: Candidate) -> RegionTyping:
        """The layouts of a candidate's region, which its splits and forms decide."""
        return replace(self.layouts(block, candidate), candidate=candidate)

    def layouts(self, block: Block, candidate: Candidate) -> RegionTyping:
        """The same of the candidate without how its parameters live and what runs again."""
        key = (id(block), candidate.region, candidate.splits, candidate.forms)
        if key not in self.typings:
            self.typings[key] = type_region(block, replace(bare(candidate), recompute=None))
        return self.typings[key]

    def of(
        self,
        block: Block,
        candidate: Candidate,
        setting: Setting,
        alike: Likeness,
        path: str,
        group: tuple[str, ...],
        here: Here | None,
        place: tuple[Hashable, ...],
    ) -> Work:
        """The work of a bare candidate's region in the layer `path`, of a `group`. `place`: what
        of these three it depends on, first of `here`."""
        reduced = alike.of_candidate(candidate)
        if reduced is not None:
            work = self._work(block, reduced, alike.setting, path, group, here, place)
            if not any(p.axis in alike.sizes for c in work.collectives for p in c.axes):
                return _on(work, setting.mesh)
        return self._work(block, candidate, setting, path, group, here, place)

    def _work(
        self,
        block: Block,
        only: Candidate,
        setting: Setting,
        path: str,
        group: tuple[str, ...],
        here: Here | None,
        place: tuple[Hashable, ...],
    ) -> Work:
        key = (id(block), only, setting.data, setting.microbatches, place)
        if key not in self.works:
            typing = self.typing(block, only)
            once = self._once(block, typing, setting, here, place[0])
            found = held_here(block, typing, setting, path, group, here)
            args = (block, typing, once.running, found, setting, path, group, here)
            effects = list(other_effects(*args))
            again = self._spent(effects, once.spent)
            self.works[key] = Work(
                tuple((name, *seconds) for name, seconds in again.items()),
                self._held(block, found, effects),
                (*once.collectives, *(e for e in effects if isinstance(e, Collective))),
                param_layouts(block, typing),
            )
        return self.works[key]

    def _held(self, block: Block, found: Held, effects: Iterable[Effect]) -> Bill:
        """Bytes, and what of them is kept by others too."""
        bill = self.prices.bill((e for e in effects if isinstance(e, Resident)), 1)
        kept = {
            one: math.ceil(self.prices.cost(Resident("saved", size)))
            for one, size in met(block, found.kept).items()
        }
        return replace(bill, kept=kept, shared=frozenset(name for name, _ in found.kept.shared))

    def _once(
        self,
        block: Block,
        typing: RegionTyping,
        setting: Setting,
        here: Here | None,
        part: Hashable,
    ) -> Once:
        """What a region's ops do if each runs once, whatever runs again."""
        only = typing.candidate
        size = setting.data, setting.microbatches
        key = (id(block), only.region, only.splits, only.forms, *size, part)
        if key not in self.once:
            running = running_effects(block, ops_here(typing, here), setting)
            effects = list(itertools.chain(*running.values()))
            collectives = tuple(e for e in effects if isinstance(e, Collective))
            self.once[key] = Once(running, self._spent(effects, {}), collectives)
        return self.once[key]

    def _spent(
        self, effects: Iterable[Effect], before: Mapping[str, tuple[float, float]]
    ) -> dict[str, tuple[float, float]]:
        """The device's and the host's seconds by window, on top of others."""
        windows = dict(before)
        for effect in effects:
            if isinstance(effect, Compute):
                device_s, host_s = windows.get(effect.phase, (0.0, 0.0))
                more_s = self.prices.apart(effect)
                windows[effect.phase] = device_s + more_s[0], host_s + more_s[1]
        return windows


def bare(candidate: Candidate) -> Candidate:
    """What of a candidate its ops depend on: not how its parameters live, nor who made it."""
    return replace(candidate, params=(), made_by=())


def _on(work: Work, mesh: Mesh) -> Work:
    """The work with layouts of parameters, and of what is kept, on another mesh."""
    params = {name: _layout_on(layout, mesh) for name, layout in work.params.items()}
    kept = {(name, _layout_on(layout, mesh)): n for (name, layout), n in work.held.kept.items()}
    return replace(work, params=params, held=replace(work.held, kept=kept))


def _layout_on(layout: Layout, mesh: Mesh) -> Layout:
    return replace(
        layout,
        splits=tuple((dim, resized(split, mesh)) for dim, split in layout.splits),
        varying=frozenset(resized(layout.varying, mesh)),
    )

"""What problems with and without stages share: the skeleton's regions are slots, each layer is one,
and its columns are the slot's choices."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.graph.chains import groups
from autopar.graph.model_graph import STREAM
from autopar.layouts.program import Program
from autopar.layouts.stages import Cut, Here
from autopar.planning.joined import Late
from autopar.planning.kinds import Kind, Kinds, late_by_region
from autopar.planning.price import Pricer, SlotKey
from autopar.planning.prices import Bill
from autopar.planning.problem import Cover, Edge, Use
from autopar.planning.together import equal_edge
from autopar.plugin import Candidate, Schedule

LARGE = 2_000


@dataclass(frozen=True)
class Layered:
    """A priced setting by slots: first the skeleton's regions, then the layers, in model order."""

    pricer: Pricer
    given: Mapping[str, Kind] = field(default_factory=dict)
    """The kinds of layers, where they aren't the pricer's."""
    closings: dict[Hashable, tuple[int, int]] = field(default_factory=dict, compare=False)

    @cached_property
    def kinds(self) -> Mapping[str, Kind]:
        """The kind of every layer."""
        return self.given or Kinds(self.pricer).by_path()

    @property
    def schedule(self) -> Schedule:
        """The setting's, which has one."""
        schedule = self.pricer.setting.schedule
        assert schedule is not None
        return schedule

    @property
    def is_large(self) -> bool:
        """Whether proofs take long, with so many columns of all layers together."""
        return sum(len(kind.columns.picks) for kind in self.kinds.values()) > LARGE

    @property
    def every(self) -> list[Kind]:
        """Each kind once."""
        return list({id(kind): kind for kind in self.kinds.values()}.values())

    def with_kinds(self, other: Mapping[int, Kind]) -> "Layered":
        """With other kinds, by the id of those that they stand for."""
        given = {path: other[id(kind)] for path, kind in self.kinds.items()}
        return replace(self, given=given)

    @property
    def is_possible(self) -> bool:
        """Whether every layer has some combination of its regions' choices."""
        return all(kind.columns.picks for kind in self.kinds.values())

    @cached_property
    def skeleton(self) -> tuple[SlotKey, ...]:
        """The skeleton's regions."""
        return tuple(key for key in self.pricer.candidates if key[0] == "")

    @cached_property
    def skeleton_bills(self) -> list[list[Bill]]:
        """By region of the skeleton, what each candidate comes to in all parts together."""
        every = [self.pricer.candidates[key] for key in self.skeleton]
        return [[self.pricer.bill("", one) for one in candidates] for candidates in every]

    @cached_property
    def _most_freed(self) -> tuple[int, int]:
        """What follows the last layer keeps and needs for a moment, and of this the latter, at
        most."""
        every = self.skeleton_bills
        both = sum(max(bill.freed_bytes for bill in bills) for bills in every)
        return both, sum(max(bill.closing_bytes for bill in bills) for bills in every)

    def most_freed_bytes(self, part: int) -> int:
        """What is gone of the bytes of one of the last stage's parts, at most, when its last
        layer's backward begins: of what follows the last layer of all."""
        return self._most_freed[0 if part == self.schedule.brief.parts - 1 else 1]

    @property
    def most_closing_bytes(self) -> int:
        """What the skeleton needs for a moment that layers don't find when they run again, at
        most."""
        return self._most_freed[1]

    def closing_bytes(self, here: Here) -> tuple[int, int]:
        """What the skeleton of a part needs for a moment that layers don't find when they run
        again, at least and at most."""
        alike = self.pricer.part(here)
        if alike not in self.closings:
            every = [self.pricer.candidates[key] for key in self.skeleton]
            rows = [[self.pricer.bill("", c, here).closing_bytes for c in some] for some in every]
            self.closings[alike] = sum(map(min, rows)), sum(map(max, rows))
        return self.closings[alike]

    def skeleton_late(self, here: Here | None = None) -> dict[str, list[Late]]:
        """What the skeleton's joined calls cost beyond their full rate, by region and candidate."""
        key = ("late", self.pricer.part(here), self.pricer.prices.mesh)
        if key not in self.pricer.kinds:
            regions = {region: self.pricer.candidates["", region] for _, region in self.skeleton}
            self.pricer.kinds[key] = late_by_region(self.pricer, "", regions, here)
        found: dict[str, list[Late]] = self.pricer.kinds[key]
        return found

    @cached_property
    def keys(self) -> tuple[SlotKey, ...]:
        """By slot, the region of the skeleton, or the one at the layer's boundary."""
        return (*self.skeleton, *((path, STREAM) for path in self.kinds))

    @cached_property
    def index(self) -> Mapping[SlotKey, int]:
        """The slot of each key."""
        return {key: i for i, key in enumerate(self.keys)}

    def on_columns(self, edge: Edge) -> Edge:
        """An edge between candidates of the slots' regions as one between their choices."""
        return replace(edge, source=self._use(edge.source), uses=tuple(map(self._use, edge.uses)))

    def _use(self, use: Use) -> Use:
        path = self.keys[use.slot][0]
        if not path:
            return use
        return Use(use.slot, tuple(use.layouts[c] for c in self.kinds[path].streams))

    def covers(self) -> tuple[Cover, ...]:
        """Every axis of the mesh is there to be used; that of the stages is."""
        setting = self.pricer.setting
        return tuple(
            Cover(axis, tuple(self._using(key, axis) for key in self.keys))
            for axis, size in setting.mesh.axes
            if size > 1 and (setting.schedule is None or axis != setting.schedule.axis)
        )

    def _using(self, key: SlotKey, axis: str) -> tuple[int, ...]:
        if key[0]:
            return self.kinds[key[0]].using(axis)
        return tuple(i for i, c in enumerate(self.pricer.candidates[key]) if c.uses(axis))

    def group_edges(self, cut: Cut | None = None) -> Iterator[Edge]:
        """Layers that run again together are alike, and lie in one part."""
        sizes = {n for kind in dict.fromkeys(self.kinds.values()) for n in kind.together if n > 1}
        for layers in sorted(sizes):
            for path, group in groups(self.pricer.model, layers).items():
                if path != group[0]:
                    slots = [self.index[one, STREAM] for one in (group[0], path)]
                    apart = cut is not None and len({cut.part_of(one) for one in group}) > 1
                    rows = [
                        [
                            # What differs is forbidden: here, with itself.
                            (facts, place if apart and n == layers else None)
                            for facts, n in zip(kind.groups, kind.together, strict=True)
                        ]
                        for place, kind in enumerate((self.kinds[group[0]], self.kinds[path]))
                    ]
                    yield equal_edge(f"{group[0]}, {path}: run again alike", slots, rows)

    @cached_property
    def inside_groups(self) -> frozenset[int]:
        """Layers, by number, that run again together with the one before whatever is chosen: no
        part begins with one."""
        sizes = {id(kind): frozenset(kind.together) for kind in self.kinds.values()}
        if all(1 in found for found in sizes.values()):
            return frozenset()
        every = {n: groups(self.pricer.model, n) for n in frozenset().union(*sizes.values())}
        found, before = [], ""
        for i, (path, kind) in enumerate(self.kinds.items()):
            if all(before in every[n][path] for n in sizes[id(kind)]):
                found.append(i)
            before = path
        return frozenset(found)

    def program(self, choices: Sequence[int], cut: Cut | None = None) -> Program:
        """One choice a slot as the candidates of all regions."""
        found: dict[str, dict[str, Candidate]] = {"": {}}
        for (path, region), choice in zip(self.keys, choices, strict=True):
            if path:
                found[path] = self.kinds[path].choices(choice)
            else:
                found[""][region] = self.pricer.candidates[path, region][choice]
        # In the model's own order: a plan lists its regions in it.
        ordered: dict[str, dict[str, Candidate]] = {}
        for path, region in self.pricer.candidates:
            ordered.setdefault(path, {})[region] = found[path][region]
        return Program(self.pricer.model, self.pricer.setting, ordered, cut)

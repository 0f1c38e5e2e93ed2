"""The layers of one setting by kind: alike ones share their prices and their columns.

Two layers are alike that are the same block with the same candidates, at the same place in the
groups that run again together.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.graph.model_graph import STREAM
from autopar.layouts.program import group_of
from autopar.layouts.saved import Storage
from autopar.layouts.stages import Here
from autopar.planning.columns import (
    ALONE,
    BRIEF,
    EACH_S,
    HELD,
    ONCE_S,
    RESIDENT,
    TRANSIENT,
    WIDTH,
    Columns,
    Costs,
    Facts,
    Part,
    columns,
)
from autopar.planning.joined import Late, Taken, joined_calls, late_rates, late_seconds
from autopar.planning.kept_edges import kept_by_several, kept_edges
from autopar.planning.pareto import pareto
from autopar.planning.price import Pricer, SlotKey
from autopar.planning.prices import Bill
from autopar.planning.problem import Edge
from autopar.planning.together import alike_in_group, of_layer, together_edges
from autopar.plugin import Candidate

Regions = Mapping[str, tuple[Candidate, ...]]


@dataclass(frozen=True, eq=False)
class Kind:
    """What a layer may do: its regions' candidates, and which of each a column takes."""

    regions: Regions
    columns: Columns

    @cached_property
    def streams(self) -> tuple[int, ...]:
        """For each column, which candidate of the region that owns the layer's boundary."""
        position = list(self.regions).index(STREAM)
        return tuple(picks[position] for picks in self.columns.picks)

    def only(self, kept: NDArray[np.int64]) -> "Kind":
        """With these of its columns."""
        own = self.columns
        seen, picks = tuple(own.seen[c] for c in kept), tuple(own.picks[c] for c in kept)
        return Kind(self.regions, Columns(own.costs[kept], seen, picks))

    def beside(self, front: Costs) -> "Kind":
        """With each of its columns in each way to do something else, for a bound: what is seen of
        a column doesn't tell it from others."""
        own = self.columns
        alone = pareto(own.costs)
        costs = (own.costs[alone][:, None, :] + front[None, :, :]).reshape(-1, front.shape[1])
        kept = pareto(costs)
        picks = tuple(own.picks[alone[k // len(front)]] for k in kept)
        return Kind(self.regions, Columns(costs[kept], (frozenset(),) * len(kept), picks))

    @cached_property
    def groups(self) -> tuple[frozenset[Hashable], ...]:
        """For each column, what all layers of its group must have in common."""
        return tuple(
            frozenset(fact for fact in seen if fact[0] == "group") for seen in self.columns.seen
        )

    @cached_property
    def together(self) -> tuple[int, ...]:
        """For each column, how many layers run again together with this one, itself included."""
        stream = self.regions[STREAM]
        every = [of_layer(stream[choice]) for choice in self.streams]
        return tuple(1 if again is None else again.layers for again in every)

    def using(self, axis: str) -> tuple[int, ...]:
        """The columns that split something over an axis."""
        return self._using.get(axis, ())

    @cached_property
    def sharing(self) -> Mapping[str, frozenset[int]]:
        """By input that layers share, the columns that keep it as it comes."""
        found: dict[str, set[int]] = {}
        for i, seen in enumerate(self.columns.seen):
            for fact in seen:
                if fact[0] == "shares":
                    found.setdefault(str(fact[1]), set()).add(i)
        return {name: frozenset(columns) for name, columns in found.items()}

    @cached_property
    def _using(self) -> Mapping[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for i, seen in enumerate(self.columns.seen):
            for fact in seen:
                if fact[0] == "uses":
                    found.setdefault(str(fact[1]), []).append(i)
        return {axis: tuple(columns) for axis, columns in found.items()}

    def choices(self, column: int) -> dict[str, Candidate]:
        """The candidate of each region."""
        picks = self.columns.picks[column]
        return {
            region: candidates[c]
            for (region, candidates), c in zip(self.regions.items(), picks, strict=True)
        }


@dataclass(frozen=True)
class Kinds:
    """Makes the kinds of a setting's layers."""

    pricer: Pricer

    def by_path(self) -> Mapping[str, Kind]:
        """The kind of every layer, in model order."""
        layers: dict[str, dict[str, tuple[Candidate, ...]]] = {}
        for (path, region), candidates in self.pricer.candidates.items():
            if path:
                layers.setdefault(path, {})[region] = candidates
        found = {}
        for path, regions in layers.items():
            key = self._key(path, regions)
            if key not in self.pricer.kinds:
                self.pricer.kinds[key] = self._kind(path, regions)
            found[path] = self.pricer.kinds[key]
        return found

    def _key(self, path: str, regions: Regions) -> Hashable:
        again = dict.fromkeys(c.recompute for c in regions[STREAM])
        groups = [
            group_of(self.pricer.model, path, Candidate(STREAM, recompute=one)) for one in again
        ]
        places = tuple((len(g), path == g[0], path == g[-1]) for g in groups)
        stages = self.pricer.setting.schedule is not None
        alike = tuple((region, id(choices)) for region, choices in regions.items())
        return id(self.pricer.block(path)), alike, places, stages

    def _kind(self, path: str, regions: Regions) -> Kind:
        index = {(path, region): i for i, region in enumerate(regions)}
        inside_s = inside_seconds(self.pricer, path)
        bills = {
            region: [self.pricer.bill(path, candidate) for candidate in candidates]
            for region, candidates in regions.items()
        }
        kept = [[bill.kept for bill in row] for row in bills.values()]
        several = kept_by_several(kept)
        parts = [
            Part(
                self._costs(bills[region], several, inside_s[path, region]),
                tuple(map(_seen, candidates, bills[region])),
            )
            for region, candidates in regions.items()
        ]
        edges = [
            *crossing_edges(self.pricer, path, index),
            *together_edges(regions),
            *kept_edges(path, kept, several),
        ]
        calls = joined_calls(
            [[bill.units for bill in row] for row in bills.values()], self.pricer.prices.seconds
        )
        return Kind(regions, columns(parts, edges, self._counted(), calls))

    def _counted(self) -> Costs:
        """Without stages only sums of costs count."""
        setting = self.pricer.setting
        if setting.schedule is not None:
            return np.eye(WIDTH)
        sums = np.zeros((5, WIDTH))
        sums[0, [EACH_S, ONCE_S]] = setting.microbatches, 1.0
        sums[1, [RESIDENT, HELD]] = 1.0
        sums[2, TRANSIENT] = sums[3, BRIEF] = sums[4, ALONE] = 1.0
        return sums

    def _costs(
        self, bills: Sequence[Bill], several: frozenset[Storage], inside_s: list[Late]
    ) -> Costs:
        """Without the bytes of what several regions may keep."""
        times, rows = self.pricer.setting.microbatches, []
        for bill, more_s in zip(bills, inside_s, strict=True):
            each_s, once_s = bill.each_s(times) + more_s[0], bill.step_s + more_s[1]
            moment = bill.transient_bytes - bill.alone_bytes, bill.brief_bytes, bill.alone_bytes
            held = bill.held_bytes - sum(n for one, n in bill.kept.items() if one in several)
            rows.append((each_s, once_s, bill.lasting_bytes, held, *moment))
        return np.array(rows)


def inside_seconds(pricer: Pricer, path: str) -> dict[SlotKey, list[Late]]:
    """Seconds of conversions inside each region of a layer, or of the skeleton (""), by
    candidate."""
    out = {
        key: [(0.0, 0.0)] * len(candidates)
        for key, candidates in pricer.candidates.items()
        if key[0] == path
    }
    for name, made, needs in pricer.values(path, pricer.block(path)):
        for need in needs:
            if need[0] == made[0] and made[0] in out:
                more = pricer.inside_s(path, name, made, need)
                out[made[0]] = [
                    (before[0] + now[0], before[1] + now[1])
                    for before, now in zip(out[made[0]], more, strict=True)
                ]
    return out


def late_by_region(
    pricer: Pricer, path: str, regions: Regions, here: Here | None = None
) -> dict[str, list[Late]]:
    """What joined calls of a layer, or of the skeleton (""), cost beyond their full rate, by region
    and candidate."""
    taken = {
        region: [pricer.bill(path, candidate, here).units for candidate in candidates]
        for region, candidates in regions.items()
    }
    rates = late_rates(taken.values(), pricer.prices.seconds)
    return {region: [late_seconds(one, rates) for one in row] for region, row in taken.items()}


def crossing_edges(pricer: Pricer, path: str, index: Mapping[SlotKey, int]) -> Iterator[Edge]:
    """The values of a layer, or of the skeleton (""), that cross between regions; seconds are those
    of a microbatch."""
    block = pricer.block(path)
    for name, made, needs in pricer.values(path, block):
        across = [need for need in needs if need[0] != made[0]]
        edge = pricer.edge(path, block, name, made, across, index)
        if edge is not None:
            yield edge


def taken_in(
    pricer: Pricer,
    path: str,
    candidates: Sequence[Candidate],
    here: Here | None = None,
) -> list[Taken]:
    """For each candidate the joined calls that it takes part in."""
    return [frozenset(pricer.bill(path, candidate, here).units) for candidate in candidates]


def _seen(candidate: Candidate, bill: Bill) -> Facts:
    """What of a region's candidate matters outside its layer."""
    return frozenset(_facts(candidate, bill))


def _facts(candidate: Candidate, bill: Bill) -> Iterator[tuple[Hashable, ...]]:
    for name in bill.shared:
        yield "shares", name
    if candidate.region == STREAM:
        yield "stream", candidate.splits
    for axis in {part.axis for _, split in candidate.splits for part in split}:
        yield "uses", axis
    group = alike_in_group(candidate)
    if group is not None:
        yield "group", candidate.region, group

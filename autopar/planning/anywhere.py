"""Before the layers are cut into stages: a bound over all cuts, and how long each part takes at
least for any run of layers.

Of the skeleton's ops only those count that lie in the same part wherever the layers are cut; what
stages send each other counts for what it costs at least.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.planning import columns
from autopar.planning.balanced import balanced
from autopar.planning.chunks import slowest_of_chunks
from autopar.planning.fixed_parts import FixedParts
from autopar.planning.kinds import Kind
from autopar.planning.layered import Layered
from autopar.planning.loose import (
    FEW,
    HELD,
    RESIDENT,
    SECONDS,
    STEP,
    Alike,
    Everywhere,
    Loose,
    Multipliers,
    by_slowest,
    least_bytes_of,
    moments,
)
from autopar.planning.multipliers import Bound, bound, bound_by, over_bytes
from autopar.planning.prices import Bill
from autopar.planning.problem import Stages
from autopar.planning.region_effects import (
    buffer_effects,
    input_effects,
)
from autopar.planning.rooms import Room, best_of, room_of, with_moment
from autopar.planning.schedules import spread, stages_of
from autopar.planning.spans import Spans, layers_of, span_of
from autopar.plugin import Schedule

Floats = NDArray[np.float64]


def even_counts(layers: int, parts: int) -> list[int]:
    """How many layers each part has if they are spread evenly."""
    return [layers * (p + 1) // parts - layers * p // parts for p in range(parts)]


@dataclass(frozen=True)
class Anywhere:
    """A setting with a schedule, whose layers may be cut anywhere."""

    layered: Layered
    limit_bytes: int
    known: dict[str, Bound | None] = field(default_factory=dict)
    """By solver, what multipliers prove; None where no cut fits."""

    @property
    def schedule(self) -> Schedule:
        """The setting's."""
        return self.layered.schedule

    @cached_property
    def stages(self) -> Stages:
        """What of the schedule counts."""
        return stages_of(self.layered.pricer.setting)

    def bound(self, solver: str) -> float:
        """Seconds that no cut beats; inf where nothing fits."""
        found = self.relaxed(solver)
        return np.inf if found is None else max(found.seconds, self._step_at_least())

    def relaxed(self, solver: str) -> Bound | None:
        """What multipliers prove; None where no cut fits."""
        if solver not in self.known:
            loose = self.loose()
            fits = np.isfinite(loose.least_slowest_s)
            self.known[solver] = bound(loose, solver) if fits else None
        return self.known[solver]

    def bound_by(self, known: Mapping[Hashable, Multipliers]) -> float:
        """As `bound`, but at once, by the multipliers of a setting of the same form; where none are
        known, by what the slowest stage takes."""
        loose = self.loose()
        if not np.isfinite(loose.least_slowest_s):
            return np.inf
        return bound_by(loose, known.get(loose.form) or by_slowest(loose))

    def narrowed(self, width_s: float, solver: str) -> tuple[Layered, float]:
        """The layers without columns that no program has which is less than `width_s` above a
        bound, wherever it is cut; and what all others take at least."""
        found, kinds = self.relaxed(solver), self.layered.every
        assert found is not None
        kept = {}
        for kind, by_part in zip(kinds, found.weights[-len(kinds) :], strict=True):
            least_s = np.min([row.min() for row in by_part])
            near = np.min(by_part, axis=0) - least_s <= width_s
            kept[id(kind)] = kind.only(np.flatnonzero(near))
        return self.layered.with_kinds(kept), found.seconds + width_s

    def _step_at_least(self) -> float:
        """What the stage takes for a step that takes most, and the others beside it: since late ≥
        once_i + spare · (τ_i − slowest) and per_slowest ≥ spare, no step is shorter than
        per_slowest · τ_i + once_i + per_stage · Σ τ for any stage i (`Stages`)."""
        stages = self.stages
        layers_s = sum(
            count * float(self.rows[key][:, SECONDS].min()) for key, count in self.counts.items()
        )
        total_s = layers_s + sum(self.own_s(1.0, 0.0))
        return self.slowest_at_least(stages.per_slowest, 1.0) + stages.per_stage * total_s

    def few(self) -> Layered:
        """The layers with few of their columns: those that are best for some worth of memory on
        some stage, of each way that a layer may meet its neighbours."""
        rooms, kept = self.rooms(1.0, 0.0), {}
        for kind in self.layered.every:
            classes: dict[Hashable, list[int]] = {}
            for column, seen in enumerate(kind.columns.seen):
                classes.setdefault(seen, []).append(column)
            own, found = self.rows[id(kind)], set[int]()
            # What comes once a step may count, or hide behind another stage's; what is needed for
            # a moment may be what a stage has room for.
            plain = (own, _weighed(own, self.stages.per_slowest, 1.0))
            ways = [*plain, *map(with_moment, plain)]
            for some in map(np.array, classes.values()):
                for rows, room in itertools.product(ways, rooms):
                    found.update(some[best_of(rows[some], room)].tolist())
            kept[id(kind)] = kind.only(np.array(sorted(found)))
        return self.layered.with_kinds(kept)

    def over_bytes(self, solver: str) -> float:
        """By how many bytes at least every program is over the limit: closer than `least_bytes`."""
        return over_bytes(self.loose(), solver)

    def least_bytes(self) -> int:
        """No program needs less."""
        worst = float(least_bytes_of(self.loose()))
        fullest = np.full(len(self.layered.kinds) + 1, np.inf)
        fullest[0] = -np.inf
        for over in self.spans.over_bytes if self.schedule.brief.chunks == 1 else ():
            fullest = np.min(np.maximum(fullest[:, None], over), axis=0)
        if np.isfinite(fullest[-1]):
            worst = max(worst, self.limit_bytes + float(fullest[-1]))
        return int(worst)

    def loose(self) -> Loose:
        """The problem before layers are cut, as multipliers see it."""
        every = [*self._fixed.beside]
        table = self.schedule.brief
        for k, (key, count) in enumerate(self.counts.items()):
            # The largest of those that a stage has is no less than their mean.
            share, freed = 1.0 / min(count, self._most_of_stage), self._fixed.freed
            args = (table.stages, table.chunks, freed, self._moment_factors(count))
            options = Everywhere(self.rows[key], *args, self.may_lie(k))
            every.append(Alike(count, options, k + 1, share))
        slowest_s = self.slowest_at_least()
        return Loose(
            self.limit_bytes, self.stages, tuple(every), self._fixed.base, slowest_s, self.spread
        )

    def may_lie(self, number: int) -> NDArray[np.int64]:
        """The parts in which some layer of a kind may lie. Of many kinds all may lie anywhere: few
        stand for them."""
        parts, count = self.schedule.brief.parts, len(self.layered.kinds)
        if len(self.counts) > FEW:
            return np.arange(parts)
        mine = np.flatnonzero(np.array(self.kind_numbers) == number)
        found = []
        for part, (least, most) in enumerate(self.spread):
            first = max(part * least, count - (parts - part) * most)
            end = min((part + 1) * most, count - (parts - part - 1) * least)
            if np.any((mine >= first) & (mine < end)):
                found.append(part)
        return np.array(found)

    def _moment_factors(self, count: int) -> Floats:
        """By part, how often transient bytes count of one of so many layers: where those of some
        parts of a stage don't, the mean is over fewer."""
        stages, counted = self.schedule.brief.stages, self._fixed.counted
        most = np.array([most for _, most in self.spread]) * counted
        of_stage = np.minimum(most.reshape(-1, stages).sum(axis=0), count)
        own: Floats = np.tile(min(count, self._most_of_stage) / of_stage, len(counted) // stages)
        return counted * own

    def bound_of(self, counts: Sequence[int]) -> float:
        """Seconds that no program beats whose parts have so many layers, of one part a stage; inf
        where they don't fit."""
        ends = [0, *itertools.accumulate(counts)]
        at = [(part, ends[part], ends[part + 1]) for part in range(len(counts))]
        each = [float(self.spans.seconds[place]) for place in at]
        once = [float(self.spans.step_seconds[place]) for place in at]
        # What a stage waits less for, being faster, isn't a number where the slowest is inf.
        return self.stages.step_seconds(each, once) if np.all(np.isfinite(each)) else np.inf

    @property
    def _most_of_stage(self) -> int:
        """So many layers a stage has at most."""
        return sum(most for _, most in self.spread[:: self.schedule.brief.stages])

    @property
    def spread(self) -> tuple[tuple[int, int], ...]:
        """How many layers each part has, at least and at most."""
        table = self.schedule.brief
        return (spread(table, len(self.layered.kinds)),) * table.parts

    @cached_property
    def _fixed(self) -> FixedParts:
        return FixedParts(self.layered)

    # ------------------------------------------------------------ layers

    @cached_property
    def rows(self) -> Mapping[int, Floats]:
        """By kind (its id): seconds, step seconds, resident, transient and held bytes of each
        column, and its transient bytes where nothing runs again."""
        return {id(kind): self._layer_rows(kind) for kind in self.layered.every}

    def _layer_rows(self, kind: Kind) -> Floats:
        costs = kind.columns.costs
        order = [columns.EACH_S, columns.ONCE_S, columns.RESIDENT, columns.TRANSIENT, columns.HELD]
        rows = costs[:, [*order, columns.BRIEF]].copy()
        bill = self._inputs(kind)
        times = self.layered.pricer.setting.microbatches
        rows[:, SECONDS] += bill.each_s(times)
        rows[:, STEP] += bill.step_s
        rows[:, RESIDENT] += bill.lasting_bytes
        return rows

    def _inputs(self, kind: Kind) -> Bill:
        pricer = self.layered.pricer
        path = next(path for path, other in self.layered.kinds.items() if other is kind)
        block = pricer.block(path)
        effects = [*input_effects(block, pricer.setting), *buffer_effects(block)]
        return pricer.prices.bill(effects, pricer.setting.microbatches)

    # ------------------------------------------------------------ runs of layers

    def slowest_at_least(self, each: float = 1.0, once: float = 0.0) -> float:
        """What the slowest stage takes at least, of so many microbatches' seconds and of those once
        a step: layers don't divide. inf where no cut fits."""
        table, count = self.schedule.brief, len(self.layered.kinds)
        if table.chunks > 1:
            rows = [_weighed(self.rows[key], each, once) for key in self.counts]
            return slowest_of_chunks(self.kind_numbers, rows, self.rooms(each, once))
        slowest = np.full(count + 1, np.inf)
        slowest[0] = 0.0
        spans, fits = self.spans, np.isfinite(self.spans.seconds)
        seconds_of = each * np.where(fits, spans.seconds, 0.0) + once * spans.step_seconds
        for seconds in np.where(fits, seconds_of, np.inf):
            slowest = np.min(np.maximum(slowest[:, None], seconds), axis=0)
        return float(slowest[count])

    def rooms(self, each: float, once: float) -> list[Room]:
        """The stages, with seconds of so many microbatches and of those once a step."""
        found = []
        for stage, base in enumerate(self._fixed.base):
            own_s = float(each * base[SECONDS] + once * base[STEP])
            skeleton = [_weighed(costs, each, once) for costs in self._fixed.rows(stage)]
            free, counts, typical, freed = self._free[stage]
            found.append(room_of(own_s, free, counts, skeleton, typical, freed))
        return found

    @cached_property
    def _free(self) -> list[tuple[float, Floats, float, list[float]]]:
        """By stage: bytes that are free, microbatches in flight by part, what layers need for a
        moment on the mean, and by part what is freed before."""
        every, found = np.concatenate([*self.rows.values()]), []
        means = {one: float(moments(every, one).mean()) for one in set(self._fixed.freed.tolist())}
        for stage, base in enumerate(self._fixed.base):
            counts = np.array(max(self.stages.in_flight[stage], key=sum), np.float64)
            free = self.limit_bytes - float(base[RESIDENT] + base[HELD:] @ counts)
            freed = self._fixed.freed[stage :: len(self._fixed.base)].tolist()
            found.append((free, counts, float(np.mean([means[one] for one in freed])), freed))
        return found

    @cached_property
    def counts(self) -> Mapping[int, int]:
        """By kind (its id), how many layers are of it."""
        return Counter(id(kind) for kind in self.layered.kinds.values())

    def balanced(self) -> tuple[int, ...]:
        """How many layers each part has, of several parts a stage, where the slowest stage is about
        as fast as it can be."""
        rows = [self.rows[key] for key in self.counts]
        return balanced(self.kind_numbers, rows, self.rooms(1.0, 0.0))

    def counts_of(self, layers: Sequence[Sequence[int]]) -> list[int]:
        """How many layers each part has, where stages have so many of each kind: of several parts
        of a stage those have more that hold them for fewer microbatches."""
        table, found = self.schedule.brief, [0] * self.schedule.brief.parts
        for stage, own in enumerate(layers):
            few, more = divmod(sum(own), table.chunks)
            in_flight = max(self.stages.in_flight[stage], key=sum)
            order = sorted(range(table.chunks), key=lambda chunk: (in_flight[chunk], -chunk))
            for place, chunk in enumerate(order):
                found[chunk * table.stages + stage] = few + (place < more)
        return found

    @property
    def kind_numbers(self) -> list[int]:
        """By layer, which of `counts` its kind is."""
        order = {key: number for number, key in enumerate(self.counts)}
        return [order[id(kind)] for kind in self.layered.kinds.values()]

    def own_s(self, each: float, once: float) -> list[float]:
        """What each stage takes at least beside layers, of so many microbatches' seconds and of
        those once a step."""
        return [room.least_beside_s for room in self.rooms(each, once)]

    @cached_property
    def spans(self) -> Spans:
        """What each part takes and needs at least with every run of layers."""
        table, count = self.schedule.brief, len(self.layered.kinds)
        rows = [self.rows[key] for key in self.counts]
        runs = self.layered.pricer.works.runs_of(tuple(self.kind_numbers))
        layers, rooms, own_s = layers_of(runs, rows), self.rooms(1.0, 0.0), self.own_s(0.0, 1.0)
        step_s = layers.step_s[runs.place]
        seconds = np.full((table.parts, count + 1, count + 1), np.inf)
        over, once = np.full_like(seconds, np.inf), np.zeros_like(seconds)
        first, last = np.indices((count + 1, count + 1))
        inside = np.isin(np.arange(count + 1), list(self.layered.inside_groups))
        whole = ~inside[first] & ~inside[last]
        for part, (least, most) in enumerate(self.spread):
            some = whole & (last - first >= least) & (last - first <= most)
            chunk, stage = divmod(part, table.stages)
            own = [each[runs.place][some] for each in span_of(layers, rooms[stage], chunk)]
            seconds[part][some], over[part][some] = own
            once[part] = step_s + own_s[stage]
        return Spans(np.where(over <= 0, seconds, np.inf), once, over)


def _weighed(costs: Floats, each: float, once: float) -> Floats:
    """The rows with seconds that count so many microbatches', and those once a step."""
    rows = costs.copy()
    rows[:, SECONDS] = each * costs[:, SECONDS] + once * costs[:, STEP]
    return rows

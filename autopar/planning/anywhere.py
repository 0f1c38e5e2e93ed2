"""Before the layers are cut into stages: a bound over all cuts, and how long each part takes at
least for any run of layers.

Of the skeleton's ops only those count that lie in the same part wherever the layers are cut; what
stages send each other counts for what it costs at least.
"""

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.graph.model_graph import STREAM, Value
from autopar.layouts.stages import Cut, Here, make_cut
from autopar.planning import columns
from autopar.planning.kinds import Kind
from autopar.planning.layered import Layered
from autopar.planning.loose import (
    HELD,
    RESIDENT,
    SECONDS,
    STEP,
    TRANSIENT,
    Alike,
    Everywhere,
    Loose,
    least_bytes_of,
)
from autopar.planning.multipliers import bound
from autopar.planning.price import LayoutRow
from autopar.planning.prices import Bill
from autopar.planning.problem import Stages
from autopar.planning.region_effects import (
    buffer_effects,
    handed_on,
    input_effects,
    unused_effects,
)
from autopar.planning.schedules import spread, stages_of
from autopar.plugin import Schedule

Floats = NDArray[np.float64]
FACTORS = tuple(2.0**k for k in range(-8, 9))
"""Multipliers of memory that are tried, in mean seconds a byte."""


def even_counts(layers: int, parts: int) -> list[int]:
    """How many layers each part has if they are spread evenly."""
    return [layers * (p + 1) // parts - layers * p // parts for p in range(parts)]


@dataclass(frozen=True)
class Spans:
    """[part, first layer, layer after the last]: seconds of a microbatch that the part takes at
    least with these layers (inf where they don't fit, or there are none), what it takes once a step
    at least, and by how many bytes at least they are over the limit."""

    seconds: Floats
    step_seconds: Floats
    over_bytes: Floats


@dataclass(frozen=True)
class Anywhere:
    """A setting with a schedule, whose layers may be cut anywhere."""

    layered: Layered
    limit_bytes: int

    @property
    def schedule(self) -> Schedule:
        """The setting's."""
        schedule = self.layered.pricer.setting.schedule
        assert schedule is not None
        return schedule

    @cached_property
    def stages(self) -> Stages:
        """What of the schedule counts."""
        return stages_of(self.layered.pricer.setting)

    def bound(self, solver: str) -> float:
        """Seconds that no cut beats; inf where nothing fits."""
        loose = self._loose()
        return bound(loose, solver)[0] if np.isfinite(loose.least_slowest_s) else np.inf

    def least_bytes(self) -> int:
        """No program needs less."""
        worst = float(least_bytes_of(self._loose()))
        fullest = np.full(len(self.layered.kinds) + 1, np.inf)
        fullest[0] = -np.inf
        for over in self.spans.over_bytes if self.schedule.brief.chunks == 1 else ():
            fullest = np.min(np.maximum(fullest[:, None], over), axis=0)
        if np.isfinite(fullest[-1]):
            worst = max(worst, self.limit_bytes + float(fullest[-1]))
        return int(worst)

    def _loose(self) -> Loose:
        every = [*self._skeleton]
        kinds: dict[int, list[Kind]] = {}
        for kind in self.layered.kinds.values():
            kinds.setdefault(id(kind), []).append(kind)
        for k, same in enumerate(kinds.values()):
            rows = self._rows[id(same[0])]
            options = Everywhere(rows, self.schedule.brief.stages, self.schedule.brief.chunks)
            every.append(Alike(len(same), options, k + 1, 1.0 / len(same)))
        slowest_s = self.slowest_at_least()
        return Loose(
            self.limit_bytes, self.stages, tuple(every), self._base, slowest_s, self.spread
        )

    def bound_of(self, counts: Sequence[int]) -> float:
        """Seconds that no program beats whose parts have so many layers; of one part a stage."""
        ends = [0, *itertools.accumulate(counts)]
        at = [(part, ends[part], ends[part + 1]) for part in range(len(counts))]
        each = [float(self.spans.seconds[place]) for place in at]
        once = [float(self.spans.step_seconds[place]) for place in at]
        return self.stages.step_seconds(each, once)

    @property
    def spread(self) -> tuple[tuple[int, int], ...]:
        """How many layers each part has, at least and at most."""
        table = self.schedule.brief
        return (spread(table, len(self.layered.kinds)),) * table.parts

    # ------------------------------------------------------------ what parts have anyway

    @cached_property
    def _fixed(self) -> tuple[Here, ...]:
        """The skeleton as each part has it wherever the layers are cut."""
        table, setting = self.schedule.brief, self.layered.pricer.setting
        skeleton = self.layered.pricer.model.skeleton
        rest = len(self.layered.kinds) - table.parts + 1
        early = make_cut(skeleton, [*([1] * (table.parts - 1)), rest])
        late = make_cut(skeleton, [rest, *([1] * (table.parts - 1))])
        parts = {n: p for n, p in early.parts.items() if late.parts.get(n) == p}
        cut = Cut(((),) * table.parts, parts, ())
        axis = setting.mesh.part(self.schedule.axis)
        return tuple(Here(cut, part, axis) for part in range(table.parts))

    @cached_property
    def _skeleton(self) -> tuple[Alike, ...]:
        pricer, stages = self.layered.pricer, self.schedule.brief.stages
        found = []
        for key in self.layered.skeleton:
            rows: dict[int, Floats] = {}
            known: dict[Hashable, list[Bill]] = {}
            for part, here in enumerate(self._fixed):
                alike = pricer.part(here)
                if alike not in known:
                    known[alike] = [pricer.bill("", c, here) for c in pricer.candidates[key]]
                own = np.array([self._numbers(bill, part) for bill in known[alike]])
                rows[part % stages] = rows.get(part % stages, 0.0) + own
            found.append(Alike(1, (rows,), 0, 1.0))
        return tuple(found)

    def _numbers(self, bill: Bill, part: int) -> Floats:
        table, times = self.schedule.brief, self.layered.pricer.setting.microbatches
        held = [0] * table.chunks
        held[part // table.stages] = bill.held_bytes
        sizes = (bill.lasting_bytes, bill.transient_bytes, *held)
        return np.array([bill.each_s(times), bill.step_s, *sizes], np.float64)

    @cached_property
    def _base(self) -> tuple[Floats, ...]:
        pricer, table = self.layered.pricer, self.schedule.brief
        model, setting, prices = pricer.model, pricer.setting, pricer.prices
        rows = [np.zeros(HELD + table.chunks) for _ in range(table.stages)]
        least = min(kind.columns.costs[:, columns.TRANSIENT].min() for kind in self._every)
        for row in rows:
            row[STEP] += pricer.scalars().step_s
            row[RESIDENT] += prices.overhead_bytes()
            row[TRANSIENT] = least  # every stage has a layer
        for part, here in enumerate(self._fixed):
            bill = pricer.outside_bill(here)
            if part == 0:
                bill += prices.bill(unused_effects(model), setting.microbatches)
            own = self._numbers(bill, part)
            own[TRANSIENT] = 0.0
            rows[part % table.stages] += own
            sends = (part < table.parts - 1) + (part > 0)
            rows[part % table.stages][SECONDS : STEP + 1] += sends * self._send_s
        return tuple(rows)

    @property
    def _every(self) -> list[Kind]:
        return list({id(kind): kind for kind in self.layered.kinds.values()}.values())

    @cached_property
    def _send_s(self) -> Floats:
        """What it costs at least to hand a layer's result on, or its gradient back: seconds of a
        microbatch, and once a step."""
        pricer = self.layered.pricer
        skeleton, setting = pricer.model.skeleton, pricer.setting
        axis = setting.mesh.part(self.schedule.axis)
        crossing: dict[tuple[Value, LayoutRow], None] = {}
        for name, (key, layouts), _ in pricer.values("", skeleton):
            value = skeleton.values[name]
            if key[0] and key[1] == STREAM and value.needs_grad:
                crossing[value, layouts] = None  # those of alike layers are equal
        sends = {
            handed_on(value, "", layout, setting, forward, axis): None
            for value, layouts in crossing
            for layout in dict.fromkeys(layouts)
            for forward in (True, False)
        }
        costs = [pricer.prices.seconds(send) for send in sends] or [(0.0, 0.0)]
        least: Floats = np.array(costs).min(axis=0)
        return least

    # ------------------------------------------------------------ layers

    @cached_property
    def _rows(self) -> Mapping[int, Floats]:
        """By kind (its id): seconds, step seconds, resident, transient and held bytes of each
        column."""
        return {id(kind): self._layer_rows(kind) for kind in self._every}

    @cached_property
    def _least_s(self) -> Mapping[int, float]:
        """By kind (its id), seconds of a microbatch of its fastest column."""
        return {key: float(rows[:, SECONDS].min()) for key, rows in self._rows.items()}

    def _layer_rows(self, kind: Kind) -> Floats:
        costs = kind.columns.costs
        order = [columns.EACH_S, columns.ONCE_S, columns.RESIDENT, columns.TRANSIENT, columns.HELD]
        rows = costs[:, order].copy()
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

    def _on(self, rows: Floats, part: int) -> Floats:
        """Rows with what is held in the chunk of a part."""
        table = self.schedule.brief
        held = np.zeros((len(rows), table.chunks))
        held[:, part // table.stages] = rows[:, HELD]
        return np.hstack([rows[:, :HELD], held])

    # ------------------------------------------------------------ runs of layers

    def slowest_at_least(self) -> float:
        """Seconds a microbatch that the slowest stage takes at least: layers don't divide."""
        table, count = self.schedule.brief, len(self.layered.kinds)
        if table.chunks > 1:
            return self._slowest_of_chunks()
        slowest = np.full(count + 1, np.inf)
        slowest[0] = 0.0
        for seconds in self.spans.seconds:
            slowest = np.min(np.maximum(slowest[:, None], seconds), axis=0)
        return float(slowest[count])

    def _slowest_of_chunks(self) -> float:
        """The same where a stage has several parts, which differ by one layer at most: of all ways
        to give stages so many layers the one whose slowest takes least, each by `_stage_at_least`,
        with memory where all layers are of one kind."""
        table, count = self.schedule.brief, len(self.layered.kinds)
        least = count // table.parts * table.chunks
        if len(self._every) > 1:
            least_s = min(self._least_s.values())
            return max(self._stage_s(self.balanced(least_s), least_s))
        each = [self._stage_at_least(stage) for stage in range(table.stages)]
        for slowest in sorted({float(x) for row in each for x in row if np.isfinite(x)}):
            most = [int((row <= slowest).sum()) - 1 for row in each]
            if min(most) >= 0 and sum(least + more for more in most) >= count:
                return slowest
        return np.inf

    def _stage_at_least(self, stage: int) -> Floats:
        """Seconds of a microbatch that a stage takes at least, if none, one … of its parts have a
        layer more than the others (inf: that doesn't fit)."""
        table, (kind,) = self.schedule.brief, self._every
        rows, base = self._rows[id(kind)], self._base[stage]
        fewest = len(self.layered.kinds) // table.parts
        counts = max(self.stages.in_flight[stage], key=sum)
        free = self.limit_bytes - float(base[RESIDENT] + base[TRANSIENT])
        free -= float(base[HELD:] @ np.array(counts))
        sizes = rows[:, RESIDENT] + rows[:, HELD] * np.array(counts)[:, None]

        def total(weights: Floats) -> Floats:
            """Of weights by (…, chunk, column)."""
            each = np.sort(weights.min(axis=-1))
            none = np.zeros((*each.shape[:-1], 1))
            more = np.concatenate([none, np.cumsum(each, axis=-1)], axis=-1)
            out: Floats = fewest * each.sum(axis=-1, keepdims=True) + more
            return out

        pace = float(rows[:, SECONDS].mean() / max(sizes.mean(), 1.0))
        multipliers = np.array([0.0, *(pace * factor for factor in FACTORS)])
        sums = total(rows[:, SECONDS] + multipliers[:, None, None] * sizes)
        found = (sums - multipliers[:, None] * free).max(axis=0) + self._own_s[stage]
        return np.where(total(sizes) <= free, found, np.inf)

    @property
    def mean_layer_s(self) -> float:
        """Seconds of a microbatch of a layer, if each takes what its fastest choice does."""
        kinds = self.layered.kinds.values()
        return sum(self._least_s[id(kind)] for kind in kinds) / len(kinds)

    def balanced(self, layer_s: float) -> tuple[int, ...]:
        """How many layers each part has, if each takes so long, where the slowest stage is fastest
        and parts differ by one layer at most: the stage with the least is given the next one.
        Of its parts the last, which have the fewest microbatches in flight."""
        table, count = self.schedule.brief, len(self.layered.kinds)
        counts = [count // table.parts] * table.parts
        for _ in range(count - sum(counts)):
            spare = [p for p in range(table.parts) if counts[p] == count // table.parts]
            each_s = self._stage_s(counts, layer_s)
            counts[min(spare, key=lambda p: (each_s[p % table.stages], -p))] += 1
        return tuple(counts)

    def _stage_s(self, counts: Sequence[int], layer_s: float) -> list[float]:
        """Seconds of a microbatch by stage, with so many layers in each part."""
        each_s = list(self._own_s)
        for part, layers in enumerate(counts):
            each_s[part % len(each_s)] += layers * layer_s
        return each_s

    @cached_property
    def _own_s(self) -> tuple[float, ...]:
        """Seconds that each stage takes at least beside layers."""
        rows = [costs.options[0] for costs in self._skeleton]
        return tuple(
            float(base[SECONDS] + sum(row[i][:, SECONDS].min() for row in rows if i in row))
            for i, base in enumerate(self._base)
        )

    @cached_property
    def spans(self) -> Spans:
        """What each part takes and needs at least with every run of layers."""
        table, count = self.schedule.brief, len(self.layered.kinds)
        base, skeleton = self._base, self._skeleton
        seconds = np.full((table.parts, count + 1, count + 1), np.inf)
        over, once = np.full_like(seconds, np.inf), np.zeros_like(seconds)
        first, last = np.indices((count + 1, count + 1))
        inside = np.isin(np.arange(count + 1), list(self.layered.inside_groups))
        whole = ~inside[first] & ~inside[last]
        for part, (least, most) in enumerate(self.spread):
            some = whole & (last - first >= least) & (last - first <= most)
            stage = part % table.stages
            own = [costs.options[0][stage] for costs in skeleton if stage in costs.options[0]]
            found_s, once_s, found_bytes = self._span(own, base[stage], stage, part)
            seconds[part][some], over[part][some] = found_s[some], found_bytes[some]
            once[part] = once_s
        return Spans(np.where(over <= 0, seconds, np.inf), once, over)

    def _span(
        self, own: Sequence[Floats], base: Floats, stage: int, part: int
    ) -> tuple[Floats, Floats, Floats]:
        """Of one part, by its first layer and the one after its last: the most seconds that some
        multiplier of memory proves, the least once a step, and the least bytes over the limit."""
        counts = np.max(np.array(self.stages.in_flight[stage], np.float64), axis=0)
        rows = {key: self._on(one, part) for key, one in self._rows.items()}
        order = [id(kind) for kind in self.layered.kinds.values()]
        free = self.limit_bytes - float(_bytes(base[None], counts)[0])
        # What is needed for a moment is the layers' or the skeleton's: the larger one counts.
        moment = float(base[TRANSIENT])
        if sum(float(costs[:, TRANSIENT].min()) for costs in own) > moment:
            moment, own = 0.0, [_with_moment(costs) for costs in own]
        free -= moment

        def total(weigh: Callable[[Floats], float]) -> Floats:
            each = {key: weigh(costs) for key, costs in rows.items()}
            sums = np.concatenate([[0.0], np.cumsum([each[key] for key in order])])
            span: Floats = sums[None, :] - sums[:, None] + sum(map(weigh, own))
            return span

        pace = max(
            float(costs[:, SECONDS].mean() / max(_bytes(costs, counts).mean(), 1.0))
            for costs in rows.values()
        )
        best = np.zeros((len(order) + 1, len(order) + 1))
        for multiplier in (0.0, *(pace * factor for factor in FACTORS)):

            def weigh(costs: Floats, multiplier: float = multiplier) -> float:
                return float((costs[:, SECONDS] + multiplier * _bytes(costs, counts)).min())

            best = np.maximum(best, total(weigh) + base[SECONDS] - multiplier * free)
        once = total(lambda costs: float(costs[:, STEP].min())) + base[STEP]
        return best, once, total(lambda costs: float(_bytes(costs, counts).min())) - free


def _with_moment(costs: Floats) -> Floats:
    """The rows with transient bytes among the resident ones."""
    rows = costs.copy()
    rows[:, RESIDENT] += rows[:, TRANSIENT]
    return rows


def _bytes(costs: Floats, counts: Floats) -> Floats:
    sizes: Floats = costs[:, RESIDENT] + costs[:, HELD:] @ counts
    return sizes

"""What each part of a pipeline has wherever the layers are cut: the ops of the skeleton that lie in
the same part in every cut, and what it costs at least to hand a layer's result on."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.graph.model_graph import STREAM, Value
from autopar.layouts.layout import Layout
from autopar.layouts.stages import Here
from autopar.planning import columns
from autopar.planning.layered import Layered
from autopar.planning.loose import HELD, RESIDENT, SECONDS, STEP, TRANSIENT, Alike
from autopar.planning.price import LayoutRow
from autopar.planning.prices import Bill
from autopar.planning.region_effects import handed_on, messages_bytes, unused_effects
from autopar.plugin import Resident

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class FixedParts:
    """The parts of a setting with a schedule, but for its layers."""

    layered: Layered

    def rows(self, stage: int) -> list[Floats]:
        """What the skeleton's regions may do on a stage."""
        options = [costs.options[0] for costs in self.skeleton]
        return [group[stage] for group in options if stage in group]

    @cached_property
    def _heres(self) -> tuple[Here, ...]:
        """The skeleton as each part has it wherever the layers are cut."""
        pricer, parts = self.layered.pricer, self.layered.schedule.brief.parts
        axis = pricer.setting.mesh.part(self.layered.schedule.axis)
        skeleton, layers = pricer.model.skeleton, len(self.layered.kinds)
        return pricer.works.fixed_heres(skeleton, layers, parts, axis)

    @cached_property
    def skeleton(self) -> tuple[Alike, ...]:
        pricer, stages = self.layered.pricer, self.layered.schedule.brief.stages
        found = []
        for key in self.layered.skeleton:
            rows: dict[int, Floats] = {}
            known: dict[Hashable, list[Bill]] = {}
            for part, here in enumerate(self._heres):
                alike = pricer.part(here)
                if alike not in known:
                    known[alike] = [pricer.bill("", c, here) for c in pricer.candidates[key]]
                own = np.array([self._numbers(bill, part) for bill in known[alike]])
                rows[part % stages] = rows.get(part % stages, 0.0) + own
            found.append(Alike(1, (rows,), 0, 1.0))
        return tuple(found)

    def _numbers(self, bill: Bill, part: int) -> Floats:
        table, times = self.layered.schedule.brief, self.layered.pricer.setting.microbatches
        held = [0] * table.chunks
        held[part // table.stages] = bill.held_bytes
        sizes = (bill.lasting_bytes, bill.transient_bytes, *held)
        return np.array([bill.each_s(times), bill.step_s, *sizes], np.float64)

    @cached_property
    def freed(self) -> Floats:
        """By part, what has been freed when its layers' backward comes."""
        table = self.layered.schedule.brief
        most = [self.layered.most_freed_bytes(part) for part in range(table.parts)]
        early = [self._closing_bytes(stage) for stage in range(table.stages - 1)]
        for part in range(table.parts):
            if part % table.stages < table.stages - 1:
                most[part] = early[part % table.stages]
        return np.array(most, np.float64)

    def _closing_bytes(self, stage: int) -> int:
        """What the skeleton needs for a moment on a stage but the last, at most."""
        pricer, stages = self.layered.pricer, self.layered.schedule.brief.stages
        ops = [name for name, op in pricer.model.skeleton.ops.items() if op.region is not None]
        if not all(any(here.has(name) for here in self._heres) for name in ops):
            return self.layered.most_closing_bytes  # some lie here or there
        return sum(
            max(pricer.bill("", c, here).closing_bytes for c in pricer.candidates[key])
            for here in self._heres[stage::stages]
            for key in self.layered.skeleton
        )

    @cached_property
    def counted(self) -> NDArray[np.bool_]:
        """By part, whether what its layers need for a moment counts: that of a stage is no less
        than the mean over any of its layers, so those that find most freed are left out."""
        stages = self.layered.schedule.brief.stages
        least = self.freed.reshape(-1, stages).min(axis=0)
        found: NDArray[np.bool_] = self.freed == np.tile(least, len(self.freed) // stages)
        return found

    @cached_property
    def base(self) -> tuple[Floats, ...]:
        pricer, table = self.layered.pricer, self.layered.schedule.brief
        model, setting, prices = pricer.model, pricer.setting, pricer.prices
        rows = [np.zeros(HELD + table.chunks) for _ in range(table.stages)]
        for stage, row in enumerate(rows):
            row[STEP] += pricer.scalars().step_s
            row[RESIDENT] += prices.overhead_bytes()
            freed = self.freed[stage :: table.stages].min()
            row[TRANSIENT] = min(  # every part has a layer
                columns.moment_bytes(kind.columns.costs, freed).min() for kind in self.layered.every
            )
        for part, here in enumerate(self._heres):
            bill = pricer.outside_bill(here)
            if part == 0:
                bill += prices.bill(unused_effects(model), setting.microbatches)
            own = self._numbers(bill, part)
            own[TRANSIENT] = 0.0
            rows[part % table.stages] += own
            sends = (part < table.parts - 1) + (part > 0)
            rows[part % table.stages][SECONDS : STEP + 1] += sends * self._send_s
            rows[part % table.stages][RESIDENT] += sends * self._message_bytes
        return tuple(rows)

    @cached_property
    def _send_s(self) -> Floats:
        """What it costs at least to hand a layer's result on, or its gradient back: seconds of a
        microbatch, and once a step."""
        pricer = self.layered.pricer
        axis = pricer.setting.mesh.part(self.layered.schedule.axis)
        sends = {
            handed_on(value, "", layout, pricer.setting, forward, axis): None
            for value, layout in self._crossing
            for forward in (True, False)
        }
        costs = [pricer.prices.seconds(send) for send in sends] or [(0.0, 0.0)]
        least: Floats = np.array(costs).min(axis=0)
        return least

    @cached_property
    def _message_bytes(self) -> int:
        """The room at a boundary for a layer's result and its gradient, at least."""
        pricer = self.layered.pricer
        sizes = [messages_bytes(*crossing, pricer.setting) for crossing in self._crossing]
        return math.ceil(pricer.prices.cost(Resident("transient", min(sizes, default=0))))

    @cached_property
    def _crossing(self) -> list[tuple[Value, Layout]]:
        """What layers may hand on, in each layout; those of alike layers are equal."""
        pricer, rows = self.layered.pricer, dict[tuple[Value, LayoutRow], None]()
        for name, (key, layouts), _ in pricer.values("", pricer.model.skeleton):
            value = pricer.model.skeleton.values[name]
            if key[0] and key[1] == STREAM and value.needs_grad:
                rows[value, layouts] = None
        return list(dict.fromkeys((v, layout) for v, row in rows for layout in dict.fromkeys(row)))

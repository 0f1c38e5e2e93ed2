"""What each part of a pipeline has wherever the layers are cut: the ops of the skeleton that lie in
the same part in every cut, and what it costs at least to hand a layer's result on."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.graph.model_graph import STREAM, Value
from autopar.layouts.stages import Here
from autopar.planning import columns
from autopar.planning.layered import Layered
from autopar.planning.loose import HELD, RESIDENT, SECONDS, STEP, TRANSIENT, Alike
from autopar.planning.price import LayoutRow
from autopar.planning.prices import Bill
from autopar.planning.region_effects import handed_on, unused_effects

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
    def base(self) -> tuple[Floats, ...]:
        pricer, table = self.layered.pricer, self.layered.schedule.brief
        model, setting, prices = pricer.model, pricer.setting, pricer.prices
        rows = [np.zeros(HELD + table.chunks) for _ in range(table.stages)]
        least = min(kind.columns.costs[:, columns.TRANSIENT].min() for kind in self.layered.every)
        for row in rows:
            row[STEP] += pricer.scalars().step_s
            row[RESIDENT] += prices.overhead_bytes()
            row[TRANSIENT] = least  # every stage has a layer
        for part, here in enumerate(self._heres):
            bill = pricer.outside_bill(here)
            if part == 0:
                bill += prices.bill(unused_effects(model), setting.microbatches)
            own = self._numbers(bill, part)
            own[TRANSIENT] = 0.0
            rows[part % table.stages] += own
            sends = (part < table.parts - 1) + (part > 0)
            rows[part % table.stages][SECONDS : STEP + 1] += sends * self._send_s
        return tuple(rows)

    @cached_property
    def _send_s(self) -> Floats:
        """What it costs at least to hand a layer's result on, or its gradient back: seconds of a
        microbatch, and once a step."""
        pricer = self.layered.pricer
        skeleton, setting = pricer.model.skeleton, pricer.setting
        axis = setting.mesh.part(self.layered.schedule.axis)
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

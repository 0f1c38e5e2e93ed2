"""What each part of a pipeline has wherever the layers are cut: the ops of the skeleton that lie in
the same part in every cut, and what it costs to hand a layer's result on."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.layouts.stages import Here
from autopar.planning import columns
from autopar.planning.handing_on import HandingOn
from autopar.planning.layered import Layered
from autopar.planning.loose import HELD, RESIDENT, SECONDS, STEP, TRANSIENT, Alike
from autopar.planning.prices import Bill
from autopar.planning.region_effects import unused_effects

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class FixedParts:
    """The parts of a setting with a schedule, but for its layers."""

    layered: Layered

    def rows(self, stage: int) -> list[Floats]:
        """What the skeleton's regions may do on a stage, and the ways to hand on."""
        options = [costs.options[0] for costs in self.beside]
        return [group[stage] for group in options if stage in group]

    @cached_property
    def _heres(self) -> tuple[Here, ...]:
        """The skeleton as each part has it wherever the layers are cut."""
        pricer, parts = self.layered.pricer, self.layered.schedule.brief.parts
        axis = pricer.setting.mesh.part(self.layered.schedule.axis)
        skeleton, layers = pricer.model.skeleton, len(self.layered.kinds)
        return pricer.works.fixed_heres(skeleton, layers, parts, axis)

    @cached_property
    def beside(self) -> tuple[Alike, ...]:
        """What there is to choose beside layers: the skeleton's regions, and the layouts in which
        each stage hands on."""
        sends = [(i, rows) for i, rows in enumerate(self._sends) if len(rows) > 1]
        return (*self._skeleton, *(Alike(1, ({i: rows},), 0, 1.0) for i, rows in sends))

    @cached_property
    def _skeleton(self) -> tuple[Alike, ...]:
        pricer, stages = self.layered.pricer, self.layered.schedule.brief.stages
        rows: dict[str, dict[int, Floats]] = {region: {} for _, region in self.layered.skeleton}
        known: dict[Hashable, dict[str, Floats]] = {}
        for part, here in enumerate(self._heres):
            alike = pricer.part(here), part // stages
            if alike not in known:
                known[alike] = dict(self._regions(part, here))
            for region, own in known[alike].items():
                stage = part % stages
                rows[region][stage] = rows[region].get(stage, 0.0) + own
        return tuple(Alike(1, (own,), 0, 1.0) for own in rows.values())

    def _regions(self, part: int, here: Here) -> Iterator[tuple[str, Floats]]:
        """What a part has of each of the skeleton's regions, by choice."""
        pricer, late = self.layered.pricer, self.layered.skeleton_late(here)
        for key in self.layered.skeleton:
            bills = [pricer.bill("", c, here) for c in pricer.candidates[key]]
            own = np.array([self._numbers(bill, part) for bill in bills])
            own[:, SECONDS : STEP + 1] += late[key[1]]
            yield key[1], own

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
        last = table.stages - 1
        early = [self._closing_bytes(stage) for stage in range(last)]
        found = [
            early[part % table.stages]
            if part % table.stages < last
            else self.layered.most_freed_bytes(part)
            for part in range(table.parts)
        ]
        return np.array(found, np.float64)

    def _closing_bytes(self, stage: int) -> int:
        """What the skeleton needs for a moment on a stage but the last, at most."""
        if not self._is_settled:
            return self.layered.most_closing_bytes
        stages = self.layered.schedule.brief.stages
        return sum(self.layered.closing_bytes(here)[1] for here in self._heres[stage::stages])

    @cached_property
    def _is_settled(self) -> bool:
        """Whether none of the skeleton's ops lies here or there by the cut."""
        ops = self.layered.pricer.model.skeleton.ops.items()
        names = [name for name, op in ops if op.region is not None]
        return all(any(here.has(name) for here in self._heres) for name in names)

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
        for row, sends in zip(rows, self._sends, strict=True):
            if len(sends) == 1:
                row += sends[0]
        return tuple(rows)

    @cached_property
    def _sends(self) -> tuple[Floats, ...]:
        """By stage, the ways to hand on what its layers make, and its gradients."""
        handing_on = HandingOn(self.layered)
        return tuple(map(handing_on.rows, range(self.layered.schedule.brief.stages)))

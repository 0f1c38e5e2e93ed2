"""What it costs a stage to hand layers' results on and their gradients back, wherever the layers
are cut: how much depends on the layout in which a layer makes them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.graph.model_graph import STREAM, Value
from autopar.layouts.layout import Layout
from autopar.planning.layered import Layered
from autopar.planning.loose import HELD, RESIDENT, SECONDS, STEP
from autopar.planning.pareto import pareto
from autopar.planning.price import LayoutRow
from autopar.planning.region_effects import handed_on, messages_bytes
from autopar.plugin import Resident

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class HandingOn:
    """The boundaries between parts of a setting with a schedule."""

    layered: Layered
    known: dict[tuple[int, int], Floats] = field(default_factory=dict)
    """By how many results and gradients a stage hands on: most stages do the same."""

    def rows(self, stage: int) -> Floats:
        """A row of costs for each way: seconds of a microbatch, once a step, and the room for the
        messages. A stage hands on what all its parts but the last of all make, and gives back the
        gradients of what all but the first take."""
        table = self.layered.schedule.brief
        parts = range(stage, table.parts, table.stages)
        times = sum(p < table.parts - 1 for p in parts), sum(p > 0 for p in parts)
        if times not in self.known:
            self.known[times] = self._of_times(times)
        return self.known[times]

    def _of_times(self, times: tuple[int, int]) -> Floats:
        found = np.zeros((1, HELD + self.layered.schedule.brief.chunks))
        for sends, often in zip(self._sends, times, strict=True):
            if often and len(sends):
                both = (found[:, None, :] + often * sends[None, :, :]).reshape(-1, found.shape[1])
                found = both[pareto(both)]
        return found

    @cached_property
    def _sends(self) -> tuple[Floats, Floats]:
        """A row for each layout: of a result, and of a gradient."""
        onwards, back = (np.array(list(self._ways(forward))) for forward in (True, False))
        return onwards, back

    def _ways(self, forward: bool) -> Iterator[Floats]:
        pricer, chunks = self.layered.pricer, self.layered.schedule.brief.chunks
        axis = pricer.setting.mesh.part(self.layered.schedule.axis)
        for value, layout in self._crossing:
            send = handed_on(value, "", layout, pricer.setting, forward, axis)
            room = Resident("transient", messages_bytes(value, layout, pricer.setting))
            row = np.zeros(HELD + chunks)
            row[SECONDS], row[STEP] = pricer.prices.seconds(send)
            row[RESIDENT] = math.ceil(pricer.prices.cost(room))
            yield row

    @cached_property
    def _crossing(self) -> list[tuple[Value, Layout]]:
        """What layers may hand on, in each layout; those of alike layers are equal."""
        pricer, rows = self.layered.pricer, dict[tuple[Value, LayoutRow], None]()
        for name, (key, layouts), _ in pricer.values("", pricer.model.skeleton):
            value = pricer.model.skeleton.values[name]
            if key[0] and key[1] == STREAM and value.needs_grad:
                rows[value, layouts] = None
        return list(dict.fromkeys((v, layout) for v, row in rows for layout in dict.fromkeys(row)))

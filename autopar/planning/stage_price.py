"""Candidates → PlanningProblem where layers lie in stages: what each choice costs each stage."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.graph.model_graph import STREAM, Value
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.stages import Cut, Here, heres
from autopar.planning.columns import (
    BRIEF,
    EACH_S,
    HELD,
    ONCE_S,
    RESIDENT,
    TRANSIENT,
    Costs,
    moment_bytes,
)
from autopar.planning.joined import Late, unit_edges
from autopar.planning.kinds import Kind, taken_in
from autopar.planning.layered import Layered
from autopar.planning.price import Need, Pricer, SlotKey
from autopar.planning.prices import Bill
from autopar.planning.problem import Choice, Edge, PlanningProblem, Share, Shared, Slot
from autopar.planning.rate import LeastWork
from autopar.planning.region_effects import (
    buffer_effects,
    crossing_bytes,
    handed_on,
    input_effects,
    messages_bytes,
    unused_effects,
)
from autopar.planning.schedules import stages_of
from autopar.planning.shared_inputs import SharedInputs, shared_inputs
from autopar.plugin import Collective, Effect, Resident, Schedule

SECONDS, ONCE, LASTS, WAITS = range(4)
NOTHING = (0.0, 0.0, 0.0, 0.0)
Extra = dict[tuple[SlotKey, int], NDArray[np.float64]]
"""By (slot, part), for each of the slot's choices: seconds of a microbatch and once a step, bytes
that lie there throughout, and for each microbatch in flight."""


@dataclass(frozen=True)
class StagePricer:
    """Prices one setting whose layers are cut into parts. `by_stage`: of one stage after the
    other, or of all stages the same."""

    by_stage: Sequence[Layered]
    cut: Cut

    @property
    def pricer(self) -> Pricer:
        """Of the setting."""
        return self.by_stage[0].pricer

    def pricer_of(self, part: int) -> Pricer:
        """Of a part's stage, whose weights its prices have."""
        return self._of(part).pricer

    def _of(self, part: int) -> Layered:
        every = self.by_stage
        return every[0] if len(every) == 1 else every[part % len(every)]

    @cached_property
    def layered(self) -> Layered:
        """The slots: each layer with the columns that it has in its part."""
        if len(self.by_stage) == 1:
            return self.by_stage[0]
        paths = self.by_stage[0].kinds
        given = {path: self._of(self.cut.part_of(path)).kinds[path] for path in paths}
        return replace(self.by_stage[0], given=given)

    @property
    def schedule(self) -> Schedule:
        """The setting's."""
        assert self.pricer.setting.schedule is not None
        return self.pricer.setting.schedule

    @property
    def microbatches(self) -> int:
        """Of one step."""
        return self.pricer.setting.microbatches

    @cached_property
    def heres(self) -> tuple[Here, ...]:
        """The skeleton as each part has it."""
        return heres(self.cut, self.pricer.setting)

    def problem(self, limit_bytes: int) -> PlanningProblem:
        """The whole problem, slots in model order."""
        extra: Extra = {}
        edges = list(self._edges(extra))
        self._add_sends(extra)
        slots = [self._skeleton_slot(key, extra) for key in self.layered.skeleton]
        slots += self._layer_slots(extra)
        edges += self._unit_edges()
        edges += self.layered.group_edges(self.cut)
        return PlanningProblem(
            tuple(slots),
            tuple(edges),
            limit_bytes,
            covers=self.layered.covers(),
            stages=stages_of(self.pricer.setting),
            base_shares=tuple(self._base()),
            shared=tuple(
                Shared(name, takes, self.share(Bill(resident_bytes=size, held_bytes=size), part))
                for part, shared in enumerate(self._shared)
                for name, size, takes in shared.sometimes
            ),
        )

    @cached_property
    def _shared(self) -> tuple[SharedInputs, ...]:
        """By part, what its layers share."""
        return tuple(shared_inputs(self.layered, layers) for layers in self.cut.layers)

    # ------------------------------------------------------------ slots

    def _skeleton_slot(self, key: SlotKey, extra: Extra) -> Slot:
        choices = []
        for c, candidate in enumerate(self.pricer.candidates[key]):
            shares = []
            for part in range(self.cut.count):
                each_s, once_s = self._late[part][key[1]][c]
                bill = self.pricer_of(part).bill("", candidate, self.heres[part])
                if (key, part) in extra:
                    more_s, late_s, lasts, waits = map(float, extra[key, part][c])
                    each_s, once_s = each_s + more_s, once_s + late_s
                    bill += Bill(resident_bytes=int(lasts + waits), held_bytes=int(waits))
                shares.append(self.share(bill, part, each_s, once_s))
            choices.append(self._choice(shares))
        return Slot(f"/{key[1]}", tuple(choices), "")

    def _layer_slots(self, extra: Extra) -> Iterator[Slot]:
        """Alike layers of one part share their choices, so that they can be counted."""
        known: dict[Hashable, tuple[Choice, ...]] = {}
        for path, kind in self.layered.kinds.items():
            own = self.cut.part_of(path)
            more = {part: row for (key, part), row in extra.items() if key == (path, STREAM)}
            alike = (id(kind), own, tuple((part, row.tobytes()) for part, row in more.items()))
            if alike not in known:
                known[alike] = self._layer_choices(kind, own, more)
            yield Slot(path, known[alike], path, is_front=True)

    def _layer_choices(
        self, kind: Kind, own: int, more: Mapping[int, NDArray[np.float64]]
    ) -> tuple[Choice, ...]:
        """A layer's columns in a part; with them what it hands on, and in the next part the
        gradient of that."""
        stages, chunks = self.schedule.table.stages, self.schedule.table.chunks
        extra: dict[int, list[list[float]]] = {part: rows.tolist() for part, rows in more.items()}
        places = [(part, part % stages, part // stages) for part in sorted({own, *extra})]
        choices = []
        rows: list[list[float]] = kind.columns.costs.tolist()
        briefs, agains = (row.tolist() for row in self._moments(kind, own))
        for costs, stream, brief, again in zip(rows, kind.streams, briefs, agains, strict=True):
            shares = []
            for part, stage, chunk in places:
                each_s, once_s, lasts, waits = extra[part][stream] if part in extra else NOTHING
                sizes, moment = (int(lasts), int(waits)), (0, 0)
                if part == own:
                    each_s, once_s = each_s + costs[EACH_S], once_s + costs[ONCE_S]
                    resident, held = costs[RESIDENT], costs[HELD]
                    sizes = int(resident + lasts), int(held) + int(waits)
                    moment = int(brief), int(again)
                by_chunk = (0,) * chunk + (sizes[1],) + (0,) * (chunks - chunk - 1)
                shares.append(Share(stage, each_s, once_s, sizes[0], by_chunk, *moment))
            choices.append(self._choice(shares))
        return tuple(choices)

    def _moments(self, kind: Kind, own: int) -> tuple[Costs, Costs]:
        """What each column needs for a moment in a part, and how much more in one when what the
        part's stage frees before is gone: only the last part finds gone what follows the last
        layer, and other parts of its stage what that needs for a moment, at least."""
        costs, table = kind.columns.costs, self.schedule.table
        stage = own % table.stages
        least, most = self._closing[stage]
        if own == table.parts - 1 or (stage < table.stages - 1 and most):
            return costs[:, BRIEF], costs[:, TRANSIENT] - costs[:, BRIEF]
        return moment_bytes(costs, least), np.zeros(len(costs))

    @cached_property
    def _closing(self) -> tuple[tuple[int, int], ...]:
        """What the skeleton needs for a moment on each stage that layers don't find when they run
        again, at least and at most."""
        stages, found = self.schedule.table.stages, []
        for stage in range(stages):
            every = [self.by_stage[0].closing_bytes(here) for here in self.heres[stage::stages]]
            found.append((sum(least for least, _ in every), sum(most for _, most in every)))
        return tuple(found)

    def _choice(self, shares: list[Share]) -> Choice:
        seconds = sum(s.seconds * self.microbatches + s.step_seconds for s in shares)
        resident = sum(s.resident_bytes + sum(s.held_bytes) for s in shares)
        return Choice(seconds, resident, max(s.transient_bytes for s in shares), tuple(shares))

    @cached_property
    def _late(self) -> tuple[Mapping[str, list[Late]], ...]:
        return tuple(self._of(p).skeleton_late(here) for p, here in enumerate(self.heres))

    def share(self, bill: Bill, part: int, each_s: float = 0.0, once_s: float = 0.0) -> Share:
        """A bill as the share of the stage that has a part; with more seconds each microbatch and
        once a step."""
        stages, chunks = self.schedule.table.stages, self.schedule.table.chunks
        # Where backwards are split, what is kept isn't free before their second half.
        late = 0 if self.schedule.table.splits_backward else bill.late_bytes
        held = tuple(bill.held_bytes if chunk == part // stages else 0 for chunk in range(chunks))
        return Share(
            part % stages,
            bill.each_s(self.microbatches) + each_s,
            bill.step_s + once_s,
            bill.lasting_bytes,
            held,
            bill.transient_bytes,
            freed_bytes=late + bill.closing_bytes,
        )

    def _base(self) -> Iterator[Share]:
        model, setting = self.pricer.model, self.pricer.setting
        for stage in range(self.schedule.table.stages):
            pricer = self.pricer_of(stage)
            overhead = pricer.prices.overhead_bytes()
            yield Share(stage, 0.0, pricer.scalars().step_s, overhead, held_bytes=())
        for part, where in enumerate(self.heres):
            effects: list[Effect] = [*unused_effects(model)] if part == 0 else []
            for path in self.cut.layers[part]:
                block = self.pricer.block(path)
                effects += [*input_effects(block, setting), *buffer_effects(block)]
            pricer = self.pricer_of(part)
            bill = pricer.outside_bill(where) + pricer.prices.bill(effects, self.microbatches)
            always = self._shared[part].always_bytes
            bill += Bill(resident_bytes=always, held_bytes=always)
            resident = bill.resident_bytes + bill.transient_bytes
            bill = replace(bill, resident_bytes=resident, transient_bytes=0)
            yield self.share(bill, part)

    # ------------------------------------------------------------ values

    def _edges(self, extra: Extra) -> Iterator[Edge]:
        skeleton = self.pricer.model.skeleton
        for name, made, needs in self._values():
            for part, uses in needs.items():
                for need in uses:
                    if need[0] == made[0]:
                        inside_s = self.pricer_of(part).inside_s("", name, made, need)
                        self._add_late(extra, made[0], part, inside_s)
                across = [need for need in uses if need[0] != made[0]]
                pricer, index = self.pricer_of(part), self.layered.index
                edge = pricer.edge("", skeleton, name, made, across, index)
                if edge is not None:
                    stage = part % self.schedule.table.stages
                    edge = replace(edge, stage=stage, name=f"{edge.name} in {part}")
                    yield self.layered.on_columns(edge)

    def _values(self) -> Iterator[tuple[str, Need, dict[int, list[Need]]]]:
        """Every activation of the skeleton: where it is made, and its distinct needs in each
        part."""
        block = self.pricer.model.skeleton
        for node in block.graph.nodes:
            value = block.values.get(node.name)
            if value is None or block.is_weight(node.name) or node.name in block.prologue:
                continue
            needs: dict[int, dict[Need, None]] = {}
            for user in node.users:
                if user.name in block.prologue:
                    continue
                need = self.pricer.need("", block, user, node, value)
                if need is not None:
                    for part in self.cut.parts[user.name]:
                        needs.setdefault(part, {})[need] = None
            if needs:
                made = self.pricer.made("", block, node, value)
                yield node.name, made, {part: list(found) for part, found in needs.items()}

    @staticmethod
    def _add(extra: Extra, key: SlotKey, part: int, what: int, more: Sequence[float]) -> None:
        rows = extra.setdefault((key, part), np.zeros((len(more), len(NOTHING))))
        rows[:, what] += more

    def _add_late(self, extra: Extra, key: SlotKey, part: int, more: Sequence[Late]) -> None:
        self._add(extra, key, part, SECONDS, [each_s for each_s, _ in more])
        self._add(extra, key, part, ONCE, [once_s for _, once_s in more])

    def _add_sends(self, extra: Extra) -> None:
        """Each stage pays for what it sends (values onwards, gradients back), has room for the
        messages at its boundaries, and holds what it only passes on."""
        skeleton = self.pricer.model.skeleton
        for part, names in enumerate(self.cut.boundaries):
            for name in names:
                value, node = skeleton.values[name], skeleton.node(name)
                key, layouts = self.pricer.made("", skeleton, node, value)
                unique = dict.fromkeys(layouts)
                for forward in (True, False) if value.needs_grad else (True,):
                    where = part if forward else part + 1
                    prices = self.pricer_of(where).prices
                    seconds = {
                        x: prices.seconds(self._send(value, name, x, forward)) for x in unique
                    }
                    self._add_late(extra, key, where, [seconds[x] for x in layouts])
                room = {x: self._bytes("transient", messages_bytes, value, x) for x in unique}
                for where in (part, part + 1):
                    self._add(extra, key, where, LASTS, [room[x] for x in layouts])
                if name in self.cut.passed_on(part):
                    kept = {x: self._bytes("saved", crossing_bytes, value, x) for x in unique}
                    self._add(extra, key, part, WAITS, [kept[x] for x in layouts])

    def _send(self, value: Value, name: str, layout: Layout, forward: bool) -> Collective:
        setting = self.pricer.setting
        axis = setting.mesh.part(self.schedule.axis)
        return handed_on(value, name, layout, setting, forward, axis)

    def _bytes(
        self,
        what: Literal["transient", "saved"],
        size: Callable[[Value, Layout, Setting], int],
        value: Value,
        layout: Layout,
    ) -> int:
        effect = Resident(what, size(value, layout, self.pricer.setting))
        return math.ceil(self.pricer.prices.cost(effect))

    # ------------------------------------------------------------ joined calls

    def _unit_edges(self) -> Iterator[Edge]:
        for part, here in enumerate(self.heres):
            slots = {
                self.layered.index[key]: taken_in(
                    self.pricer, "", self.pricer.candidates[key], here
                )
                for key in self.layered.skeleton
            }
            for edge in unit_edges({"": slots}, self.pricer_of(part).prices.seconds):
                stage = part % self.schedule.table.stages
                yield replace(edge, stage=stage, name=f"{edge.name} in {part}")


def least_work(pricer: Pricer) -> LeastWork:
    """Seconds of a microbatch and seconds once a step, each region by its fastest choice: the same
    under every schedule."""
    each_s, once_s = 0.0, 0.0
    known: dict[tuple[int, int], tuple[float, float]] = {}
    for (path, _), candidates in pricer.candidates.items():
        key = (id(pricer.block(path)), id(candidates))  # layers of a kind share theirs
        if key not in known:
            # What runs again adds to what runs: no candidate is faster for it.
            once = [candidate for candidate in candidates if candidate.recompute is None]
            bills = [pricer.bill(path, candidate) for candidate in once or candidates]
            each = min(b.each_s(pricer.setting.microbatches) for b in bills)
            known[key] = each, min(b.step_s for b in bills)
        each_s += known[key][0]
        once_s += known[key][1]
    return each_s, once_s

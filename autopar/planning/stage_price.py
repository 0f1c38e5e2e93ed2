"""Candidates → PlanningProblem where layers lie in stages: what each choice costs each stage."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.graph.model_graph import Block
from autopar.layouts.layout import Layout
from autopar.layouts.saved import shared_residents
from autopar.layouts.stages import Cut, Here, heres
from autopar.layouts.typing import input_layout
from autopar.planning.joined import Taken, unit_edges
from autopar.planning.price import Need, Pricer, SlotKey
from autopar.planning.prices import Bill
from autopar.planning.problem import Choice, Edge, PlanningProblem, Share, Slot, Stages
from autopar.planning.region_effects import (
    boundary_effects,
    buffer_effects,
    handed_on,
    input_effects,
    unused_effects,
)
from autopar.plugin import Candidate, Collective, Effect, Schedule

Extra = Mapping[tuple[SlotKey, int], list[float]]
"""Seconds of a microbatch by (slot, part), for each of the slot's choices."""


@dataclass(frozen=True)
class StagePricer:
    """Prices one setting whose layers are cut into parts."""

    pricer: Pricer
    cut: Cut

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
        candidates = self.pricer.candidates
        index = {key: i for i, key in enumerate(candidates)}
        extra: dict[tuple[SlotKey, int], list[float]] = defaultdict(list)
        edges = list(self._edges(index, extra))
        self._add_sends(extra)
        slots = tuple(self._slot(key, extra) for key in candidates)
        edges += self._unit_edges(index)
        edges += self.pricer.together_edges()
        table = self.schedule.table
        stages = Stages(
            table.per_slowest,
            table.per_stage,
            tuple(table.in_flight(stage) for stage in range(table.stages)),
        )
        return PlanningProblem(
            slots,
            tuple(edges),
            limit_bytes,
            covers=self.pricer.covers(),
            stages=stages,
            base_shares=tuple(self._base()),
        )

    # ------------------------------------------------------------ slots

    def _parts(self, path: str) -> range | tuple[int]:
        return range(self.cut.count) if path == "" else (self.cut.part_of(path),)

    def stage_of_layer(self, path: str) -> int:
        """Where a layer lies."""
        return self.cut.part_of(path) % self.schedule.table.stages

    def _bill(self, path: str, candidate: Candidate, part: int) -> Bill:
        return self.pricer.bill(path, candidate, self.heres[part] if path == "" else None)

    def _slot(self, key: SlotKey, extra: Extra) -> Slot:
        choices = []
        for c, candidate in enumerate(self.pricer.candidates[key]):
            shares = []
            for part in range(self.cut.count):
                more = extra[key, part][c] if (key, part) in extra else 0.0
                if part in self._parts(key[0]):
                    shares.append(self.share(self._bill(key[0], candidate, part), part, more))
                elif (key, part) in extra:  # the gradient of what it makes
                    shares.append(self.share(Bill(), part, more))
            seconds = sum(s.seconds * self.microbatches + s.step_seconds for s in shares)
            resident = sum(s.resident_bytes + sum(s.held_bytes) for s in shares)
            transient = max(s.transient_bytes for s in shares)
            choices.append(Choice(seconds, resident, transient, tuple(shares)))
        return Slot(f"{key[0]}/{key[1]}", tuple(choices), key[0])

    def share(self, bill: Bill, part: int, more: float = 0.0) -> Share:
        """A bill as the share of the stage that has a part; `more` seconds a microbatch."""
        stages, chunks = self.schedule.table.stages, self.schedule.table.chunks
        held = tuple(bill.held_bytes if chunk == part // stages else 0 for chunk in range(chunks))
        return Share(
            part % stages,
            (bill.seconds - bill.step_s) / self.microbatches + more,
            bill.step_s,
            bill.resident_bytes - bill.held_bytes,
            held,
            bill.transient_bytes,
        )

    def _base(self) -> Iterator[Share]:
        model, setting, prices = self.pricer.model, self.pricer.setting, self.pricer.prices
        for stage in range(self.schedule.table.stages):
            yield Share(stage, resident_bytes=prices.overhead_bytes(), held_bytes=())
        for part, where in enumerate(self.heres):
            effects: list[Effect] = [*unused_effects(model)] if part == 0 else []
            effects += [*input_effects(model.skeleton, setting, where)]
            effects += [*buffer_effects(model.skeleton, where)]
            effects += boundary_effects(model.skeleton, self.cut, part, self._at_most, setting)
            effects += shared_residents(model, setting, self.cut.layers[part])
            for path in self.cut.layers[part]:
                block = self.pricer.block(path)
                effects += [*input_effects(block, setting), *buffer_effects(block)]
            bill = prices.bill(effects, self.microbatches)
            resident = bill.resident_bytes + bill.transient_bytes
            bill = replace(bill, resident_bytes=resident, transient_bytes=0)
            yield self.share(bill, part)

    def _at_most(self, name: str) -> Layout:
        """A layout of a value of the skeleton that no choice makes larger."""
        return input_layout(self.pricer.model.skeleton.values[name], self.pricer.setting)

    # ------------------------------------------------------------ values

    def _edges(
        self, index: Mapping[SlotKey, int], extra: dict[tuple[SlotKey, int], list[float]]
    ) -> Iterator[Edge]:
        for path, block in self.pricer.model.instances():
            for name, made, needs in self._values(path, block):
                again = self.pricer.runs_again(path, made[0], name)
                for part, uses in needs.items():
                    for need in uses:
                        if need[0] == made[0]:
                            self._add_inside(block, name, made, need, part, again, extra)
                    across = [need for need in uses if need[0] != made[0]]
                    edge = self.pricer.edge(path, block, name, made, across, index)
                    if edge is not None:
                        yield self._at(edge, part)

    def _at(self, edge: Edge, part: int) -> Edge:
        """An edge's seconds of a step as those of a microbatch on the part's stage."""
        seconds = tuple(
            tuple(None if s is None else s / self.microbatches for s in row) for row in edge.seconds
        )
        stage = part % self.schedule.table.stages
        return replace(edge, seconds=seconds, stage=stage, name=f"{edge.name} in {part}")

    def _values(self, path: str, block: Block) -> Iterator[tuple[str, Need, dict[int, list[Need]]]]:
        """Every activation: where it is made, and its distinct needs in each part."""
        for node in block.graph.nodes:
            value = block.values.get(node.name)
            if value is None or block.is_weight(node.name) or node.name in block.prologue:
                continue
            needs: dict[int, dict[Need, None]] = {}
            for user in node.users:
                if user.name in block.prologue:
                    continue
                need = self.pricer.need(path, block, user, node, value)
                if need is not None:
                    parts = self.cut.parts[user.name] if path == "" else self._parts(path)
                    for part in parts:
                        needs.setdefault(part, {})[need] = None
            if needs:
                made = self.pricer.made(path, block, node, value)
                yield node.name, made, {part: list(found) for part, found in needs.items()}

    def _add_inside(
        self,
        block: Block,
        name: str,
        made: Need,
        need: Need,
        part: int,
        again: Sequence[bool],
        extra: dict[tuple[SlotKey, int], list[float]],
    ) -> None:
        for c, (start, end) in enumerate(zip(made[1], need[1], strict=True)):
            seconds = self.pricer.conversion_s(block, name, start, end, again[c])
            assert seconds is not None, (made[0], name)
            self._add(extra, made[0], part, c, seconds / self.microbatches)

    def _add(
        self,
        extra: dict[tuple[SlotKey, int], list[float]],
        key: SlotKey,
        part: int,
        choice: int,
        seconds: float,
    ) -> None:
        row = extra[key, part]
        if not row:
            row += [0.0] * len(self.pricer.candidates[key])
        row[choice] += seconds

    def _add_sends(self, extra: dict[tuple[SlotKey, int], list[float]]) -> None:
        """Each stage pays for what it sends: values onwards, gradients back."""
        skeleton, setting = self.pricer.model.skeleton, self.pricer.setting
        axis = setting.mesh.part(self.schedule.axis)
        for part, names in enumerate(self.cut.boundaries):
            for name in names:
                value, node = skeleton.values[name], skeleton.node(name)
                key, layouts = self.pricer.made("", skeleton, node, value)
                for c, layout in enumerate(layouts):
                    for forward in (True, False) if value.needs_grad else (True,):
                        send = handed_on(value, name, layout, setting, forward, axis)
                        seconds = self.pricer.prices.cost(send)
                        self._add(extra, key, part if forward else part + 1, c, seconds)

    # ------------------------------------------------------------ joined calls

    def _unit_edges(self, index: Mapping[SlotKey, int]) -> Iterator[Edge]:
        def call_s(effect: Effect) -> float:
            assert isinstance(effect, Collective)
            return self.pricer.prices.cost(effect)

        for once in (False, True):
            units: dict[tuple[str, int], dict[int, list[Taken]]] = {}
            for key, choices in self.pricer.candidates.items():
                for part in self._parts(key[0]):
                    taken = [
                        frozenset(
                            call
                            for call in self._bill(key[0], candidate, part).units
                            if (call.per == "step") == once
                        )
                        for candidate in choices
                    ]
                    units.setdefault((key[0], part), {})[index[key]] = taken
            for (path, part), slots in units.items():
                for edge in unit_edges({path: slots}, call_s):
                    stage = part % self.schedule.table.stages
                    yield replace(edge, stage=stage, once=once, name=f"{edge.name} in {part}")


def least_work(pricer: Pricer) -> tuple[float, float]:
    """Seconds of a microbatch and seconds once a step, each region by its fastest choice: the same
    under every schedule."""
    each_s, once_s = 0.0, 0.0
    known: dict[tuple[int, tuple[Candidate, ...]], tuple[float, float]] = {}
    for (path, _), candidates in pricer.candidates.items():
        key = (id(pricer.block(path)), candidates)  # layers of a kind have the same
        if key not in known:
            bills = [pricer.bill(path, candidate) for candidate in candidates]
            each = min(b.seconds - b.step_s for b in bills) / pricer.setting.microbatches
            known[key] = each, min(b.step_s for b in bills)
        each_s += known[key][0]
        once_s += known[key][1]
    return each_s, once_s


def schedule_bound(schedule: Schedule, work: tuple[float, float]) -> float:
    """No cut of the layers is faster: the stages together have at least all the work, and the
    slowest has at least its share."""
    table = schedule.table
    pace = table.per_slowest / table.stages + table.per_stage
    return pace * work[0] + work[1] / table.stages

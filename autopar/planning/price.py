"""Candidates → PlanningProblem: everything a number, conversions as edges between slots."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.fx

from autopar.graph.model_graph import STREAM, Block, ModelGraph, Value
from autopar.layouts.convert import ImpossibleError, convert
from autopar.layouts.effects import step_effects
from autopar.layouts.flow import normal
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.stages import Here
from autopar.layouts.typing import RegionTyping, boundary_layout, input_layout, type_region
from autopar.planning.joined import Taken, unit_edges
from autopar.planning.prices import Bill, Prices
from autopar.planning.problem import Choice, Cover, Edge, PlanningProblem, Slot, Use
from autopar.planning.region_effects import (
    buffer_effects,
    input_effects,
    region_effects,
    unused_effects,
)
from autopar.plugin import Candidate, Collective, Effect

SlotKey = tuple[str, str]
"""(layer path, region)."""
RegionCandidates = Mapping[SlotKey, tuple[Candidate, ...]]
Need = tuple[SlotKey, tuple[Layout, ...]]
"""A slot, and the layout that each of its choices needs or makes."""


@dataclass
class Pricer:
    """Prices one setting. Identical layers share their typings, bills and conversions."""

    model: ModelGraph
    setting: Setting
    prices: Prices
    candidates: RegionCandidates
    state_ratio: float
    typings: dict[tuple[int, Candidate], RegionTyping] = field(default_factory=dict)
    bills: dict[tuple[int, Candidate, object], Bill] = field(default_factory=dict)
    conversions: dict[tuple[int, str, Layout, Layout], float | None] = field(default_factory=dict)

    def problem(self, limit_bytes: int) -> PlanningProblem:
        """The whole problem, slots in model order."""
        keys = list(self.candidates)
        index = {key: i for i, key in enumerate(keys)}
        extra: dict[SlotKey, list[float | None]] = {
            key: [0.0] * len(self.candidates[key]) for key in keys
        }
        edges = []
        for path, block in self.model.instances():
            for name, made, needs in self._values(path, block):
                inside = [n for n in needs if n[0] == made[0]]
                across = [n for n in needs if n[0] != made[0]]
                for need in inside:
                    self._add_inside(block, name, made, need, extra[made[0]])
                edge = self.edge(path, block, name, made, across, index)
                if edge is not None:
                    edges.append(edge)
        slots = tuple(self._slot(key, extra[key]) for key in keys)
        edges += self._unit_edges(index)
        base = self._base()
        return PlanningProblem(
            slots,
            tuple(edges),
            limit_bytes,
            base.seconds,
            base.resident_bytes + self.prices.overhead_bytes(),
            self.covers(),
        )

    def at(self, setting: Setting) -> "Pricer":
        """The same under another schedule, on which no price of an effect depends."""
        return replace(self, setting=setting)

    def covers(self) -> tuple[Cover, ...]:
        """Every axis of the mesh is there to be used; that of the stages is."""
        schedule = self.setting.schedule
        return tuple(
            Cover(
                axis,
                tuple(
                    tuple(i for i, c in enumerate(choices) if c.uses(axis))
                    for choices in self.candidates.values()
                ),
            )
            for axis, size in self.setting.mesh.axes
            if size > 1 and (schedule is None or axis != schedule.axis)
        )

    def bill(self, path: str, candidate: Candidate, here: Here | None = None) -> Bill:
        """What a candidate's region comes to, without conversions; of the skeleton's, what one part
        has of it."""
        block = self.block(path)
        key = (id(block), candidate, None if here is None else (here.cut.counts, here.part))
        if key not in self.bills:
            typing = self.typing(block, candidate)
            effects = region_effects(
                block, typing, self.setting, self.state_ratio, path != "", here
            )
            bill = self.prices.bill(effects, self.setting.microbatches)
            if path == "":  # the skeleton's gathered parameters stay for the whole step
                resident = bill.resident_bytes + bill.transient_bytes
                bill = replace(bill, resident_bytes=resident, transient_bytes=0)
            self.bills[key] = bill
        return self.bills[key]

    # ------------------------------------------------------------ slots

    def _slot(self, key: SlotKey, extra: Sequence[float | None]) -> Slot:
        choices = []
        for candidate, more in zip(self.candidates[key], extra, strict=True):
            bill = self.bill(key[0], candidate)
            assert more is not None, (key, candidate)
            choices.append(Choice(bill.seconds + more, bill.resident_bytes, bill.transient_bytes))
        return Slot(f"{key[0]}/{key[1]}", tuple(choices), key[0])

    def _base(self) -> Bill:
        total = self.prices.bill(unused_effects(self.model), self.setting.microbatches)
        for _, block in self.model.instances():
            effects = [*input_effects(block, self.setting), *buffer_effects(block)]
            total += self.prices.bill(effects, self.setting.microbatches)
        return total

    def block(self, path: str) -> Block:
        """The block of a layer, or of the skeleton ("")."""
        if path == "":
            return self.model.skeleton
        return self.model.blocks[next(x.block for x in self.model.layers if x.path == path)]

    def typing(self, block: Block, candidate: Candidate) -> RegionTyping:
        """The layouts of a candidate's region."""
        key = (id(block), candidate)
        if key not in self.typings:
            self.typings[key] = type_region(block, candidate)
        return self.typings[key]

    # ------------------------------------------------------------ values that cross

    def _values(self, path: str, block: Block) -> Iterator[tuple[str, Need, list[Need]]]:
        """Every activation: where it is made, and each distinct need of it."""
        for node in block.graph.nodes:
            value = block.values.get(node.name)
            if value is None or block.is_weight(node.name) or node.name in block.prologue:
                continue
            needs = {
                need: None
                for user in node.users
                if user.name not in block.prologue
                and (need := self.need(path, block, user, node, value)) is not None
            }
            if needs:
                yield node.name, self.made(path, block, node, value), list(needs)

    def made(self, path: str, block: Block, node: torch.fx.Node, value: Value) -> Need:
        """The slot that makes a value, and in which layouts."""
        call = self._layer_of(block, node)
        if call is not None:
            callee_path = str(call.args[1])
            callee = self.block(callee_path)
            inner = callee.values[callee.outputs()[node.args[1]].name]  # type: ignore[index]
            return self._boundary(callee_path, inner, value)
        if node.op == "placeholder":
            return self._boundary(path, value, value)
        region = block.ops[node.name].region
        if region is None:
            return self._fixed(path, value)
        key = (path, region)
        return key, tuple(
            normal(value, self.typing(block, c).ops[node.name].makes) for c in self.candidates[key]
        )

    @staticmethod
    def _layer_of(block: Block, node: torch.fx.Node) -> torch.fx.Node | None:
        """The layer call that a node is an output of, or None."""
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, torch.fx.Node) or source.name not in block.ops:
            return None
        return source if block.ops[source.name].kind == "layer" else None

    def need(
        self, path: str, block: Block, user: torch.fx.Node, node: torch.fx.Node, value: Value
    ) -> Need | None:
        """The slot that needs a value, and in which layouts; None for the loss."""
        if user.op == "output":
            return self._boundary(path, value, value) if path else None
        op = block.ops[user.name]
        if op.kind == "layer":
            callee_path = str(user.args[1])
            callee = self.block(callee_path)
            position = list(user.args[0]).index(node)  # type: ignore[arg-type]
            return self._boundary(callee_path, callee.values[callee.inputs()[position]], value)
        if op.region is None:
            return self._fixed(path, value)
        key = (path, op.region)
        return key, tuple(
            normal(value, self.typing(block, c).ops[user.name].needs[node.name])
            for c in self.candidates[key]
        )

    def _boundary(self, path: str, inner: Value, outer: Value) -> Need:
        key = (path, STREAM)
        return key, tuple(
            normal(outer, boundary_layout(inner, c, self.setting)) for c in self.candidates[key]
        )

    def _fixed(self, path: str, value: Value) -> Need:
        key = (path, STREAM)
        layout = normal(value, input_layout(value, self.setting))
        return key, (layout,) * len(self.candidates[key])

    # ------------------------------------------------------------ edges

    def _unit_edges(self, index: Mapping[SlotKey, int]) -> Iterator[Edge]:
        units: dict[str, dict[int, list[Taken]]] = {}
        for key, choices in self.candidates.items():
            taken = [self.bill(key[0], candidate).units for candidate in choices]
            units.setdefault(key[0], {})[index[key]] = taken

        def call_s(effect: Effect) -> float:
            assert isinstance(effect, Collective)
            times = self.setting.microbatches if effect.per == "microbatch" else 1
            return self.prices.cost(effect) * times

        return unit_edges(units, call_s)

    def conversion_s(self, block: Block, name: str, made: Layout, need: Layout) -> float | None:
        """Seconds of a conversion in one step; None where it is impossible."""
        key = (id(block), name, made, need)
        if key not in self.conversions:
            try:
                steps = convert(block.values[name], made, need, self.setting)
            except ImpossibleError:
                self.conversions[key] = None
            else:
                bill = self.prices.bill(step_effects(steps, name), self.setting.microbatches)
                self.conversions[key] = bill.seconds
        return self.conversions[key]

    def _add_inside(
        self, block: Block, name: str, made: Need, need: Need, extra: list[float | None]
    ) -> None:
        for i, (start, end) in enumerate(zip(made[1], need[1], strict=True)):
            seconds = self.conversion_s(block, name, start, end)
            before = extra[i]
            extra[i] = None if seconds is None or before is None else before + seconds

    def edge(
        self,
        path: str,
        block: Block,
        name: str,
        made: Need,
        needs: list[Need],
        index: Mapping[SlotKey, int],
    ) -> Edge | None:
        """A value as an edge between slots; None where it costs nothing."""
        layouts = list(dict.fromkeys([*made[1], *(x for need in needs for x in need[1])]))
        number = {layout: i for i, layout in enumerate(layouts)}
        sources, targets = set(made[1]), {x for need in needs for x in need[1]}
        table = tuple(
            tuple(
                self.conversion_s(block, name, a, b) if a in sources and b in targets else 0.0
                for b in layouts
            )
            for a in layouts
        )
        if all(x == 0.0 for row in table for x in row):
            return None
        zero = tuple((0,) * len(layouts) for _ in layouts)
        uses = tuple(Use(index[key], tuple(number[x] for x in row)) for key, row in needs)
        source = Use(index[made[0]], tuple(number[x] for x in made[1]))
        return Edge(f"{path}:{name}", source, uses, table, zero)

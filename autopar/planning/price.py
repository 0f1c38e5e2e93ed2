"""Candidates → PlanningProblem: everything a number, conversions as edges between slots."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch.fx

from autopar.graph.model_graph import STREAM, Block, ModelGraph, Value
from autopar.layouts.again import Reach, reach, steps_again
from autopar.layouts.convert import ImpossibleError, convert
from autopar.layouts.effects import step_effects
from autopar.layouts.flow import normal
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.program import group_of
from autopar.layouts.saved import shared_residents
from autopar.layouts.stages import Here
from autopar.layouts.state_ratio import StateRatio
from autopar.layouts.typing import RegionTyping, boundary_layout, input_layout
from autopar.planning.joined import Taken, unit_edges
from autopar.planning.prices import Bill, Prices
from autopar.planning.problem import Choice, Cover, Edge, PlanningProblem, Slot, Use
from autopar.planning.region_effects import (
    buffer_effects,
    input_effects,
    one_param,
    unused_effects,
)
from autopar.planning.together import of_layer, together_edges
from autopar.planning.works import Likeness, Works, likeness
from autopar.plugin import Candidate, Collective, Effect, ParamPlan, Recomputed

SlotKey = tuple[str, str]
"""(layer path, region)."""
RegionCandidates = Mapping[SlotKey, tuple[Candidate, ...]]
Need = tuple[SlotKey, tuple[Layout, ...]]
"""A slot, and the layout that each of its choices needs or makes."""
Cross = tuple[Layout, bool]
"""A layout in which a value crosses, and whether its layer runs again in the backward."""


@dataclass
class Pricer:
    """Prices one setting. Identical layers share their typings, bills and conversions."""

    model: ModelGraph
    setting: Setting
    prices: Prices
    candidates: RegionCandidates
    state_ratio: StateRatio
    works: Works
    bills: dict[tuple[object, ...], Bill] = field(default_factory=dict)
    param_bills: dict[tuple[object, ...], Bill] = field(default_factory=dict)
    conversions: dict[tuple[int, str, Layout, Layout, bool], float | None] = field(
        default_factory=dict
    )
    reaches: dict[tuple[int, Candidate, bool], Reach | None] = field(default_factory=dict)
    groups: dict[tuple[str, Recomputed | None], tuple[str, ...]] = field(default_factory=dict)

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
                again = self.runs_again(path, made[0], name)
                for need in inside:
                    self._add_inside(block, name, made, need, again, extra[made[0]])
                edge = self.edge(path, block, name, made, across, index)
                if edge is not None:
                    edges.append(edge)
        slots = tuple(self._slot(key, extra[key]) for key in keys)
        edges += self._unit_edges(index)
        edges += self.together_edges()
        base = self._base()
        return PlanningProblem(
            slots,
            tuple(edges),
            limit_bytes,
            base.seconds,
            base.resident_bytes + self.prices.overhead_bytes(),
            self.covers(),
        )

    @functools.cached_property
    def alike(self) -> Likeness:
        """The setting's reduced form."""
        return likeness(self.setting)

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

    def runs_again(self, path: str, maker: SlotKey, name: str) -> list[bool]:
        """For each choice of the slot that makes a value: whether its conversions run again."""
        mine = maker[0] == path
        return [mine and self._again(path, c, name) for c in self.candidates[maker]]

    def together_edges(self) -> Iterator[Edge]:
        """What runs again as a whole goes together."""
        return together_edges(self.candidates, self._group)

    def bill(self, path: str, candidate: Candidate, here: Here | None = None) -> Bill:
        """What a candidate's region comes to, without conversions; of the skeleton's, what one part
        has of it."""
        block, group = self.block(path), self._group(path, candidate)
        part = None if here is None else (here.cut.counts, here.part)
        key = (id(block), candidate, part, len(group), path == group[0], path == group[-1])
        if key not in self.bills:
            work = self.works.of(block, candidate, self.setting, self.alike, path, group, here)
            times = self.setting.microbatches
            bill = replace(work.local, compute_s=work.local.compute_s * times)
            bill += self.prices.bill(work.collectives, times)
            for name, layout in work.params.items():
                plan = candidate.param(name)
                bill += self._param_bill(block, name, layout, plan, path != "", here)
            if path == "":  # the skeleton's gathered parameters stay for the whole step
                resident = bill.resident_bytes + bill.transient_bytes
                bill = replace(bill, resident_bytes=resident, transient_bytes=0)
            self.bills[key] = bill
        return self.bills[key]

    def _param_bill(
        self,
        block: Block,
        name: str,
        layout: Layout,
        plan: ParamPlan,
        neighbours: bool,
        here: Here | None,
    ) -> Bill:
        part = None if here is None else (here.cut.counts, here.part)
        key = (id(block), name, layout, plan, neighbours, part)
        if key not in self.param_bills:
            effects = one_param(
                *(block, plan, name, layout, self.setting, self.state_ratio, neighbours, here)
            )
            self.param_bills[key] = self.prices.bill(effects, self.setting.microbatches)
        return self.param_bills[key]

    def _group(self, path: str, candidate: Candidate) -> tuple[str, ...]:
        """The layers that run again with a layer whose region does this."""
        key = (path, candidate.recompute)
        if key not in self.groups:
            self.groups[key] = group_of(self.model, path, candidate)
        return self.groups[key]

    # ------------------------------------------------------------ slots

    def _slot(self, key: SlotKey, extra: Sequence[float | None]) -> Slot:
        choices = []
        for candidate, more in zip(self.candidates[key], extra, strict=True):
            bill = self.bill(key[0], candidate)
            assert more is not None, (key, candidate)
            choices.append(Choice(bill.seconds + more, bill.resident_bytes, bill.transient_bytes))
        return Slot(f"{key[0]}/{key[1]}", tuple(choices), key[0])

    def _base(self) -> Bill:
        all_layers = (
            *unused_effects(self.model),
            *shared_residents(self.model, self.setting, [x.path for x in self.model.layers]),
        )
        total = self.prices.bill(all_layers, self.setting.microbatches)
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
        return self.works.typing(block, candidate)

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

    def conversion_s(
        self, block: Block, name: str, made: Layout, need: Layout, again: bool = False
    ) -> float | None:
        """Seconds of a conversion in one step, `again` in the backward as well; None where it is
        impossible."""
        key = (id(block), name, made, need, again)
        if key not in self.conversions:
            try:
                steps = convert(block.values[name], made, need, self.setting)
            except ImpossibleError:
                self.conversions[key] = None
            else:
                effects = [*step_effects(steps, name), *(steps_again(steps, name) if again else ())]
                bill = self.prices.bill(effects, self.setting.microbatches)
                self.conversions[key] = bill.seconds
        return self.conversions[key]

    def _again(self, path: str, candidate: Candidate, name: str) -> bool:
        """Whether conversions of a value inside its region, or its layer, run again."""
        block, ends = self.block(path), path == self._group(path, candidate)[-1]
        key = (id(block), candidate, ends)
        if key not in self.reaches:
            self.reaches[key] = reach(block, candidate, ends)
        found = self.reaches[key]
        if found is None or (found.scope == "region" and name not in block.ops):
            return False
        return any(found.takes(user.name) for user in block.node(name).users)

    def _add_inside(
        self,
        block: Block,
        name: str,
        made: Need,
        need: Need,
        again: Sequence[bool],
        extra: list[float | None],
    ) -> None:
        for i, (start, end) in enumerate(zip(made[1], need[1], strict=True)):
            seconds = self.conversion_s(block, name, start, end, again[i])
            before = extra[i]
            extra[i] = None if seconds is None or before is None else before + seconds

    def _crosses(self, path: str, block: Block, name: str, need: Need) -> tuple[Cross, ...]:
        """With what a slot's choices make or need of a value of the block: whether the layer runs
        again, and the value's conversions with it."""
        out = []
        for layout, candidate in zip(need[1], self.candidates[need[0]], strict=True):
            whole = need[0][0] == path and of_layer(candidate) is not None
            out.append((layout, whole and self._again(path, candidate, name)))
        return tuple(out)

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
        source = self._crosses(path, block, name, made)
        rows = [self._crosses(path, block, name, need) for need in needs]
        number = {one: i for i, one in enumerate(dict.fromkeys([*source, *chain(*rows)]))}
        sources, targets = set(source), set(chain(*rows))

        def seconds(a: Cross, b: Cross) -> float | None:
            if a not in sources or b not in targets:
                return 0.0
            # Regions of one layer agree: what a pair that can't occur costs doesn't matter.
            return self.conversion_s(block, name, a[0], b[0], a[1] and b[1])

        table = tuple(tuple(seconds(a, b) for b in number) for a in number)
        if all(x == 0.0 for row in table for x in row):
            return None
        zero = tuple((0,) * len(number) for _ in number)
        uses = tuple(
            Use(index[key], tuple(number[x] for x in row))
            for (key, _), row in zip(needs, rows, strict=True)
        )
        start = Use(index[made[0]], tuple(number[x] for x in source))
        return Edge(f"{path}:{name}", start, uses, table, zero)

"""Candidates → PlanningProblem: everything a number, conversions as edges between slots."""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch.fx

from autopar.graph.model_graph import STREAM, Block, ModelGraph, Value
from autopar.layouts.again import Reach, reach, steps_again
from autopar.layouts.convert import ImpossibleError, convert
from autopar.layouts.effects import step_effects
from autopar.layouts.flow import normal
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.program import group_of
from autopar.layouts.stages import Here
from autopar.layouts.state_ratio import StateRatio
from autopar.layouts.typing import RegionTyping, boundary_layout, input_layout
from autopar.planning.joined import Late
from autopar.planning.prices import Bill, Prices
from autopar.planning.problem import Edge, Use
from autopar.planning.region_effects import (
    buffer_effects,
    input_effects,
    one_param,
    scalar_collectives,
    unused_effects,
)
from autopar.planning.together import of_layer
from autopar.planning.weights import Weights, weighted
from autopar.planning.works import Likeness, Works, likeness
from autopar.plugin import Candidate, ParamPlan, Recomputed

SlotKey = tuple[str, str]
"""(layer path, region)."""
RegionCandidates = Mapping[SlotKey, tuple[Candidate, ...]]


class LayoutRow(tuple[Layout, ...]):
    """The layout that each choice of a slot needs or makes; many are compared, so it is hashed
    once."""

    def __hash__(self) -> int:
        if "own" not in self.__dict__:
            self.__dict__["own"] = super().__hash__()
        own: int = self.__dict__["own"]
        return own


Need = tuple[SlotKey, LayoutRow]
"""A slot, and what its choices need or make."""
Layouts = tuple[tuple[str, Layout], ...]
"""How parameters are stored, by name."""
Cross = tuple[Layout, bool]
"""A layout in which a value crosses, and whether its layer runs again in the backward."""


_PRICED = ("bills", "ops_bills", "param_bills", "conversions", "kinds", "weighed")


@dataclass
class Pricer:
    """Prices one setting. Identical layers share their typings, bills and conversions."""

    model: ModelGraph
    setting: Setting
    prices: Prices
    candidates: RegionCandidates
    state_ratio: StateRatio
    works: Works
    with_params: bool = True
    """Whether bills have what parameters come to: gathers, reductions, optimizer, bytes."""
    bills: dict[tuple[object, ...], Bill] = field(default_factory=dict)
    ops_bills: dict[tuple[object, ...], tuple[Bill, Layouts]] = field(default_factory=dict)
    param_bills: dict[tuple[object, ...], Bill] = field(default_factory=dict)
    conversions: dict[tuple[Value, Layout, Layout, bool], Late | None] = field(default_factory=dict)
    boundaries: dict[Hashable, LayoutRow] = field(default_factory=dict)
    reaches: dict[Hashable, Reach | None] = field(default_factory=dict)
    runs_again: dict[Hashable, bool] = field(default_factory=dict)
    crossing: dict[str, tuple[tuple[str, "Need", tuple["Need", ...]], ...]] = field(
        default_factory=dict
    )
    groups: dict[tuple[str, Recomputed | None], tuple[str, ...]] = field(default_factory=dict)
    typings: dict[Hashable, tuple[RegionTyping, ...]] = field(default_factory=dict)
    kinds: dict[Hashable, Any] = field(default_factory=dict)
    """What `kinds` makes of alike layers, and of parts of the skeleton."""
    weighed: dict[Weights, "Pricer"] = field(default_factory=dict)

    @functools.cached_property
    def alike(self) -> Likeness:
        """The setting's reduced form."""
        return likeness(self.setting)

    def at(self, setting: Setting) -> "Pricer":
        """The same under another schedule, on which no price of an effect depends."""
        return replace(self, setting=setting)

    def weighing(self, weights: Weights) -> "Pricer":
        """The same by other weights, once for all schedules."""
        if weights not in self.weighed:
            prices = replace(self.prices, weights=weights, known={})
            self.weighed[weights] = replace(self._unpriced(), prices=prices, weighed=self.weighed)
        return self.weighed[weights].at(self.setting)

    def sized(self, microbatches: int) -> "Pricer":
        """The same with another number of microbatches, on which no layout depends."""
        return replace(
            self._unpriced(),
            setting=replace(self.setting, microbatches=microbatches),
            prices=self.prices.on(self.prices.mesh),
        )

    def _unpriced(self) -> "Pricer":
        """Layouts without prices."""
        empty: dict[str, Any] = {name: {} for name in _PRICED}
        return replace(self, **empty)

    def bill(self, path: str, candidate: Candidate, here: Here | None = None) -> Bill:
        """What a candidate's region comes to, without conversions; of the skeleton's, what one part
        has of it."""
        block, group = self.block(path), self._group(path, candidate)
        place = (self.part(here), len(group), path == group[0], path == group[-1])
        key = (id(block), candidate, place)
        if key not in self.bills:
            only = self.works.only(candidate)
            ops, layouts = self._ops_bill(path, block, only, group, here, place)
            bill = ops
            if self.with_params:
                bill += self.params_bill(block, layouts, candidate.params, path != "", here)
            if path == "":
                # Gathered parameters stay for the whole step.
                resident = bill.resident_bytes + bill.transient_bytes
                bill = replace(bill, resident_bytes=resident, transient_bytes=0)
            self.bills[key] = bill
        return self.bills[key]

    def part(self, here: Here | None) -> Hashable:
        """What of a part of the skeleton its bills depend on: most parts have nothing of it."""
        if here is None:
            return None
        return self.works.parts.of(self.model.skeleton, here).regions

    def outside_bill(self, here: Here) -> Bill:
        """What a part of the skeleton has beside regions: ops on inputs, buffers."""
        skeleton = self.model.skeleton
        key = ("outside", self.works.parts.of(skeleton, here).outside)
        if key not in self.bills:
            effects = [*input_effects(skeleton, self.setting, here)]
            effects += buffer_effects(skeleton, here)
            self.bills[key] = self.prices.bill(effects, self.setting.microbatches)
        return self.bills[key]

    def _ops_bill(
        self,
        path: str,
        block: Block,
        only: Candidate,
        group: tuple[str, ...],
        here: Here | None,
        place: tuple[Hashable, ...],
    ) -> tuple[Bill, Layouts]:
        """What a region's ops come to, and how they want its parameters."""
        key = (id(block), only, place)
        if key not in self.ops_bills:
            args = (self.setting, self.alike, path, group, here, place)
            work = self.works.of(block, only, *args)
            times = self.setting.microbatches
            weights, each_s, ends_s = self.prices.weights, 0.0, 0.0
            for window, device_s, host_s in work.spent:
                each_s += weighted(weights.of(window), (device_s, host_s, 0.0))
                ends_s += weighted(weights.at_the_end(window), (device_s, host_s, 0.0))
            once_s = ends_s - each_s
            bill = replace(work.held, compute_s=each_s * times + once_s, step_s=once_s)
            bill += self.prices.bill(work.collectives, times)
            if path == "":
                bill += self._of_loss(only, here)
            self.ops_bills[key] = bill, tuple(work.params.items())
        return self.ops_bills[key]

    def params_bill(
        self,
        block: Block,
        layouts: Layouts,
        plans: tuple[tuple[str, ParamPlan], ...],
        neighbours: bool,
        here: Here | None = None,
    ) -> Bill:
        """What a region's parameters come to, stored in these layouts."""
        key = (id(block), layouts, plans, neighbours, self.part(here))
        if key not in self.param_bills:
            chosen, bill = dict(plans), Bill()
            for name, layout in layouts:
                plan = chosen.get(name, ParamPlan())
                bill += self._param_bill(block, name, layout, plan, neighbours, here)
            self.param_bills[key] = bill
        return self.param_bills[key]

    def _param_bill(
        self,
        block: Block,
        name: str,
        layout: Layout,
        plan: ParamPlan,
        neighbours: bool,
        here: Here | None,
    ) -> Bill:
        key = (id(block), name, layout, plan, neighbours, self.part(here))
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

    def base(self) -> Bill:
        """What is there whatever is chosen, without stages."""
        total = self.prices.bill(unused_effects(self.model), self.setting.microbatches)
        known: dict[int, Bill] = {}
        for _, block in self.model.instances():
            if id(block) not in known:
                effects = [*input_effects(block, self.setting), *buffer_effects(block)]
                known[id(block)] = self.prices.bill(effects, self.setting.microbatches)
            total += known[id(block)]
        return total + self.scalars()

    def scalars(self) -> Bill:
        """The step's scalars, which every rank waits for: at least those, whatever is chosen."""
        return min(self._scalars.values(), key=lambda bill: bill.step_s)

    @functools.cached_property
    def _scalars(self) -> Mapping[Layout, Bill]:
        """Those of a step, by the layout in which the loss is made."""
        skeleton, setting = self.model.skeleton, self.setting
        (loss,) = skeleton.outputs()
        item = skeleton.values[loss.name].item_bytes
        stages = () if setting.schedule is None else (setting.schedule.axis,)
        _, layouts = self.made("", skeleton, loss, skeleton.values[loss.name])
        found = {}
        for layout in dict.fromkeys(layouts):
            sums = (*(part.axis for part in layout.partial), *stages)
            effects = scalar_collectives(len(skeleton.counts), item, setting, sums)
            found[layout] = self.prices.bill(effects, setting.microbatches)
        return found

    def _of_loss(self, candidate: Candidate, here: Here | None) -> Bill:
        """What the step's scalars cost on top of `scalars` for how a region makes the loss."""
        (loss,) = self.model.skeleton.outputs()
        op = self.model.skeleton.ops.get(loss.name)
        if op is None or op.region != candidate.region or not (here is None or here.has(loss.name)):
            return Bill()
        value = self.model.skeleton.values[loss.name]
        layout = normal(value, self.typing(self.model.skeleton, candidate).ops[loss.name].makes)
        more_s = self._scalars[layout].step_s - self.scalars().step_s
        return Bill(communication_s=more_s, step_s=more_s)

    def block(self, path: str) -> Block:
        """The block of a layer, or of the skeleton ("")."""
        return self._blocks[path]

    @functools.cached_property
    def _blocks(self) -> Mapping[str, Block]:
        return dict(self.model.instances())

    def typing(self, block: Block, candidate: Candidate) -> RegionTyping:
        """The layouts of a candidate's region."""
        return self.works.typing(block, candidate)

    # ------------------------------------------------------------ values that cross

    def values(self, path: str, block: Block) -> tuple[tuple[str, Need, tuple[Need, ...]], ...]:
        """Every activation of a layer, or of the skeleton: where it is made, and each distinct need
        of it."""
        if path not in self.crossing:
            self.crossing[path] = tuple(self._values(path, block))
        return self.crossing[path]

    def _values(self, path: str, block: Block) -> Iterator[tuple[str, Need, tuple[Need, ...]]]:
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
                yield node.name, self.made(path, block, node, value), tuple(needs)

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
        return key, self._each(key, block, lambda t: normal(value, t.ops[node.name].makes))

    def _each(
        self, key: SlotKey, block: Block, layout_of: Callable[[RegionTyping], Layout]
    ) -> LayoutRow:
        """A layout for each candidate of a slot; many have the same typing."""
        found: dict[int, Layout] = {}
        out = []
        for typing in self._typings(key, block):
            if id(typing) not in found:
                found[id(typing)] = layout_of(typing)
            out.append(found[id(typing)])
        return LayoutRow(out)

    def _typings(self, key: SlotKey, block: Block) -> tuple[RegionTyping, ...]:
        where = id(block), key[1], self.candidates[key]
        if where not in self.typings:
            self.typings[where] = tuple(self.works.layouts(block, c) for c in where[2])
        return self.typings[where]

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

        def needed(typing: RegionTyping) -> Layout:
            return normal(value, typing.ops[user.name].needs[node.name])

        return key, self._each(key, block, needed)

    def _boundary(self, path: str, inner: Value, outer: Value) -> Need:
        key = (path, STREAM)
        return key, self._across(self.candidates[key], inner, outer)

    def _across(self, streams: tuple[Candidate, ...], inner: Value, outer: Value) -> LayoutRow:
        where = (id(streams), inner, outer)
        if where not in self.boundaries:
            found: dict[object, Layout] = {}
            for candidate in streams:
                if candidate.splits not in found:
                    layout = boundary_layout(inner, candidate, self.setting)
                    found[candidate.splits] = normal(outer, layout)
            self.boundaries[where] = LayoutRow(found[candidate.splits] for candidate in streams)
        return self.boundaries[where]

    def _fixed(self, path: str, value: Value) -> Need:
        key = (path, STREAM)
        where = (id(self.candidates[key]), value)
        if where not in self.boundaries:
            layout = normal(value, input_layout(value, self.setting))
            self.boundaries[where] = LayoutRow((layout,) * len(self.candidates[key]))
        return key, self.boundaries[where]

    # ------------------------------------------------------------ edges

    def conversion_s(
        self, block: Block, name: str, made: Layout, need: Layout, again: bool = False
    ) -> Late | None:
        """Seconds of a conversion for one microbatch, `again` in the backward as well, and once a
        step; None where it is impossible."""
        value = block.values[name]
        key = (value, made, need, again)
        if key not in self.conversions:
            try:
                steps = convert(value, made, need, self.setting)
            except ImpossibleError:
                self.conversions[key] = None
            else:
                effects = [*step_effects(steps, name), *(steps_again(steps, name) if again else ())]
                bill = self.prices.bill(effects, 1)
                self.conversions[key] = bill.each_s(1), bill.step_s
        return self.conversions[key]

    def _again(self, path: str, candidate: Candidate, name: str) -> bool:
        """Whether conversions of a value inside its region, or its layer, run again."""
        if candidate.recompute is None:
            return False
        block, ends = self.block(path), path == self._group(path, candidate)[-1]
        key = (id(block), candidate.region, candidate.recompute, ends)
        if key not in self.reaches:
            self.reaches[key] = reach(block, candidate, ends)
        if (*key, name) not in self.runs_again:
            found = self.reaches[key]
            self.runs_again[*key, name] = (
                found is not None
                and (found.scope != "region" or name in block.ops)
                and any(found.takes(user.name) for user in block.node(name).users)
            )
        return self.runs_again[*key, name]

    def inside_s(self, path: str, name: str, made: Need, need: Need) -> list[Late]:
        """Seconds of a conversion inside one region, by candidate."""
        out, block = [], self.block(path)
        known: dict[tuple[Layout, Layout, bool], Late | None] = {}
        for candidate, start, end in zip(self.candidates[made[0]], made[1], need[1], strict=True):
            again = made[0][0] == path and self._again(path, candidate, name)
            key = (start, end, again)
            if key not in known:
                known[key] = self.conversion_s(block, name, *key)
            seconds = known[key]
            assert seconds is not None, (made[0], name, candidate)
            out.append(seconds)
        return out

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

        def seconds(a: Cross, b: Cross) -> Late | None:
            if a not in sources or b not in targets:
                return 0.0, 0.0
            # Regions of one layer agree: what a pair that can't occur costs doesn't matter.
            return self.conversion_s(block, name, a[0], b[0], a[1] and b[1])

        table = [[seconds(a, b) for b in number] for a in number]
        if all(x is not None and not any(x) for row in table for x in row):
            return None
        each, once = (
            tuple(tuple(None if x is None else x[i] for x in row) for row in table)
            for i in range(2)
        )
        zero = tuple((0,) * len(number) for _ in number)
        uses = tuple(
            Use(index[key], tuple(number[x] for x in row))
            for (key, _), row in zip(needs, rows, strict=True)
        )
        start = Use(index[made[0]], tuple(number[x] for x in source))
        return Edge(f"{path}:{name}", start, uses, each, zero, step_seconds=once)

"""Conversions between layouts: the one place where communication comes from.

| from → to | function (its backward) |
|---|---|
| I → V | enter: identity (all-reduce); Megatron's f |
| P → I | all_reduce (identity); Megatron's g |
| P → V | all_reduce_partial (all-reduce) |
| P → S | reduce_scatter (all-gather) |
| S → V | all_gather (reduce-scatter) |
| S → I | unshard: all-gather (slice) |
| I → S | shard: slice (all-gather) |
| V → S, or no gradient | local_part: slice (zero padding) |
| V → I | once: identity (kept on the first rank) |
| S(f) → S(g) | all_to_all (all-to-all) |
| S → D | dispatch: all-to-all (combine); of where experts' rows end: route |
| D → S | combine: all-to-all (dispatch) |
"""

from dataclasses import dataclass, replace
from typing import Literal

from autopar.graph.factors import Leaf, Order, expr_leaves
from autopar.graph.model_graph import Value
from autopar.layouts.layout import Layout, Setting
from autopar.mesh import AxisPart, Split, split_size

GATHERS = frozenset({"all_gather", "unshard"})
EXCHANGES = frozenset({"dispatch", "combine", "route"})
"""Steps that take rows to their experts and back, along a region's route."""
CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

FORWARD: dict[str, CollectiveOp] = {
    "all_reduce": "all_reduce",
    "all_reduce_partial": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "unshard": "all_gather",
    "dispatch": "all_to_all",
    "combine": "all_to_all",
    "route": "all_to_all",
    "all_to_all": "all_to_all",
}
BACKWARD: dict[str, CollectiveOp] = {
    "enter": "all_reduce",
    "all_reduce_partial": "all_reduce",
    "reduce_scatter": "all_gather",
    "all_gather": "reduce_scatter",
    "shard": "all_gather",
    "dispatch": "all_to_all",
    "combine": "all_to_all",
    "all_to_all": "all_to_all",
}


@dataclass(frozen=True)
class Step:
    """One runtime call: its function, the tensor dim it works along (None: none), its axes in mesh
    order, and its collectives with bytes per rank (the larger of input and output). `to`: of an
    all-to-all, the dim that is split where `dim` was. `balanced`: the dim of which ranks hold two
    chunks, one from each end."""

    function: str
    dim: int | None
    parts: Split
    forward: tuple[CollectiveOp, int] | None
    backward: tuple[CollectiveOp, int] | None
    to: int | None = None
    balanced: int | None = None


class ImpossibleError(Exception):
    """No sequence of steps makes this conversion."""


def convert(value: Value, made: Layout, needed: Layout, setting: Setting) -> tuple[Step, ...]:
    """The steps from one layout of a value to another. Errors: ImpossibleError."""
    made, needed = made.restrict(value.names), needed.restrict(value.names)
    if not value.needs_grad:
        made, needed = made.forward_only(), needed.forward_only()
    walk = _Walk(value, made, needed, setting)
    walk.combine()
    walk.reduce()
    walk.exchange()
    walk.gather()
    walk.slice()
    walk.relabel()
    walk.dispatch()
    assert walk.now == needed, (walk.now, needed)
    return tuple(_joined(walk.steps, setting))


class _Walk:
    """The state of one conversion: `now` moves from made to needed, one part at a time."""

    def __init__(self, value: Value, made: Layout, needed: Layout, setting: Setting) -> None:
        self.value, self.now, self.needed, self.setting = value, made, needed, setting
        self.steps: list[Step] = []

    def combine(self) -> None:
        """Rows go home before anything else happens to them."""
        parts = self.now.dispatched - self.needed.dispatched
        if parts:
            if self.now.dispatched != parts:
                raise ImpossibleError("rows can't go home on some of their axes only")
            self._exchange("combine", parts, replace(self.now, dispatched=frozenset()))

    def dispatch(self) -> None:
        """Rows leave as the last thing that happens to them."""
        parts = self.needed.dispatched - self.now.dispatched
        if parts:
            if self.now.dispatched:
                raise ImpossibleError("rows can't leave on one axis after another")
            rows = any(isinstance(factor, Order) for dim in self.value.dims for factor in dim)
            self._exchange("dispatch" if rows else "route", parts, self.needed)

    def _exchange(self, function: str, parts: frozenset[AxisPart], after: Layout) -> None:
        """One all-to-all over all parts together. Bytes are those of evenly spread tokens."""
        order = [axis for axis, _ in self.setting.mesh.axes]
        size = self._bytes(self.now)
        backward = BACKWARD.get(function) if self.value.needs_grad else None
        self.steps.append(
            Step(
                function,
                None,
                tuple(sorted(parts, key=lambda part: order.index(part.axis))),
                (FORWARD[function], size),
                (backward, size) if backward else None,
            )
        )
        self.now = after

    def reduce(self) -> None:
        """Partial sums first: a reduce-scatter leaves less to move."""
        for part in _ordered(self.now.partial - self.needed.partial):
            partial = self.now.partial - {part}
            name = self._target(part)
            if name is not None and self._next(name) == part:
                after = replace(self.now, partial=partial)
                split = self.needed.split(name)[: len(self.now.split(name)) + 1]
                self._step("reduce_scatter", name, part, after.with_split(name, split))
            elif part in self.needed.varying and self.value.needs_grad:
                varying = self.now.varying | {part}
                after = replace(self.now, partial=partial, varying=varying)
                self._step("all_reduce_partial", None, part, after)
            else:
                self._step("all_reduce", None, part, replace(self.now, partial=partial))

    def exchange(self) -> None:
        """An axis that splits one dim splits another instead."""
        for name, split in self.now.splits:
            keep = _common(split, self.needed.split(name))
            for part in reversed(split[keep:]):
                to = self._target(part)
                if to is None or to == name or self._next(to) != part:
                    break
                part = next(p for p in self.needed.split(to) if p == part)
                after = self.now.with_split(name, self.now.split(name)[:-1])
                after = after.with_split(to, (*self.now.split(to), part))
                if self._place(name, after) is None or self._place(to, self.now) is None:
                    break
                self._step("all_to_all", name, part, after, to)

    def gather(self) -> None:
        """Undo splits, innermost part first, down to the common beginning with what is needed."""
        for name, split in self.now.splits:
            keep = _common(split, self.needed.split(name))
            for part in reversed(split[keep:]):
                after = self.now.with_split(name, self.now.split(name)[:-1])
                function = "unshard"
                if part in self.needed.varying:
                    function = "all_gather"
                    after = replace(after, varying=after.varying | {part})
                self._step(function, name, part, after)

    def slice(self) -> None:
        """Split further, outermost part first."""
        for name, split in self.needed.splits:
            for part in split[len(self.now.split(name)) :]:
                if part in self.now.partial:
                    raise ImpossibleError(f"a partial sum over {part.axis}")
                local = part in self.now.varying or not self.value.needs_grad
                varying = self.now.varying - {part}
                after = replace(self.now, varying=varying).with_split(
                    name, (*self.now.split(name), part)
                )
                self._step("local_part" if local else "shard", name, part, after)

    def relabel(self) -> None:
        """I → V and V → I: nothing moves in the forward."""
        if self.needed.partial - self.now.partial:
            raise ImpossibleError("a partial sum can't be made of a whole value")
        for part in _ordered(self.needed.varying - self.now.varying):
            after = replace(self.now, varying=self.now.varying | {part})
            self._step("enter", None, part, after)
        for part in _ordered(self.now.varying - self.needed.varying):
            after = replace(self.now, varying=self.now.varying - {part})
            self._step("once", None, part, after)

    def _target(self, part: AxisPart) -> str | None:
        return next((n for n, split in self.needed.splits if part in split), None)

    def _next(self, name: str) -> AxisPart | None:
        have, want = self.now.split(name), self.needed.split(name)
        return want[len(have)] if want[: len(have)] == have and len(want) > len(have) else None

    def _place(self, name: str, layout: Layout) -> int | None:
        """The tensor's dim that has a named dim as its major part: no other ranks' elements lie
        between those of one rank."""
        for place, expr in enumerate(self.value.dims):
            for at, factor in enumerate(expr):
                if isinstance(factor, Leaf) and factor.name == name:
                    return place
                if self.setting.local_length(expr[at : at + 1], layout) > 1:
                    break
        return None

    def _step(
        self,
        function: str,
        name: str | None,
        part: AxisPart,
        after: Layout,
        to: str | None = None,
    ) -> None:
        dim, balanced = None, None
        if name is not None:
            dim = self._place(name, self.now)
            self._check_equal(name, after)
            self._check_equal(name, self.now)
            if dim is None:
                raise ImpossibleError(f"{name} is not the major part of a dim")
        for layout, named in ((self.now, name), (after, name), (self.now, to), (after, to)):
            if named is not None and any(p.balanced and p == part for p in layout.split(named)):
                balanced = self._place(named, layout)
        size = max(self._bytes(self.now), self._bytes(after))
        forward, backward = FORWARD.get(function), BACKWARD.get(function)
        self.steps.append(
            Step(
                function,
                dim,
                (part,),
                (forward, size) if forward else None,
                (backward, size) if backward and self.value.needs_grad else None,
                None if to is None else self._place(to, self.now),
                balanced,
            )
        )
        self.now = after

    def _check_equal(self, name: str, layout: Layout) -> None:
        """Padded pieces are never put together, nor cut on the way."""
        split = layout.split(name)
        for leaf in (leaf for dim in self.value.dims for leaf in expr_leaves(dim)):
            if leaf.name == name and leaf.padded(split):
                pieces = split_size(split)
                raise ImpossibleError(
                    f"{name} = {leaf.size} is padded in {pieces} pieces, and can't be cut or put "
                    "together on the way"
                )

    def _bytes(self, layout: Layout) -> int:
        return self.setting.local_numel(self.value.dims, layout) * self.value.item_bytes


def _joined(steps: list[Step], setting: Setting) -> list[Step]:
    """Neighbouring steps of one kind over several axes are one collective over all of them."""
    order = [axis for axis, _ in setting.mesh.axes]
    out: list[Step] = []
    for step in steps:
        last = out[-1] if out else None
        apart = step.balanced is not None or (last is not None and last.balanced is not None)
        if last is None or apart or (last.function, last.dim) != (step.function, step.dim):
            out.append(step)
            continue
        # Gathers go from the innermost axis outwards, all else inwards.
        inwards = (*last.parts, *step.parts)
        parts = (*step.parts, *last.parts) if step.function in GATHERS else inwards
        places = [order.index(part.axis) for part in parts]
        if places != sorted(places):
            if step.dim is not None:
                out.append(step)
                continue
            parts = tuple(sorted(parts, key=lambda part: order.index(part.axis)))
        forward = max(last.forward, step.forward) if last.forward and step.forward else None
        backward = max(last.backward, step.backward) if last.backward and step.backward else None
        out[-1] = Step(step.function, step.dim, parts, forward, backward)
    return out


def _ordered(parts: frozenset[AxisPart]) -> list[AxisPart]:
    return sorted(parts)


def _common(left: Split, right: Split) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count

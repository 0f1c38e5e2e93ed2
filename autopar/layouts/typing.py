"""What a candidate implies inside its region: the layout of every tensor, op by op.

A region is typed on its own: each op says in which layout it needs its inputs and in which it
makes its output. Where a value crosses between regions, or where needs differ, a conversion
follows. Nothing else inserts communication.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

import torch.fx

from autopar.graph.model_graph import Block, Op, Value
from autopar.graph.ops import VIEW_CLASSES, arguments, op_name
from autopar.graph.routes import Route
from autopar.layouts.layout import Layout, Setting, names
from autopar.mesh import AxisPart
from autopar.plugin import Candidate, OpForm


@dataclass(frozen=True)
class OpTyping:
    """The layouts that an op needs its tensor inputs in, by name, and the one it makes."""

    needs: Mapping[str, Layout]
    makes: Layout
    form: OpForm | None = None
    """How the op is run, where that is in a way of its own."""


@dataclass(frozen=True)
class RegionTyping:
    """Typings of a region's ops, in graph order."""

    candidate: Candidate
    ops: Mapping[str, OpTyping]


def type_region(block: Block, candidate: Candidate) -> RegionTyping:
    """The layouts of all tensors in the candidate's region."""
    ops: dict[str, OpTyping] = {}
    for node in block.graph.nodes:
        op = block.ops.get(node.name)
        if op is not None and op.region == candidate.region:
            ops[node.name] = _type_op(block, op, candidate, ops)
    return RegionTyping(candidate, ops)


def _type_op(block: Block, op: Op, candidate: Candidate, done: Mapping[str, OpTyping]) -> OpTyping:
    node = op.node
    inputs = list(dict.fromkeys(n.name for n in node.all_input_nodes))
    inside = {n: done[n].makes for n in inputs if n in done}
    needs = {name: Layout() for name in inputs}
    makes = Layout()
    touched = _carried(block, node)
    route = block.routes.get(candidate.region)
    sent = sent_over(route, candidate)
    form = candidate.form(node.name)
    for dim, split in candidate.splits if form is None else form.splits(candidate.splits):
        for part in split:
            if (
                route is not None
                and part in sent
                and (dim in route.experts or node.name in route.span)
            ):
                if node.name in route.span:
                    makes = _sent(block, node, route, dim, part, needs, makes)
                continue
            mode = _mode(block, op, dim, part, touched, inside)
            for name in _without(inputs, _whole(node, form, part)):
                value = block.values.get(name)
                mine = value.names if value else _output_names(block, name)
                if mode == "split" and name in op.shares:
                    if dim in block_rows(block, op):
                        needs[name] = _partial(needs[name], part)
                    continue
                needs[name] = _need(needs[name], mode, dim, part, mine, value, inside.get(name))
            makes = _make(makes, mode, dim, part, op, _output_names(block, node.name), block)
    for name in inputs:
        value = block.values.get(name)
        if value is not None and not value.needs_grad:
            needs[name] = needs[name].forward_only()
    return OpTyping(needs, makes, form)


def _whole(node: torch.fx.Node, form: OpForm | None, part: AxisPart) -> set[str]:
    """The inputs that an op in a form of its own takes whole over a part."""
    if form is None or part not in form.axes:
        return set()
    args = arguments(node)
    taken = [args[name] for name in form.whole]
    return {value.name for value in taken if isinstance(value, torch.fx.Node)}


def _without(names: Iterable[str], left_out: Set[str]) -> list[str]:
    return [name for name in names if name not in left_out]


def sent_over(route: Route | None, candidate: Candidate) -> frozenset[AxisPart]:
    """The parts over which a candidate dispatches tokens: those that split experts."""
    if route is None:
        return frozenset()
    return frozenset(part for dim in route.experts for part in candidate.split(dim))


def _sent(
    block: Block,
    node: torch.fx.Node,
    route: Route,
    dim: str,
    part: AxisPart,
    needs: dict[str, Layout],
    makes: Layout,
) -> Layout:
    """An op of a route's span, on one part of the split of a dim: rows are dispatched, weights
    split by experts. Fills in `needs`; returns what the op makes."""

    def typed(name: str, layout: Layout) -> Layout:
        carried = _output_names(block, name)
        dispatched = layout.dispatched | {part}
        if dim in route.experts:
            split = dim in carried and name != route.ends
            return layout.with_split(dim, (*layout.split(dim), part)) if split else layout
        if name == route.ends:
            return replace(layout, partial=layout.partial | {part}, dispatched=dispatched)
        if dim not in carried:
            return layout
        split_ = layout.with_split(dim, (*layout.split(dim), part))
        return replace(split_, dispatched=dispatched)

    for name in needs:
        needs[name] = typed(name, needs[name])
    return typed(node.name, makes)


def _partial(layout: Layout, part: AxisPart) -> Layout:
    return replace(layout, partial=layout.partial | {part})


def block_rows(block: Block, op: Op) -> set[str]:
    """The dims of an op's result that its shares are sums over: those of its first dim."""
    return set(names(block.values[op.node.name].dims[:1]))


def _mode(
    block: Block,
    op: Op,
    dim: str,
    part: AxisPart,
    touched: set[str],
    inside: Mapping[str, Layout],
) -> str:
    """How an op lives on one part of one dim's split: "split" along the dim, "partial" sums that
    pass through, "vary" (replicated, partial gradients), or "whole"."""
    partial = [n for n, made in inside.items() if part in made.partial and n not in op.shares]
    if partial:
        return "partial" if passes_partial(op, partial) else "whole"
    if dim in touched:
        assert dim not in op.unlowered, (op.node, op.unlowered)
        return "split"
    after = [n for n, layout in inside.items() if _is_whole(block, n, layout, part)]
    return "whole" if after else "vary"


def _is_whole(block: Block, name: str, layout: Layout, part: AxisPart) -> bool:
    value = block.values.get(name)
    grad = value.needs_grad if value else True
    return grad and part not in layout.varying and part not in layout.split_parts()


def _need(
    need: Layout,
    mode: str,
    dim: str,
    part: AxisPart,
    carried: Set[str],
    value: Value | None,
    inside: Layout | None,
) -> Layout:
    if mode == "whole":
        return need
    if mode == "partial" and inside is not None and part in inside.partial:
        return _partial(need, part)
    if mode == "split" and dim in carried:
        return need.with_split(dim, (*need.split(dim), part))
    if value is not None and not value.needs_grad:
        return need
    return replace(need, varying=need.varying | {part})


def _make(
    makes: Layout, mode: str, dim: str, part: AxisPart, op: Op, carried: set[str], block: Block
) -> Layout:
    if mode == "whole" or (mode == "split" and dim in op.closed and dim not in carried):
        return makes
    if mode == "partial" or (mode == "split" and dim not in carried and dim in op.contracted):
        return _partial(makes, part)
    if mode == "split" and dim in carried:
        return makes.with_split(dim, (*makes.split(dim), part))
    value = block.values.get(op.node.name)
    if value is not None and not value.needs_grad:
        return makes
    return replace(makes, varying=makes.varying | {part})


LINEAR = frozenset({"to", "clone", "contiguous", "neg", "sum", "cumsum", "repeat_interleave"})


def passes_partial(op: Op, partial: Iterable[str]) -> bool:
    """Whether an op is linear in its partial inputs, so that sums may come after it."""
    name, node = op_name(op.node), op.node
    which = set(partial)
    tensors = [n.name for n in node.all_input_nodes]
    if op.kind in VIEW_CLASSES or name in LINEAR:
        return which == set(tensors)
    args = arguments(node)
    if name in ("index", "gather"):
        return which == {args["self"].name}
    if name in ("add", "sub"):
        both = all(isinstance(args[k], torch.fx.Node) for k in ("self", "other"))
        return both and which == set(tensors)
    if name == "mul":
        return len(which) == 1 and (args["self"] is not args["other"])
    if name == "div":
        other = args["other"]
        return not (isinstance(other, torch.fx.Node) and other.name in which)
    return False


def _carried(block: Block, node: torch.fx.Node) -> set[str]:
    out = _output_names(block, node.name)
    for n in node.all_input_nodes:
        out |= _output_names(block, n.name)
    return out | set(block.ops[node.name].contracted)


def _output_names(block: Block, name: str) -> set[str]:
    """Dim names of a node's tensors (of all its outputs where it has several)."""
    value = block.values.get(name)
    if value is not None:
        return set(value.names)
    node = block.ops[name].node
    found: set[str] = set()
    for user in node.users:
        if user.name in block.values:
            found |= block.values[user.name].names
    return found


def boundary_layout(value: Value, stream: Candidate, setting: Setting) -> Layout:
    """The layout in which a value crosses a block's boundary: what the block's stream says; for
    values without a gradient, only the batch is split, over the data axes. What has a dim twice (a
    bias of queries and keys) isn't split along it."""
    every = list(names(value.dims))
    carried = {name for name in every if every.count(name) == 1}
    if not value.needs_grad:
        return input_layout(value, setting)
    layout = Layout()
    for dim, split in stream.splits:
        if dim in carried:
            layout = layout.with_split(dim, split)
        else:
            layout = replace(layout, varying=layout.varying | set(split))
    return layout


def input_layout(value: Value, setting: Setting) -> Layout:
    """The layout of a value without a gradient: split like the batch, if it comes from it."""
    if value.from_batch and "batch" in value.names and setting.data:
        return Layout().with_split("batch", setting.data)
    return Layout()

"""Whether a factor rule tells the truth: an op is run whole, and then on each half of a dim that
its rule says may be split, as the emitter prints it."""

import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor

from autopar import runtime
from autopar.emit.printing import Printer, segment_bounds
from autopar.graph.factors import Cat, DimExpr, Factor, Leaf, Order, expr_leaves, freeze, leaves
from autopar.graph.ops import arguments, class_of, op_name, shape_of
from autopar.graph.rules import RULES, OpDims
from autopar.graph.rules.shapes import slice_bounds
from autopar.layouts.layout import Layout, Setting
from autopar.mesh import AxisPart, Mesh

PART = AxisPart("half", 2)
SETTING = Setting(Mesh((("half", 2),)), (), 1)


@dataclass(frozen=True)
class Rank:
    """A group of two of which this is one rank, for look-ups in split tables."""

    rank: int
    size: int = 2


class Traced:
    """One op with tensors for arguments as a graph of its own, and what its rule says."""

    def __init__(self, target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Any) -> None:
        self.graph = torch.fx.Graph()
        self.inputs: dict[torch.fx.Node, Tensor] = {}
        placed = torch.utils._pytree.tree_map_only(Tensor, self._place, (args, kwargs))
        self.node = self.graph.call_function(target, *placed)
        self.whole = target(*args, **kwargs)
        several = isinstance(self.whole, (list, tuple))
        self.node.meta["val"] = list(self.whole) if several else self.whole
        self.outputs: list[Tensor] = list(self.whole) if several else [self.whole]
        self.users = []
        for i, output in enumerate(self.outputs if several else []):
            user = self.graph.call_function(operator.getitem, (self.node, i))
            user.meta["val"] = output
            self.users.append(user)
        kind = class_of(op_name(self.node))
        assert kind is not None, target
        known = {n: [[_leaf(size) for size in t.shape]] for n, t in self.inputs.items()}
        self.rule: OpDims = RULES[kind](self.node, known)
        every = [*(d for (dims,) in known.values() for d in dims)]
        every += [d for dims in self.rule.out for d in dims]
        numbers = itertools.count()
        for leaf in dict.fromkeys(f for dim in every for f in leaves(dim)):
            leaf.name = f"dim_{next(numbers)}"
        self.dims = {n: tuple(freeze(d) for d in dims) for n, (dims,) in known.items()}
        self.out = [tuple(freeze(d) for d in dims) for dims in self.rule.out]

    def _place(self, tensor: Tensor) -> torch.fx.Node:
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        node.meta["val"] = tensor
        self.inputs[node] = tensor
        return node

    def splittable(self) -> list[Leaf]:
        """The dims that the rule lets split, of even size, that no tensor has twice."""
        closed = {f.name for dim in self.rule.closed for f in leaves(dim)}
        blocked = {f.name for dim, _ in self.rule.blocked for f in leaves(dim)}
        blocked |= {f.name for dim, _ in self.rule.unlowered for f in leaves(dim)}
        found: dict[Leaf, None] = {}
        for dims in (*self.dims.values(), *self.out):
            # Parts of a sorted dim are other elements; test_rules_tokens puts them back first.
            sorted_ = [f.of for dim in dims for f in dim if isinstance(f, Order)]
            blocked |= {leaf.name for of in sorted_ for leaf in expr_leaves(of)}
            every = [leaf for dim in dims for leaf in expr_leaves(dim)]
            for leaf in every:
                if every.count(leaf) > 1:
                    blocked.add(leaf.name)
                found[leaf] = None
        return [x for x in found if x.name not in blocked | closed and x.size % 2 == 0]

    def check(self, leaf: Leaf) -> str:
        """How the dim goes through; an assertion fails where the halves say otherwise."""
        layout = Layout().with_split(leaf.name, (PART,))
        halves = [self._run(layout, leaf, rank) for rank in (0, 1)]
        contracted = {f.name for dim in self.rule.contract for f in leaves(dim)}
        how = ""
        for i, (dims, whole) in enumerate(zip(self.out, self.outputs, strict=True)):
            ours = [half[i] for half in halves]
            carried = any(x == leaf for dim in dims for x in expr_leaves(dim))
            if carried:
                how = "split"
                for rank, half in enumerate(ours):
                    torch.testing.assert_close(half, part(whole, dims, leaf, rank))
            elif leaf.name in contracted:
                how = how or "contracted"
                torch.testing.assert_close(ours[0] + ours[1], whole)
            else:  # another output carries it, or none does: a slice leaves a part out
                assert leaf.name not in contracted
                how = how or "unused"
                for half in ours:
                    torch.testing.assert_close(half, whole)
        return how

    def _run(self, layout: Layout, leaf: Leaf, rank: int) -> list[Tensor]:
        scope = LocalScope(self, layout)
        names = {str(n): part(t, self.dims[n], leaf, rank) for n, t in self.inputs.items()}
        text = Printer(scope).text(self.node)
        this = type("Module", (), {"training": True, "mesh": _Mesh(rank)})()
        space = {**names, "torch": torch, "F": F, "self": this, **vars(runtime)}
        result = eval(text, space)  # what the emitter printed
        return list(result) if isinstance(result, (list, tuple)) else [result]


class _Mesh:
    device = torch.device("cpu")

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __getitem__(self, axes: object) -> Rank:
        return Rank(self.rank)


class LocalScope:
    """What the printer asks for, of one op with one dim split."""

    def __init__(self, traced: Traced, layout: Layout) -> None:
        self.traced, self.layout = traced, layout

    def operand(self, node: torch.fx.Node, source: torch.fx.Node) -> str:
        # Binds as loosely as any text: a method or an operator beside it would tear it apart.
        return f"{source} if True else {source}"

    def is_opaque(self, node: torch.fx.Node) -> bool:
        return False

    def out_shape(self, node: torch.fx.Node) -> list[str]:
        return [str(n) for n in self.local_out(node)]

    def form(self, node: torch.fx.Node) -> None:
        return None

    def local_out(self, node: torch.fx.Node) -> tuple[int, ...]:
        return SETTING.local_shape(self.traced.out[0], self.layout)

    def local_shape(self, node: torch.fx.Node, source: torch.fx.Node) -> tuple[int, ...]:
        return SETTING.local_shape(self.traced.dims[source], self.layout)

    def pieces(self, node: torch.fx.Node) -> list[str]:
        dim = arguments(node)["dim"]
        return [str(SETTING.local_length(dims[dim], self.layout)) for dims in self.traced.out]

    def split_axes(self, node: torch.fx.Node, source: torch.fx.Node, dim: int) -> tuple[str, ...]:
        carried = expr_leaves(self.traced.dims[source][dim])
        return tuple("half" for leaf in carried if self.layout.split(leaf.name))

    def padded(self, node: torch.fx.Node, source: torch.fx.Node, dim: int) -> str:
        return ""

    def bounds(self, node: torch.fx.Node) -> tuple[int, int | None]:
        args = arguments(node)
        source = args["self"]
        dim = args["dim"] % len(shape_of(source))
        start, stop = slice_bounds(args, shape_of(source)[dim])
        expr = self.traced.dims[source][dim]
        return segment_bounds(
            expr,
            lambda e: SETTING.local_length(e, self.layout),
            lambda e: SETTING.local_length(e, Layout()),
            start,
            stop,
        )


def _leaf(size: int) -> list[Factor]:
    return [Factor(size)] if size != 1 else []


def part(tensor: Tensor, dims: Iterable[DimExpr], leaf: Leaf, rank: int) -> Tensor:
    """The half of a tensor that a rank holds where a dim is split in two."""
    for position, expr in enumerate(dims):
        if any(x == leaf for x in expr_leaves(expr)):
            index = torch.tensor(_kept(expr, leaf, rank), dtype=torch.int64)
            tensor = tensor.index_select(position, index)
    return tensor.contiguous()


def _kept(expr: DimExpr, leaf: Leaf, rank: int) -> list[int]:
    """The positions along a dim that a rank keeps."""
    kept = [0]
    for factor in expr:
        if isinstance(factor, Leaf):
            half = factor.size // 2
            size = factor.size
            own = range(rank * half, (rank + 1) * half) if factor == leaf else range(size)
            mine = list(own)
        else:
            assert isinstance(factor, Cat), "sorted dims are not in parts"
            mine, size = [], 0
            for segment in factor.segments:
                mine += [size + i for i in _kept(segment, leaf, rank)]
                size += SETTING.local_length(segment, Layout())
        kept = [i * size + j for i in kept for j in mine]
    return kept

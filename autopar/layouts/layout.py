"""Layouts: the type of a tensor on every axis.

On each axis part a tensor is one of

    I     replicated, its gradient is complete on every rank (the default)
    V     replicated, its gradient is partial: still to be summed over the axis
    S(f)  split along the named dim f
    P     a partial sum
    D     dispatched: split like S, but each row lies on the rank that holds its expert

A dim may be split over several parts, in order, outermost first.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.graph.factors import DimExpr, Leaf, expr_leaves, unsorted
from autopar.hashed_once import hashed_once
from autopar.mesh import AxisPart, Mesh, Split, split_size
from autopar.plugin import Schedule


@hashed_once
@dataclass(frozen=True)
class Layout:
    """`splits`: dim name → parts, for split dims only, sorted. All other parts are I. `dispatched`:
    the parts of these splits on which rows lie with their experts (or, of where experts' rows end:
    on which it is about those); how many rows there are is then known only at run time, and sizes
    are those of evenly spread tokens."""

    splits: tuple[tuple[str, Split], ...] = ()
    varying: frozenset[AxisPart] = frozenset()
    partial: frozenset[AxisPart] = frozenset()
    dispatched: frozenset[AxisPart] = frozenset()

    def split(self, dim: str) -> Split:
        """The parts that a dim is split over."""
        return next((split for name, split in self.splits if name == dim), ())

    @cached_property
    def pieces(self) -> Mapping[str, int]:
        """How many pieces each split dim is in."""
        return {name: split_size(split) for name, split in self.splits}

    def split_parts(self) -> set[AxisPart]:
        """The parts over which some dim is split."""
        return {part for _, split in self.splits for part in split}

    def with_split(self, dim: str, split: Split) -> "Layout":
        """This layout with another split of one dim."""
        splits = {**dict(self.splits), dim: split}
        return replace(self, splits=tuple(sorted((d, s) for d, s in splits.items() if s)))

    def restrict(self, dims: Iterable[str]) -> "Layout":
        """This layout without the splits of dims that a tensor doesn't carry."""
        kept = set(dims)
        if all(d in kept for d, _ in self.splits):
            return self
        return replace(self, splits=tuple((d, s) for d, s in self.splits if d in kept))

    def forward_only(self) -> "Layout":
        """For tensors without a gradient V is I."""
        return replace(self, varying=frozenset()) if self.varying else self

    def __str__(self) -> str:
        words = [f"{'·'.join(p.axis for p in split)} splits {dim}" for dim, split in self.splits]
        words += [f"partial over {p.axis}" for p in sorted(self.partial)]
        words += [f"dispatched over {p.axis}" for p in sorted(self.dispatched)]
        return ", ".join(words) or "whole"


@dataclass(frozen=True)
class Setting:
    """One outer choice: the mesh, the parts that split the batch, the microbatches of a step, and
    how they run through layers in stages (None: every rank has all layers)."""

    mesh: Mesh
    data: Split
    microbatches: int
    schedule: Schedule | None = None

    def length(self, leaf: Leaf) -> int:
        """A dim's whole size in one microbatch."""
        if leaf.name == "batch":
            assert leaf.size % self.microbatches == 0
            return leaf.size // self.microbatches
        return leaf.size

    def local_length(self, expr: DimExpr, layout: Layout) -> int:
        """The local size of a tensor's dim, padding included: the same on every rank."""
        total = 1
        for factor in unsorted(expr):
            if isinstance(factor, Leaf):
                pieces = layout.pieces.get(factor.name, 1)
                whole = self.length(factor)
                assert factor.pads or whole % pieces == 0, (factor, layout)
                total *= -(-whole // pieces)
            else:
                total *= sum(self.local_length(s, layout) for s in factor.segments)
        return total

    def local_shape(self, dims: Iterable[DimExpr], layout: Layout) -> tuple[int, ...]:
        """The local shape of a tensor."""
        return tuple(self.local_length(expr, layout) for expr in dims)

    def local_numel(self, dims: Iterable[DimExpr], layout: Layout) -> int:
        """The local number of elements of a tensor."""
        return math.prod(self.local_shape(dims, layout))


def names(dims: Iterable[DimExpr]) -> Iterator[str]:
    """The names of all leaves of a tensor's dims."""
    for expr in dims:
        for leaf in expr_leaves(expr):
            yield leaf.name

"""Factor rules by op class: which input dims are which output dims, which are contracted, and
which must stay whole.

A rule joins factors (see `factors`) and returns `OpDims`. An op without a rule, or used in a way
that its rule does not cover, is an error that names it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.fx

from autopar.graph.factors import Product, size, unify

Dims = list[Product]


@dataclass
class OpDims:
    """What a rule found. `out` has one list of dims per output tensor.

    `closed`: dims, contracted or of statistics, over which the op adds up itself where they are
    split.
    `blocked`: dims that must stay whole for this op, with the reason. `unlowered`: dims that could
    be split here in theory, but whose split form can't be emitted. `shares`: inputs that are sums
    over the op's rows; where the rows are split, each rank takes its own part of the sum.
    """

    out: list[Dims]
    contract: list[Product] = field(default_factory=list)
    closed: list[Product] = field(default_factory=list)
    blocked: list[tuple[Product, str]] = field(default_factory=list)
    unlowered: list[tuple[Product, str]] = field(default_factory=list)
    shares: tuple[torch.fx.Node, ...] = ()


Known = Mapping[torch.fx.Node, list[Dims]]
Rule = Callable[[torch.fx.Node, Known], OpDims]


def dims_of(known: Known, node: object) -> Dims:
    """The dims of an op's tensor argument."""
    assert isinstance(node, torch.fx.Node)
    return known[node][0]


def broadcast(operands: Sequence[Dims]) -> Dims:
    """The dims of a broadcast result: aligned from the right, size-1 dims give way."""
    rank = max(map(len, operands))
    out: Dims = [[] for _ in range(rank)]
    for dims in operands:
        for position, dim in enumerate(dims, start=rank - len(dims)):
            if size(dim) == 1:
                continue
            if size(out[position]) == 1:
                out[position] = dim
            else:
                unify(out[position], dim)
    return out


def joined(left: Dims, right: Dims) -> None:
    """Say that two tensors have the same dims."""
    for mine, theirs in zip(left, right, strict=True):
        unify(mine, theirs)


def which_dims(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """A `dim` argument as sorted positions; None or empty means all."""
    if dims is None or dims == [] or dims == ():
        return list(range(rank))
    chosen = [dims] if isinstance(dims, int) else dims
    return sorted({int(d) % rank for d in chosen}) if rank else []

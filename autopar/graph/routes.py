"""Routes: where tokens of a region can be sent to the ranks that hold their experts.

That is possible where rows, sorted by expert, go through grouped matmuls and what lies between
them, each row on its own. Only that span runs on rows from elsewhere; the router, the sort and the
weighted sum stay with their tokens, and the counts are of each rank's own rows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.fx

from autopar.graph.dims import BlockDims
from autopar.graph.factors import Factor, leaves, resolve
from autopar.graph.ops import arguments, class_of, is_tensor, op_name

ROW_BY_ROW = frozenset(
    {"grouped", "pointwise", "contraction", "normalisation", "permute", "concat_split", "getitem"}
)
"""Classes of ops that may lie between grouped matmuls: none needs to know how many rows there are.
(Views do, by their sizes.)"""


@dataclass(frozen=True)
class Route:
    """`experts`: the dims over which weights are split, major first; `rows`: the dims that the
    sorted rows are made of. `ends`: the value that says where each expert's rows end. `span`: ops
    that run on dispatched rows, and those that make their weights; `on_rows`: the former."""

    experts: tuple[str, ...]
    rows: tuple[str, ...]
    ends: str
    span: frozenset[str]
    on_rows: frozenset[str]


class _Regions(Protocol):
    known: BlockDims
    graph: torch.fx.Graph

    def weight(self, node: torch.fx.Node) -> bool: ...


def find_route(regions: _Regions, nodes: Sequence[torch.fx.Node]) -> Route | None:
    """The route of a region with these ops, or None where its tokens can't be dispatched. Names of
    dims must be known."""
    dims = regions.known.dims
    grouped = [n for n in nodes if class_of(op_name(n)) == "grouped"]
    if not grouped or any(not regions.known.ops[n].shares for n in grouped):
        return None
    all_ends = {arguments(n)["offs"] for n in grouped}
    orders = {tuple(resolve(dims[n][0][0])) for n in grouped}
    experts = {tuple(leaves(dims[_weight(n)][0][0])) for n in grouped}
    if len(all_ends) != 1 or len(orders) != 1 or len(experts) != 1:
        return None
    (ends,), (order,), (held,) = all_ends, orders, experts
    on_rows = _between(grouped, set(nodes))
    makers = _weight_makers(regions, on_rows)
    if not all(set(n.users) <= on_rows | makers for n in makers):
        return None
    span = _Span(regions, on_rows, makers, ends, list(order), held)
    if not all(span.row_by_row(n) for n in on_rows):
        return None
    return Route(
        tuple(f.name for f in held),
        tuple(f.name for f in leaves(order)),
        ends.name,
        frozenset(n.name for n in on_rows | makers),
        frozenset(n.name for n in on_rows),
    )


def _weight(node: torch.fx.Node) -> torch.fx.Node:
    args = arguments(node)
    found: torch.fx.Node = args["weight"] if "weight" in args else args["mat2"]
    return found


def _between(ends: Iterable[torch.fx.Node], inside: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """The ops on a path from one of these to another, themselves included."""
    after = _reached(ends, inside, lambda n: n.users)
    before = _reached(ends, inside, lambda n: n.all_input_nodes)
    return after & before


def _reached(
    start: Iterable[torch.fx.Node],
    inside: set[torch.fx.Node],
    near: Callable[[torch.fx.Node], Iterable[torch.fx.Node]],
) -> set[torch.fx.Node]:
    """What can be reached in steps to near nodes, without leaving a set."""
    found: set[torch.fx.Node] = set()
    todo = list(start)
    while todo:
        node = todo.pop()
        if node in inside and node not in found:
            found.add(node)
            todo += near(node)
    return found


def _weight_makers(regions: _Regions, on_rows: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """The ops that take weights alone and that ops on rows follow from."""
    constant: set[torch.fx.Node] = set()
    for node in regions.graph.nodes:
        inputs = node.all_input_nodes
        made_here = node.op == "call_function" and bool(inputs)
        if made_here and all(n in constant or regions.weight(n) for n in inputs):
            constant.add(node)
    return _reached(
        [n for node in on_rows for n in node.all_input_nodes], constant, lambda n: n.all_input_nodes
    )


@dataclass(frozen=True)
class _Span:
    regions: _Regions
    on_rows: set[torch.fx.Node]
    makers: set[torch.fx.Node]
    ends: torch.fx.Node
    order: list[Factor]
    held: tuple[Factor, ...]

    def row_by_row(self, node: torch.fx.Node) -> bool:
        """Whether an op does with each row the same, whatever rows there are."""
        known = self.regions.known
        kind, info = class_of(op_name(node)), known.ops[node]
        rows = set(leaves(self.order))
        whole = [*info.contract, *info.closed, *(dim for dim, _ in info.unlowered)]
        if kind not in ROW_BY_ROW or any(rows & set(leaves(dim)) for dim in whole):
            return False
        if not all(self._has_rows(tensor) for tensor in known.dims[node]):
            return False
        return all(self._fits(source, kind) for source in node.all_input_nodes)

    def _has_rows(self, tensor: Sequence[Sequence[Factor]]) -> bool:
        """Rows are the first dim and nothing else."""
        rest = {f for dim in tensor[1:] for f in leaves(dim)}
        first = bool(tensor) and resolve(tensor[0]) == self.order
        return first and not rest & {*leaves(self.order), *self.held}

    def _fits(self, source: torch.fx.Node, kind: str | None) -> bool:
        if source in self.on_rows:
            return True
        tensors = self.regions.known.dims[source]
        if source in self.makers or self.regions.weight(source):
            carried = {f for tensor in tensors for dim in tensor for f in leaves(dim)}
            return kind == "grouped" or not carried & set(self.held)
        if source is self.ends:
            return kind == "grouped"
        return is_tensor(source) and self._has_rows(tensors[0])

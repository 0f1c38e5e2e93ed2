"""What integer tensors mean where tokens are sorted, picked and counted.

An index into a dim can be used on a rank that holds a part of that dim only if it points into the
same part. Of positions that a sort made this is known: each rank sorts what it has, and finds its
own positions. Everything here is read from the ops that made a tensor; what isn't recognised is
unknown, and then nothing along the dim may be split.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch.fx

from autopar.graph.factors import FactorError, Product, resolve, split_minor
from autopar.graph.ops import VIEW_CLASSES, arguments, class_of, op_name, shape_of

Known = Mapping[torch.fx.Node, list[list[Product]]]

SORTS: frozenset[str | None] = frozenset({"sort", "top_k"})
SAME_VALUES = frozenset({"to", "clone", "contiguous", "detach"})
REARRANGED = frozenset({"index", "gather", "index_select", "repeat_interleave", *SAME_VALUES})


@dataclass(frozen=True)
class Positions:
    """A tensor's values are positions along the dim `into`. Where a factor of that dim is also one
    of the tensor's own dims, a value lies in the part of the dim that it points into. `whole`: dims
    whose size the values were computed with. `ranked`: they came out of a top-k."""

    into: Product
    whole: list[Product] = field(default_factory=list)
    ranked: bool = False


def points_into(node: torch.fx.Node, known: Known) -> Positions | None:
    """What a tensor's values point into, or None where that is unknown."""
    if node.op != "call_function":
        return None
    name, args = op_name(node), arguments(node)
    source = args.get("self")
    if not isinstance(source, torch.fx.Node):
        return None
    if name == "getitem" and class_of(op_name(source)) in SORTS:
        if args["index"] == 0:
            return points_into(arguments(source)["self"], known)
        return Positions(_along(source, known), ranked=op_name(source) == "topk")
    if name == "argsort":
        return Positions(_along(node, known))
    if name in REARRANGED or (class_of(name) in VIEW_CLASSES and name not in ("getitem", "cat")):
        return points_into(source, known)
    if name in ("floor_divide", "remainder") or (name == "div" and args["rounding_mode"]):
        return _part(points_into(source, known), args["other"], name != "remainder")
    return None


def _along(sort: torch.fx.Node, known: Known) -> Product:
    args = arguments(sort)
    dims = known[args["self"]][0]
    return dims[args["dim"] % len(dims)]


def _part(found: Positions | None, divisor: object, quotient: bool) -> Positions | None:
    """Positions along a product, divided by the size of its minor part."""
    if found is None or not isinstance(divisor, int) or divisor < 1:
        return None
    try:
        major, minor = split_minor(found.into, divisor)
    except FactorError:
        return None
    return replace(found, into=major if quotient else minor, whole=[*found.whole, minor])


def is_permutation(node: torch.fx.Node) -> bool:
    """Whether a tensor is known to hold each position of a 1-d tensor exactly once."""
    node = _same_values(node)
    if node.op != "call_function":
        return False
    if op_name(node) == "getitem":
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        return len(shape_of(node)) == 1 and (op_name(source), node.args[1]) == ("sort", 1)
    return op_name(node) == "argsort" and len(shape_of(node)) == 1


def _same_values(node: torch.fx.Node) -> torch.fx.Node:
    while node.op == "call_function" and op_name(node) in SAME_VALUES:
        node = arguments(node)["self"]
    return node


def counted(offsets: torch.fx.Node, rows: Product, known: Known) -> tuple[torch.fx.Node, ...]:
    """The ops that count how many of the rows each group has, from the count to the offsets: rows
    must have been sorted by the very ids that are counted. Empty where that isn't known."""
    chain = []
    node = offsets
    while node.op == "call_function" and op_name(node) in (*SAME_VALUES, "cumsum", "histc"):
        chain.append(node)
        node = arguments(node)["self"]
        if op_name(chain[-1]) == "histc":
            break
    sums = [n for n in chain if op_name(n) == "cumsum"]
    if len(sums) != 1 or op_name(chain[-1]) != "histc":
        return ()
    ids = _same_values(node)
    return tuple(chain) if any(ids is key for key in _sort_keys(offsets, rows, known)) else ()


def _sort_keys(node: torch.fx.Node, rows: Product, known: Known) -> Iterator[torch.fx.Node]:
    """The ids that the rows are sorted by, before and after the sort."""
    order = resolve(rows)
    if len(order) != 1 or order[0].order_of is None:
        return
    for sort in node.graph.nodes:
        if sort not in known or sort.op != "call_function" or class_of(op_name(sort)) != "sort":
            continue
        if resolve(known[sort][0][-1]) != order or arguments(sort)["descending"]:
            continue
        yield _same_values(arguments(sort)["self"])
        yield from (u for u in sort.users if op_name(u) == "getitem" and u.args[1] == 0)

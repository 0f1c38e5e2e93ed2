"""Whole sizes as sums of products of named dims."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from autopar.graph.factors import DimExpr, Leaf, unsorted
from autopar.graph.model_graph import Block, SavedTensor

Term = tuple[str, ...]
"""Dims that are multiplied, sorted; () for a number alone."""


def product_terms(dims: Iterable[DimExpr]) -> Mapping[Term, int]:
    """A tensor's number of elements as a sum of products: {("batch", "hidden"): 3} is
    3 · batch · hidden. A concatenation is the sum of its segments."""
    total: Counter[Term] = Counter({(): 1})
    for expr in dims:
        for factor in unsorted(expr):
            if isinstance(factor, Leaf):
                parts: Mapping[Term, int] = {(factor.name,): 1}
            else:
                parts = Counter()
                for segment in factor.segments:
                    parts.update(product_terms([segment]))
            after: Counter[Term] = Counter()
            for term, times in total.items():
                for other, more in parts.items():
                    after[tuple(sorted((*term, *other)))] += times * more
            total = after
    return total


def saved_terms(block: Block, region: str) -> Mapping[Term, int]:
    """The bytes that autograd keeps for one region of the unsplit model, each storage once, as a
    sum of products of dims."""
    total: Counter[Term] = Counter()
    seen: set[str] = set()
    for saved in block.saved:
        if block.ops[saved.op].region != region:
            continue
        root = None if saved.value is None else block.root(saved.value)
        if root is None:
            parts = _inside(block, saved)
        elif block.is_weight(root) or root in seen:
            continue
        else:
            seen.add(root)
            parts = product_terms(block.values[root].dims)
        for term, times in parts.items():
            total[term] += times * saved.item_bytes
    return total


def _inside(block: Block, saved: SavedTensor) -> Mapping[Term, int]:
    """What an op makes and keeps itself."""
    known, rest = matched(saved.shape, inside_dims(block, saved.op)[1])
    return {term: rest * count for term, count in product_terms(known).items()}


def inside_dims(block: Block, op: str) -> tuple[str, tuple[DimExpr, ...]]:
    """A value (the op's result, or of a loss its input) from whose dims, left to right, what the op
    makes and keeps itself has its own, and those dims. Statistics of a batch norm are of channels,
    those of a group norm of samples and channels."""
    name = op
    if op not in block.values or not block.values[op].dims:
        name = next(n.name for n in block.ops[op].node.all_input_nodes if n.name in block.values)
    own = {"batch_norm": slice(1, 2), "channel_norm": slice(2)}
    return name, block.values[name].dims[own.get(block.ops[op].kind, slice(None))]


def matched(shape: tuple[int, ...], dims: tuple[DimExpr, ...]) -> tuple[tuple[DimExpr, ...], int]:
    """The dims among `dims` that a tensor made inside an op has, by their whole sizes from the
    left, neighbours merged (or the major part of one taken: groups of channels) where none alone
    fits, and the product of its sizes that are none of theirs."""
    found: list[DimExpr] = []
    rest, at = 1, 0
    for length in shape:
        fitting = next(
            (fit for fit in _fits(dims, at) if length == math.prod(map(whole, fit[0]))), None
        )
        if fitting is None:
            rest *= length
        else:
            found += fitting[0]
            at = fitting[1]
    return tuple(found), rest


def _fits(dims: tuple[DimExpr, ...], at: int) -> Iterator[tuple[tuple[DimExpr, ...], int]]:
    """What one size of a tensor may be, from a dim on, and the dim that comes after it."""
    count = len(dims)
    yield from (((dims[i],), i + 1) for i in range(at, count))
    yield from ((dims[i:j], j) for i in range(at, count) for j in range(i + 2, count + 1))
    for i in range(at, count):
        yield from (((dims[i][:n],), i + 1) for n in range(len(dims[i]) - 1, 0, -1))


def whole(expr: DimExpr) -> int:
    """The unsplit size of a tensor's dim."""
    total = 1
    for factor in unsorted(expr):
        if isinstance(factor, Leaf):
            total *= factor.size
        else:
            total *= sum(map(whole, factor.segments))
    return total


def value_of(terms: Mapping[Term, int], sizes: Mapping[str, int]) -> int:
    """The number that a sum of products comes to."""
    total = 0
    for term, times in terms.items():
        for name in term:
            times *= sizes[name]
        total += times
    return total


def text_of(terms: Mapping[Term, int]) -> str:
    """As text, the longest products first: 34 batch·hidden·sequence + 8 batch·sequence."""
    ordered = sorted(terms.items(), key=lambda item: (-len(item[0]), item[0]))
    words = [f"{times} {'·'.join(term)}".strip() for term, times in ordered]
    return " + ".join(words) if words else "0"

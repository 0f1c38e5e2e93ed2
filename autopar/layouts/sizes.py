"""Whole sizes as sums of products of named dims."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

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
        if block.ops[saved.op].region != region or saved.value in seen:
            continue
        if saved.value is None:
            parts = _inside(block, saved)
        elif block.is_weight(saved.value):
            continue
        else:
            seen.add(saved.value)
            parts = product_terms(block.values[saved.value].dims)
        for term, times in parts.items():
            total[term] += times * saved.item_bytes
    return total


def _inside(block: Block, saved: SavedTensor) -> Mapping[Term, int]:
    """What an op makes and keeps itself: its shape's dims are its output's, from the left."""
    value = block.values.get(saved.op)
    dims = value.dims if value is not None else ()
    if not dims:
        given = [n.name for n in block.ops[saved.op].node.all_input_nodes if n.name in block.values]
        dims = block.values[given[0]].dims
    known, rest = matched(saved.shape, dims)
    return {term: rest * count for term, count in product_terms(known).items()}


def matched(shape: tuple[int, ...], dims: tuple[DimExpr, ...]) -> tuple[tuple[DimExpr, ...], int]:
    """The dims among `dims` that a tensor made inside an op has, by their whole sizes from the
    left, neighbours merged where one alone doesn't fit, and the product of its sizes that are none
    of theirs."""
    sizes = [whole(expr) for expr in dims]
    found: list[DimExpr] = []
    rest, at = 1, 0
    for length in shape:
        runs = [(i, i + 1) for i in range(at, len(dims))]
        runs += [(i, j) for i in range(at, len(dims)) for j in range(i + 2, len(dims) + 1)]
        run = next((run for run in runs if math.prod(sizes[slice(*run)]) == length), None)
        if run is None:
            rest *= length
        else:
            found += dims[slice(*run)]
            at = run[1]
    return tuple(found), rest


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

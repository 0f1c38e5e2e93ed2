"""The factor algebra: what a tensor's dim is made of.

A dim is a *product* of factors, major first; a size-1 dim is the empty product. While a graph is
read, factors are joined (union-find) and refined in place: a view refines a factor into a product,
a split or a concatenation into segments. `freeze` then yields the immutable form that every later
stage uses. One recursive form covers fused weights: q|k|v is `Cat` of three products.

A dim whose elements lie in an order that only the run knows (sorted tokens) is an *order* of the
dim that they came from: it can be split like that one (each rank sorts what it has), but it is no
other dim than itself. So an op that cuts it, or pairs its elements with others, has no exact rule.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.mesh import Split, divides


class FactorError(Exception):
    """Two dims can't be joined, or a dim can't be cut there: the op has no exact factor rule."""


class Factor:
    """A mutable factor: a leaf, or refined into a product or into a concatenation of products, or
    (`order_of`) the elements of another dim in an order of their own."""

    __slots__ = ("factors", "hint", "name", "order_of", "pads", "parent", "segments", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parent: Factor | None = None
        self.factors: Product | None = None
        self.segments: list[Product] | None = None
        self.order_of: Product | None = None
        self.hint = ""
        self.name = ""
        self.pads = False

    def __repr__(self) -> str:
        return f"{self.hint or 'f'}:{self.size}"


Product = list[Factor]
UNKNOWN_ORDER = (
    "only the run knows the order of a sorted dim: it can't be cut, nor paired with another"
)


def find(factor: Factor) -> Factor:
    """The representative of a factor's union-find class; the way to it is shortened."""
    root = factor
    while root.parent is not None:
        root = root.parent
    while factor.parent is not None:
        factor.parent, factor = root, factor.parent
    return root


def resolve(product: Sequence[Factor]) -> Product:
    """The product with every product refinement expanded; concatenations stay one factor."""
    out: Product = []
    for factor in product:
        root = find(factor)
        if root.factors is not None:
            out += resolve(root.factors)
        elif root.size != 1:
            out.append(root)
    return out


def leaves(product: Sequence[Factor]) -> list[Factor]:
    """The distinct leaf factors below a product, concatenations and orders expanded."""
    out: dict[Factor, None] = {}
    for factor in resolve(product):
        if factor.order_of is not None:
            out.update(dict.fromkeys(leaves(factor.order_of)))
        elif factor.segments is None:
            out[factor] = None
        else:
            for segment in factor.segments:
                out.update(dict.fromkeys(leaves(segment)))
    return list(out)


def size(product: Sequence[Factor]) -> int:
    """The number of elements along a dim."""
    return math.prod(factor.size for factor in resolve(product))


def new_dim(length: int) -> Product:
    """A fresh dim of this size."""
    return [Factor(length)] if length != 1 else []


def set_hint(product: Sequence[Factor], hint: str) -> None:
    """Remember what a single-factor dim is (its role), unless something said so before."""
    resolved = resolve(product)
    if len(resolved) == 1 and not resolved[0].hint and resolved[0].order_of is None:
        resolved[0].hint = hint


def split_minor(product: Sequence[Factor], minor_size: int) -> tuple[Product, Product]:
    """Divide a product into a major part and a minor part of the given size, refining as needed."""
    major = resolve(product)
    minor: Product = []
    done = 1
    while done < minor_size:
        if not major:
            raise FactorError(f"no minor part of size {minor_size}")
        unit = major.pop()
        need = minor_size // done
        if need % unit.size == 0:
            minor.insert(0, unit)
            done *= unit.size
            continue
        if unit.size % need:
            raise FactorError(f"size {unit.size} has no minor part of size {need}")
        high, low = _refine(unit, need)
        major += resolve([high])
        minor = resolve([low]) + minor
        done = minor_size
    return major, minor


def _refine(unit: Factor, minor_size: int) -> tuple[Factor, Factor]:
    if unit.order_of is not None:
        raise FactorError(UNKNOWN_ORDER)
    high, low = Factor(unit.size // minor_size), Factor(minor_size)
    if unit.segments is not None:
        # Every segment of a concatenation must have the same minor part.
        parts = [split_minor(segment, minor_size) for segment in unit.segments]
        high.segments = [part for part, _ in parts]
        for _, part in parts:
            unify([low], part)
        unit.segments = None
    unit.factors = [high, low]
    return high, low


def unify(left: Sequence[Factor], right: Sequence[Factor]) -> None:
    """Say that two dims are the same dim; refines both to common factors.

    Errors: FactorError where their sizes or structures can't agree.
    """
    a, b = resolve(left), resolve(right)
    if size(a) != size(b):
        raise FactorError(f"sizes {size(a)} and {size(b)} differ")
    while a and b:
        x, y = a.pop(), b.pop()
        if x is y:
            continue
        if x.size == y.size:
            _merge(x, y)
        elif x.size > y.size:
            high, low = split_minor([x], y.size)
            unify(low, [y])
            a += high
        else:
            high, low = split_minor([y], x.size)
            unify(low, [x])
            b += high
        a, b = resolve(a), resolve(b)


def _merge(x: Factor, y: Factor) -> None:
    if x.order_of is not None or y.order_of is not None:
        raise FactorError(UNKNOWN_ORDER)
    if x.segments is not None and y.segments is None:
        x, y = y, x
    if x.segments is not None and y.segments is not None:
        if [size(s) for s in x.segments] != [size(s) for s in y.segments]:
            raise FactorError("concatenations with different segments")
        for mine, theirs in zip(x.segments, y.segments, strict=True):
            unify(mine, theirs)
    elif x in leaves([y]):
        return
    y.hint = y.hint or x.hint
    x.parent = y


def cut(product: Sequence[Factor], sizes: Sequence[int]) -> list[Product]:
    """Partition a dim into contiguous segments of these sizes (slice, split, chunk)."""
    sizes = [length for length in sizes if length]
    resolved = resolve(product)
    if len(sizes) == 1:
        return [list(resolved)]
    if len(resolved) != 1:
        raise FactorError("a product can't be cut into segments")
    unit = resolved[0]
    if unit.order_of is not None:
        raise FactorError(UNKNOWN_ORDER)
    if unit.segments is None:
        unit.segments = [[Factor(length)] for length in sizes]
        return unit.segments
    return _regroup(unit, sizes)


def _regroup(unit: Factor, sizes: Sequence[int]) -> list[Product]:
    ends = list(itertools.accumulate(sizes))
    todo = list(_flat_segments(unit))
    out: list[Product] = []
    group: list[Product] = []
    position = 0
    while todo:
        segment = todo.pop(0)
        length, end = size(segment), ends[len(out)]
        if position + length > end:
            todo[:0] = cut(segment, [end - position, position + length - end])
            continue
        group.append(segment)
        position += length
        if position == end:
            out.append(group[0] if len(group) == 1 else [concatenation(group)])
            group = []
    return out


def _flat_segments(unit: Factor) -> Iterator[Product]:
    assert unit.segments is not None
    for segment in unit.segments:
        resolved = resolve(segment)
        if len(resolved) == 1 and resolved[0].segments is not None:
            yield from _flat_segments(resolved[0])
        else:
            yield resolved


def concatenation(segments: Sequence[Sequence[Factor]]) -> Factor:
    """A factor that is these segments one after the other."""
    factor = Factor(sum(size(segment) for segment in segments))
    factor.segments = [list(segment) for segment in segments]
    return factor


def new_order(of: Sequence[Factor]) -> Product:
    """A dim that has the elements of another one in an order that only the run knows."""
    if not resolve(of):
        return []
    factor = Factor(size(of))
    factor.order_of = list(of)
    return [factor]


# ---------------------------------------------------------------- the immutable form


@dataclass(frozen=True)
class Leaf:
    """A named dim, or a part of one: what may be split over mesh axes. `pads`: into pieces of equal
    size with padding at the end, where it doesn't divide."""

    name: str
    size: int
    pads: bool = False

    def padded(self, split: Split) -> bool:
        """Whether a split cuts it into pieces of which the last are padded."""
        return self.pads and not divides(split, self.size)


@dataclass(frozen=True)
class Cat:
    """Segments one after the other along one dim."""

    segments: tuple["DimExpr", ...]


@dataclass(frozen=True)
class Order:
    """The elements of a dim in an order that only the run knows."""

    of: "DimExpr"


DimExpr = tuple[Leaf | Cat | Order, ...]
"""A tensor's dim: a product, major first; () for size 1."""


def freeze(product: Sequence[Factor]) -> DimExpr:
    """The immutable form of a dim. Every leaf must have its name by now."""
    out: list[Leaf | Cat | Order] = []
    for factor in resolve(product):
        if factor.order_of is not None:
            out.append(Order(freeze(factor.order_of)))
        elif factor.segments is not None:
            out.append(Cat(tuple(freeze(segment) for segment in factor.segments)))
        else:
            assert factor.name, f"unnamed factor {factor}"
            out.append(Leaf(factor.name, factor.size, factor.pads))
    return tuple(out)


def expr_leaves(expr: DimExpr) -> Iterator[Leaf]:
    """The leaves of a dim, in order, repeated where they repeat."""
    for factor in expr:
        if isinstance(factor, Leaf):
            yield factor
        elif isinstance(factor, Order):
            yield from expr_leaves(factor.of)
        else:
            for segment in factor.segments:
                yield from expr_leaves(segment)


def unsorted(expr: DimExpr) -> Iterator[Leaf | Cat]:
    """A dim's factors, those of a sorted dim being the ones that it came from: of equal size."""
    for factor in expr:
        if isinstance(factor, Order):
            yield from unsorted(factor.of)
        else:
            yield factor

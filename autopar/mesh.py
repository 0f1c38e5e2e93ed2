"""The mesh: named axes over ranks, and the ordered axes that a dim is split over."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class AxisPart:
    """A whole mesh axis, or a factor of it: a rank's index in it is `coordinate // stride % size`.

    A whole axis has stride 1 and the axis's size. tp = 4 over 2 kv heads is the parts
    (tp, 2, stride 2) and (tp, 2, stride 1).

    `balanced`: the dim is cut into 2 · size chunks, and rank i holds the i-th from the beginning
    and the i-th from the end, in this order: under a causal mask all ranks then have the same
    number of pairs of positions. It says how a dim is cut, not which axis this is: parts that
    differ in it alone are equal.
    """

    axis: str
    size: int
    stride: int = 1
    balanced: bool = field(default=False, compare=False)

    def index(self, coordinate: int) -> int:
        """This part's index for a rank whose coordinate on the axis is `coordinate`."""
        return coordinate // self.stride % self.size


def overlap(one: AxisPart, other: AxisPart) -> bool:
    """Whether two parts share a factor of one axis."""
    first, second = sorted((one, other), key=lambda part: part.stride)
    return one.axis == other.axis and first.stride * first.size > second.stride


Split = tuple[AxisPart, ...]
"""Axes that one dim is split over, outermost (largest pieces) first."""


def split_size(split: Split) -> int:
    """How many pieces a split makes."""
    return math.prod(part.size for part in split)


def divides(split: Split, size: int) -> bool:
    """Whether a dim of this size can be split so: into equal pieces, each of two equal chunks where
    a part is balanced."""
    for part in split:
        if size % (part.size * (1 + part.balanced)):
            return False
        size //= part.size
    return True


@dataclass(frozen=True)
class Mesh:
    """Axes and their sizes, outermost first: rank = ((c0 · n1 + c1) · n2 + c2) …"""

    axes: tuple[tuple[str, int], ...]

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """The axis's size; 1 for an axis that the mesh lacks."""
        return dict(self.axes).get(axis, 1)

    def part(self, axis: str) -> AxisPart:
        """The whole axis as an AxisPart."""
        return AxisPart(axis, self.size(axis))

    def stride(self, axis: str) -> int:
        """The distance in ranks between neighbours along the axis."""
        names = [name for name, _ in self.axes]
        return math.prod(size for _, size in self.axes[names.index(axis) + 1 :])

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank lies, by axis."""
        return {name: rank // self.stride(name) % size for name, size in self.axes}

    def __str__(self) -> str:
        words = [
            f"{name} = {size}" if name[-1].isdigit() else f"{name}{size}"
            for name, size in self.axes
            if size > 1
        ]
        return " · ".join(words) or "one device"

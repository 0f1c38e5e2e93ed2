"""What a part of a pipeline has of the skeleton: the same for every setting that cuts it so."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from autopar.graph.model_graph import Block
from autopar.layouts.stages import Here


@dataclass(frozen=True)
class SkeletonPart:
    """`regions`: of its ops that belong to regions and its weights, those that lie in the part, and
    those whose gradients several stages sum; `outside`: other ops but calls of layers, buffers and
    constants of it."""

    regions: Hashable
    outside: frozenset[str]


@dataclass(frozen=True)
class SkeletonParts:
    """The parts that were asked for, by their view of the skeleton."""

    known: dict[int, tuple[Here, SkeletonPart]] = field(default_factory=dict)

    def of(self, skeleton: Block, here: Here) -> SkeletonPart:
        """What the part has."""
        if id(here) not in self.known:
            self.known[id(here)] = here, _part(skeleton, here)
        return self.known[id(here)][1]


def _part(skeleton: Block, here: Here) -> SkeletonPart:
    ops = skeleton.ops.items()
    inside = (*skeleton.params, *(name for name, op in ops if op.region is not None))
    others = (name for name, op in ops if op.region is None and op.kind != "layer")
    captured = skeleton.captured
    outside = (*others, *captured.buffers, *captured.constants)
    own = frozenset(name for name in inside if here.has(name))
    summed = frozenset(name for name in own if here.sums(name))
    return SkeletonPart((own, summed), frozenset(name for name in outside if here.has(name)))

"""A strategy that only tests use: in every region it splits dims that it draws, over axes of its
own. What it draws is legal as far as a region can tell; the compiler must make it right or refuse
it with a reason."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from autopar.plugin import AxisSpec, Candidate, Mesh, Refusal, Region, Strategy, split_over

AXES = ("ra", "rb")


@dataclass(frozen=True)
class RandomSplits(Strategy):
    """For each region and axis one drawn dim (or none), the same for the same `seed`."""

    name: ClassVar[str] = "random_splits"
    exact: ClassVar[bool] = False
    seed: int = 0

    def axes(self) -> tuple[AxisSpec, ...]:
        """Two axes along which all ranks get the same samples."""
        return tuple(
            AxisSpec(axis, splits_batch=False, locality=5 + i) for i, axis in enumerate(AXES)
        )

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """The one drawn candidate."""
        if candidate.options(self.name) is not None:
            return
        draw = random.Random(f"{self.seed}/{region.layer_class}/{region.name}")
        drawn: Candidate = candidate
        for axis in AXES:
            if mesh.size(axis) == 1:
                continue
            dims = [dim for dim in region.dims if not dim.blocked]
            chosen = draw.choice([*dims, None])
            if chosen is None:
                continue
            split = split_over(self.name, drawn, region, chosen, axis, mesh)
            if isinstance(split, Candidate):
                drawn = split
        if drawn is candidate:
            drawn = candidate.with_params(self.name, {})
        yield drawn

"""Tensor parallelism: every rank along tp takes some of a region's heads or ffn channels."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from autopar.plugin import AxisSpec, Candidate, Mesh, Refusal, Region, Strategy


@dataclass(frozen=True)
class Tensor(Strategy):
    """Splits the dim that is born and contracted inside a region, heads or ffn, over tp.

    Communication that follows: the region's output is a partial sum, so it is all-reduced over tp
    (reduce-scattered where what comes next is split), and in the backward its input's gradient is
    (Shoeybi et al. 2019, Megatron-LM, g and f).
    """

    name: ClassVar[str] = "tensor"

    def axes(self) -> tuple[AxisSpec, ...]:
        """tp, innermost: its traffic is twice a region and microbatch, on the critical path."""
        return (AxisSpec("tp", splits_batch=False, locality=100),)

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """The candidate with one internal dim of role heads or ffn split over tp, for each."""
        size = mesh.size("tp")
        if size == 1 or candidate.uses("tp"):
            return
        own = [dim for dim in region.dims if dim.internal and dim.role in ("heads", "ffn")]
        if not own:
            yield Refusal(f"region {region.name} has no heads or ffn dim of its own")
        for dim in own:
            if dim.blocked:
                yield Refusal(f"region {region.name}: {dim.name} can't be split: {dim.blocked}")
            elif candidate.split(dim.name):
                yield Refusal(f"region {region.name}: {dim.name} is already split")
            elif dim.size % size:
                yield Refusal(
                    f"region {region.name}: {dim.name} = {dim.size} isn't divisible by tp = {size}"
                )
            else:
                yield candidate.with_split(self.name, dim.name, (mesh.part("tp"),))

"""Sequence parallelism: between the tensor-parallel regions, tp splits the sequence."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from autopar.plugin import Candidate, Mesh, Refusal, Region, Strategy, split_over


@dataclass(frozen=True)
class Sequence(Strategy):
    """Splits the sequence dim over tp in the regions without heads or ffn of their own (norms,
    residual adds, dropout), which tensor parallelism leaves whole on every rank.

    Communication that follows: an all-gather over tp on the way into a tensor-parallel region and
    a reduce-scatter on the way out, as many bytes as the all-reduce that they replace (Korthikanti
    et al. 2022); gradients of the region's parameters are summed over tp.
    """

    name: ClassVar[str] = "sequence"

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """The candidate with the region's sequence dim split over tp."""
        if mesh.size("tp") == 1 or candidate.uses("tp"):
            return
        if any(dim.internal and dim.role in ("heads", "ffn", "channels") for dim in region.dims):
            yield Refusal(f"region {region.name}: its own dim may be split by tensor")
            return
        sequence = region.dim("sequence")
        if sequence is None:
            yield Refusal(f"region {region.name} has no sequence dim")
            return
        yield split_over(self.name, candidate, region, sequence, "tp", mesh)

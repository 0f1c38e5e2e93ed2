"""A strategy that only tests use: it splits a region's own ffn dim over dp and tp."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from autopar.plugin import Candidate, Mesh, Refusal, Region, Strategy


@dataclass(frozen=True)
class WideFfn(Strategy):
    """Splits ffn over (dp, tp), the batch being whole: weights that are cut over two ordered axes.
    Only without data parallelism in the region, so it is pinned with `"data": False`."""

    name: ClassVar[str] = "wide_ffn"

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """The candidate with ffn split over dp, then tp."""
        own = [dim for dim in region.dims if dim.internal and dim.role == "ffn"]
        if not own:
            yield Refusal(f"region {region.name} has no ffn dim of its own")
        elif not candidate.splits and min(mesh.size("dp"), mesh.size("tp")) > 1:
            split = (mesh.part("dp"), mesh.part("tp"))
            yield candidate.with_split(self.name, own[0].name, split)

"""Data parallelism: every rank along dp takes its share of the samples."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from autopar.plugin import AxisSpec, Candidate, Mesh, Refusal, Region, Strategy, split_over


@dataclass(frozen=True)
class Data(Strategy):
    """Splits the batch dim of every region over dp.

    Communication that follows: each parameter is used with different samples on each rank, so its
    gradient is summed over dp, once a step.
    """

    name: ClassVar[str] = "data"

    def axes(self) -> tuple[AxisSpec, ...]:
        """dp, outermost: its traffic is once a step and can wait for the slow links."""
        return (AxisSpec("dp", splits_batch=True, locality=0),)

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """The candidate with the region's batch dim split over dp."""
        if mesh.size("dp") == 1 or candidate.uses("dp"):
            return
        batch = region.dim("batch")
        if batch is None:
            yield Refusal(f"region {region.name} has no batch dim")
            return
        yield split_over(self.name, candidate, region, batch, "dp", mesh)

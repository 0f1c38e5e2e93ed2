"""A strategy that only tests use: in MLP regions it splits the batch over dp and tp."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from autopar.plugin import Candidate, Mesh, Refusal, Region, Strategy


@dataclass(frozen=True)
class WideBatch(Strategy):
    """Splits the batch of regions with an ffn dim over (dp, tp): one dim over two ordered axes."""

    name: ClassVar[str] = "wide_batch"

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """The candidate with tp added, innermost, to a batch that is split over dp."""
        dp, tp = mesh.part("dp"), mesh.part("tp")
        batch = region.dim("batch")
        if region.dim("ffn") is None or batch is None:
            yield Refusal(f"region {region.name} is no MLP")
        elif candidate.split(batch.name) == (dp,) and not candidate.uses("tp"):
            yield candidate.with_split(self.name, batch.name, (dp, tp))

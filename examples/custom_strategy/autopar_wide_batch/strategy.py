"""Where an MLP needs no tensor parallelism, its tp ranks can share the samples instead."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from autopar.plugin import Candidate, Mesh, Refusal, Region, Strategy


@dataclass(frozen=True)
class WideBatch(Strategy):
    """Splits the batch of regions with an ffn dim over (dp, tp): one dim over two ordered axes.

    Communication that follows: tp ranks take their slice of the samples on the way in and gather
    them on the way out; gradients of the region's parameters are summed over dp and tp.
    """

    name: ClassVar[str] = "wide_batch"

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """The candidate with tp added, innermost, to a batch that is split over dp."""
        dp, tp = mesh.part("dp"), mesh.part("tp")
        batch = region.dim("batch")
        if tp.size == 1 or candidate.uses("tp"):
            return
        if region.dim("ffn") is None or batch is None:
            yield Refusal(f"region {region.name} is no MLP")
        elif candidate.split(batch.name) == (dp,):
            if batch.size % (dp.size * tp.size):
                yield Refusal(
                    f"region {region.name}: {batch.name} = {batch.size} isn't divisible by "
                    f"dp · tp = {dp.size * tp.size}"
                )
            else:
                yield candidate.with_split(self.name, batch.name, (dp, tp))

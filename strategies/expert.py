"""Expert parallelism: every rank along ep holds some of the experts; tokens travel to them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from autopar.plugin import (
    AxisPart,
    AxisSpec,
    Candidate,
    Dim,
    Mesh,
    Refusal,
    Region,
    Split,
    Strategy,
    split_over,
)


@dataclass(frozen=True)
class Expert(Strategy):
    """Splits the batch over ep everywhere, and the experts over ep where tokens can be sent to
    them.

    Communication that follows: an all-to-all of tokens to the ranks that hold their experts and one
    back, for each in the forward and the backward (Lepikhin et al. 2020, GShard), and one of each
    expert's number of tokens. Gradients of the experts' weights are complete over ep; all others
    are summed over it.
    """

    name: ClassVar[str] = "expert"

    def axes(self) -> tuple[AxisSpec, ...]:
        """ep, inside dp and around tp: its traffic is four exchanges of tokens a layer and
        microbatch."""
        return (AxisSpec("ep", splits_batch=True, locality=50),)

    def misfit(self, regions: Iterable[Region], mesh: Mesh) -> str | None:
        """Without experts to split ep would be dp by another name."""
        size = mesh.size("ep")
        if size == 1:
            return None
        reasons: dict[str, None] = {}
        for region in regions:
            experts = _experts(region)
            splits = _over(experts, size) if experts else _why_none(region)
            if isinstance(splits, Refusal):
                reasons[splits.reason] = None
            elif splits:
                return None
        return f"ep = {size}: " + ("; ".join(reasons) or "the model has no experts to split")

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """The candidate with the batch, and the experts that it sends tokens to, split over ep."""
        size = mesh.size("ep")
        if size == 1 or candidate.uses("ep"):
            return
        batch = region.dim("batch")
        if batch is None:
            yield Refusal(f"region {region.name} has no batch dim")
            return
        split = split_over(self.name, candidate, region, batch, "ep", mesh)
        experts = _experts(region)
        if isinstance(split, Refusal) or not experts:
            yield split
            return
        splits = _over(experts, size)
        if isinstance(splits, Refusal):  # they are on every rank, then, like all other weights
            yield splits
            yield split
            return
        for dim, parts in splits.items():
            split = split.with_split(self.name, dim, parts)
        yield split


def _experts(region: Region) -> list[Dim]:
    """The dims of experts that tokens can be sent to: groups of experts, then those of a group."""
    return [dim for dim in region.dims if dim.role == "experts" and dim.rows]


def _why_none(region: Region) -> Refusal | None:
    """Why tokens can't be sent to a region's experts, where it has some of its own."""
    blocked = [dim.blocked for dim in region.dims if dim.role == "experts" and dim.blocked]
    if not blocked or not any(dim.internal for dim in region.dims):
        return None
    return Refusal(
        f"region {region.name}: only tokens sorted by expert, in grouped matmuls, can be sent to "
        f"their experts, and here {blocked[0]} (a Hugging Face model does that with "
        'experts_implementation="grouped_mm")'
    )


def _over(experts: list[Dim], size: int) -> dict[str, Split] | Refusal:
    """Neighbouring experts on each rank: groups are split first, then the experts of a group."""
    splits: dict[str, Split] = {}
    left = size
    for dim in experts:
        pieces = math.gcd(dim.size, left)
        left //= pieces
        if pieces > 1:
            splits[dim.name] = (AxisPart("ep", pieces, left),)
        if left > 1 and pieces < dim.size:
            break
    if left == 1:
        return splits
    sizes = " · ".join(f"{dim.name} = {dim.size}" for dim in experts)
    return Refusal(f"{sizes} can't be divided among ep = {size} ranks, neighbours together")

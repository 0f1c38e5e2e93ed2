"""Tensor parallelism: every rank along tp takes some of a region's heads or ffn channels."""

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
    Strategy,
)

ROLES = ("heads", "ffn", "channels", "vocab")


@dataclass(frozen=True)
class Tensor(Strategy):
    """Splits the dim that is born and contracted inside a region, heads, ffn, channels or vocab,
    over tp.

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
        """The candidate with one internal dim of such a role split over tp."""
        size = mesh.size("tp")
        if size == 1 or candidate.uses("tp"):
            return
        own = [dim for dim in region.dims if dim.internal and dim.role in ROLES]
        if not own:
            yield Refusal(
                f"region {region.name} has no heads, ffn, channels or vocab dim of its own"
            )
        for dim in own:
            if dim.blocked:
                yield Refusal(f"region {region.name}: {dim.name} can't be split: {dim.blocked}")
            elif candidate.split(dim.name):
                yield Refusal(f"region {region.name}: {dim.name} is already split")
            elif dim.size % size == 0:
                yield candidate.with_split(self.name, dim.name, (mesh.part("tp"),))
            else:
                yield self._unevenly(candidate, region, dim, mesh.part("tp"))

    def _unevenly(
        self, candidate: Candidate, region: Region, dim: Dim, tp: AxisPart
    ) -> Candidate | Refusal:
        """A dim that tp doesn't divide: over groups of queries as well, else padded (as Megatron
        pads vocabularies), where every rank then has something."""
        grouped = self._over_groups(candidate, region, dim, tp.size)
        if isinstance(grouped, Refusal) and dim.pads and dim.size > tp.size:
            return candidate.with_split(self.name, dim.name, (tp,))
        return grouped

    def _over_groups(
        self, candidate: Candidate, region: Region, heads: Dim, size: int
    ) -> Candidate | Refusal:
        """Grouped-query attention with tp above the number of kv heads: the outer factor of tp
        splits the kv heads, the inner one the queries that share a kv head (which is replicated
        there, its gradient summed over that factor)."""
        outer = math.gcd(heads.size, size)
        inner = size // outer
        groups = region.dim("query_group") if heads.role == "heads" else None
        if groups is None or groups.blocked or groups.size % inner:
            shared = f", nor {groups.name} = {groups.size} by the rest, {inner}" if groups else ""
            return Refusal(
                f"region {region.name}: {heads.name} = {heads.size} isn't divisible by "
                f"tp = {size}{shared}"
            )
        split = candidate.with_split(self.name, groups.name, (AxisPart("tp", inner, 1),))
        if outer == 1:
            return split
        return split.with_split(self.name, heads.name, (AxisPart("tp", outer, inner),))

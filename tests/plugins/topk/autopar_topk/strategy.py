"""The planning half: what is legal and what it entails."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from autopar.plugin import (
    AutoparError,
    Candidate,
    GradientSync,
    Mesh,
    ParamPlan,
    Refusal,
    Region,
    Send,
    StateSpec,
    Strategy,
)


@dataclass(frozen=True)
class TopK(Strategy):
    """Sums only each rank's `fraction` largest gradient elements over the data axes; what isn't
    sent is kept and added to the next step's gradient (error feedback; Stich et al. 2018).

    It changes numbers, so it is used only where pinned. A fraction of 1 is an exact sum.
    """

    fraction: float = 0.01
    name: ClassVar[str] = "topk"
    exact: ClassVar[bool] = False
    tier: ClassVar[Literal["dims", "state"]] = "state"

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise AutoparError(f"topk: fraction must lie in (0, 1], not {self.fraction}")

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """The candidate with every trainable parameter's gradient summed this way."""
        if candidate.options(self.name) is not None:
            return
        batch = region.dim("batch")
        axes = () if batch is None else candidate.split(batch.name)
        names = [param.name for param in region.params if param.trainable]
        if not axes or not names:
            yield Refusal(f"region {region.name} has no gradient to sum over data axes")
            return
        if any(candidate.param(name) != ParamPlan() for name in names):
            yield Refusal(f"region {region.name}: another strategy shards its gradients")
            return
        sync = GradientSync(
            axes,
            "autopar_topk.runtime:topk_sum",
            options=(("fraction", self.fraction),),
            sends=(Send("all_gather", self.fraction, index_bytes=8),),
            passes=6.0,
            state=(StateSpec("error", "P"),),
        )
        plan = ParamPlan(sync=sync)
        yield candidate.with_params(self.name, dict.fromkeys(names, plan), fraction=self.fraction)

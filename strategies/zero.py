"""ZeRO: parameters, gradients and optimizer state are sharded over ranks that replicate them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from autopar.plugin import AutoparError, Candidate, Mesh, ParamPlan, Refusal, Region, Strategy

STAGES = (3,)


@dataclass(frozen=True)
class Zero(Strategy):
    """Shards what lives of each trainable parameter over the axes that split the region's batch.

    `stage` 3 shards value, gradient and optimizer state; None leaves the choice to the planner.
    Communication that follows: the value is all-gathered before the forward and again before the
    backward, and the gradient is reduce-scattered instead of all-reduced (Rajbhandari et al. 2020).
    """

    stage: int | None = None
    name: ClassVar[str] = "zero"
    tier: ClassVar[Literal["dims", "state"]] = "state"

    def __post_init__(self) -> None:
        if self.stage is not None and self.stage not in STAGES:
            raise AutoparError(
                f"zero has no stage {self.stage!r}: legal are "
                f"{', '.join(map(str, STAGES))}, and False for none"
            )

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """The candidate with every trainable parameter of the region sharded, for each stage."""
        if candidate.options(self.name) is not None:
            return
        batch = region.dim("batch")
        axes = () if batch is None else candidate.split(batch.name)
        trainable = [param.name for param in region.params if param.trainable]
        if not axes:
            yield Refusal(f"region {region.name}: its batch isn't split, nothing is replicated")
            return
        if not trainable:
            yield Refusal(f"region {region.name} has no trainable parameters")
            return
        for stage in STAGES if self.stage is None else (self.stage,):
            plan = ParamPlan(param=axes, grad=axes, state=axes)
            yield candidate.with_params(self.name, dict.fromkeys(trainable, plan), stage=stage)

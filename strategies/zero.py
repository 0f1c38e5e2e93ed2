"""ZeRO: parameters, gradients and optimizer state are sharded over ranks that replicate them."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from autopar.plugin import (
    AutoparError,
    AxisPart,
    Candidate,
    Mesh,
    ParamPlan,
    Refusal,
    Region,
    Split,
    Strategy,
)

STAGES = (1, 2, 3)


@dataclass(frozen=True)
class Zero(Strategy):
    """Shards what lives of each trainable parameter over the axes that split the region's batch,
    and its sequence in balanced chunks.

    `stage` 1 shards optimizer state, 2 gradients as well, 3 values as well; None leaves the choice
    to the planner. `within`: hybrid, sharded over neighbouring groups of that many ranks and
    replicated across them; None shards over all of them.

    Frozen parameters have values alone: stage 3 shards them as well.

    Weights of experts that lie on different ranks are sharded over the ranks that share them, and
    under stage 3 like those of stage 2.

    Communication that follows (Rajbhandari et al. 2020): the value is all-gathered once a step (1,
    2) or for every forward and every backward (3); the gradient is reduce-scattered instead of
    all-reduced, once a step (1) or in every backward (2, 3). Where hybrid, the shards of gradients
    are then all-reduced across groups, once a step.
    """

    stage: int | None = None
    within: int | None = None
    name: ClassVar[str] = "zero"
    tier: ClassVar[Literal["dims", "state"]] = "state"

    def __post_init__(self) -> None:
        if self.stage is not None and (type(self.stage) is not int or self.stage not in STAGES):
            raise AutoparError(
                f"zero has no stage {self.stage!r}: legal are "
                f"{', '.join(map(str, STAGES))}, and False for none"
            )
        if self.within is not None and (type(self.within) is not int or self.within < 2):
            raise AutoparError(
                f"zero within {self.within!r}: it takes the number of ranks of a group that shares "
                "one copy, at least 2"
            )

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """The candidate with every trainable parameter of the region sharded, for each stage."""
        if candidate.options(self.name) is not None:
            return
        split = _replicas(candidate, region, mesh)
        params = [param for param in region.params if param.shape]  # scalars have no dim to shard
        if not split:
            yield Refusal(f"region {region.name}: its batch isn't split, nothing is replicated")
            return
        if not params:
            yield Refusal(f"region {region.name} has no trainable parameters")
            return
        axes = _group(split, mesh, self.within, _balanced(candidate))
        if isinstance(axes, Refusal):
            yield axes
            return
        options = {} if self.within is None else {"within": self.within}
        for stage in STAGES if self.stage is None else (self.stage,):
            plan = ParamPlan(axes if stage > 2 else (), axes if stage > 1 else (), axes)
            plans = {}
            for param in params:
                own = {part.axis for dim in param.experts for part in candidate.split(dim)}
                if param.trainable:
                    plans[param.name] = _of_experts(plan, own) if own else plan
                elif plan.param and not own:
                    plans[param.name] = plan
            if plans:
                yield candidate.with_params(self.name, plans, stage=stage, **options)
            else:
                yield Refusal(f"region {region.name} has no trainable parameters")


def _replicas(candidate: Candidate, region: Region, mesh: Mesh) -> Split:
    """The axes along which ranks have the same weights for other samples, or for their share of all
    samples' positions."""
    batch = region.dim("batch")
    split = () if batch is None else candidate.split(batch.name)
    return (*split, *map(mesh.part, _balanced(candidate)))


def _balanced(candidate: Candidate) -> list[str]:
    every = [part for _, split in candidate.splits for part in split]
    return list(dict.fromkeys(part.axis for part in every if part.balanced))


def _of_experts(plan: ParamPlan, own: set[str]) -> ParamPlan:
    """The plan of a weight that is itself split over some of these axes: it is sharded over the
    others. Its value stays whole: FSDP2 gathers those of one layer over one group."""
    rest = tuple(part for part in plan.state if part.axis not in own)
    return ParamPlan((), rest if plan.grad else (), rest)


def _group(split: Split, mesh: Mesh, within: int | None, uncut: Collection[str]) -> Split | Refusal:
    """The innermost parts of the axes, of `within` ranks together; all where that is None. Axes in
    `uncut` are taken whole."""
    order = [axis for axis, _ in mesh.axes]
    axes = tuple(sorted(split, key=lambda part: (order.index(part.axis), -part.stride)))
    if within is None:
        return axes
    found: list[AxisPart] = []
    left = within
    for part in reversed(axes):
        if left % part.size == 0:
            found.insert(0, part)
            left //= part.size
        elif part.size % left == 0 and part.axis in uncut:
            return Refusal(
                f"zero within {within} ranks would cut {part.axis} = {part.size}, along which "
                "sequences lie in balanced chunks: take a multiple of it"
            )
        elif part.size % left == 0:
            found.insert(0, AxisPart(part.axis, left, part.stride))
            left = 1
        else:
            break
        if left == 1:
            return tuple(found)
    text = " · ".join(f"{part.axis} {part.size}" for part in axes)
    return Refusal(
        f"zero within {within} ranks doesn't divide the batch's axes ({text}) into equal groups of "
        "neighbours"
    )

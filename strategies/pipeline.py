"""Pipeline parallelism: ranks along pp hold different layers, microbatches flow through them."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from autopar.plugin import (
    AutoparError,
    AxisSpec,
    Candidate,
    Mesh,
    Refusal,
    Region,
    Schedule,
    Strategy,
    Table,
)
from autopar.runtime import schedules

Make = Callable[..., Table]
SIMPLE: Mapping[str, Make] = MappingProxyType(
    {
        "gpipe": schedules.gpipe,
        "1f1b": schedules.one_forward_one_backward,
        "zero_bubble": schedules.zero_bubble,
    }
)
NAMES = (*SIMPLE, "interleaved")


@dataclass(frozen=True)
class Pipeline(Strategy):
    """Cuts the layers into stages along pp, each with about the same work.

    `schedule`: gpipe, 1f1b, interleaved or zero_bubble; None leaves the choice to the planner. It
    looks at interleaved where microbatches come in whole groups of as many as there are stages: of
    others the last group wins little, and their tables take long to make.
    `chunks`: how many pieces of the model a stage of an interleaved schedule has; None tries powers
    of two. Communication that follows: activations to the next stage and gradients back, once a
    microbatch; a weight used in several stages has its gradients summed over them, once a step.
    """

    schedule: str | None = None
    chunks: int | None = None
    name: ClassVar[str] = "pipeline"

    def __post_init__(self) -> None:
        if self.schedule is not None and self.schedule not in NAMES:
            raise AutoparError(
                f"there is no schedule {self.schedule!r}: there are {', '.join(NAMES)}"
            )
        if self.chunks is not None and (type(self.chunks) is not int or self.chunks < 2):
            raise AutoparError(
                f"chunks {self.chunks!r}: an interleaved stage has at least 2 pieces of the model"
            )

    def axes(self) -> tuple[AxisSpec, ...]:
        """pp, outermost: it sends the least, and only between neighbours."""
        return (AxisSpec("pp", splits_batch=False, locality=-100, splits_layers=True),)

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """Nothing: a region runs on its stage as it would on any rank."""
        return ()

    def schedules(self, mesh: Mesh, microbatches: int, layers: int) -> Iterable[Schedule | Refusal]:
        """Each schedule for which there are enough layers."""
        stages = mesh.size("pp")
        if stages == 1:
            return
        if layers < stages:
            yield Refusal(f"{layers} repeated layers are too few for {stages} stages along pp")
            return
        for name, make in SIMPLE.items():
            if self.schedule in (None, name) and self.chunks is None:
                yield self._schedule(name, make, stages=stages, microbatches=microbatches)
        if self.schedule is None and microbatches % stages:
            yield Refusal(
                f"interleaved: {microbatches} microbatches don't make whole groups of {stages}, "
                'one for each stage; pin "pipeline": {"schedule": "interleaved"} to have it so'
            )
        elif self.schedule in (None, "interleaved"):
            tried = [self.chunks] if self.chunks else [2**i for i in range(1, layers.bit_length())]
            fit = [chunks for chunks in tried if chunks * stages <= layers]
            for chunks in fit:
                yield self._schedule(
                    "interleaved",
                    schedules.interleaved,
                    stages=stages,
                    microbatches=microbatches,
                    chunks=chunks,
                )
            if not fit:
                yield Refusal(
                    f"interleaved: {layers} repeated layers are too few for {stages} stages of "
                    f"{self.chunks or 2} pieces"
                )

    @staticmethod
    def _schedule(name: str, make: Make, **options: int) -> Schedule:
        stages, microbatches = options["stages"], options["microbatches"]
        # The last stage begins after a forward (of one of its chunks) of all others; where the
        # backward comes whole, the first one's last follows as many backwards.
        least, exact = 1.0, True
        if name == "interleaved":
            least, exact = 1 / options["chunks"], microbatches % stages == 0
        if name == "zero_bubble":
            least, exact = 1 / 3, microbatches >= stages
        brief = None
        if name != "gpipe" and (exact or name != "interleaved"):
            # Two groups of as many microbatches as stages fill them: more go the same way.
            fewer = {**options, "microbatches": min(microbatches, 2 * stages)}
            brief = functools.partial(_table, make, **fewer)
        return Schedule(
            name,
            "pp",
            f"autopar.runtime.schedules:{make.__name__}",
            tuple(options.items()),
            microbatches,
            functools.partial(_table, make, **options),
            least if exact else None,
            name == "zero_bubble",
            least,
            brief,
        )

    def conflict(
        self, candidate: Candidate, region: Region, mesh: Mesh, schedule: Schedule | None = None
    ) -> str | None:
        """FSDP2 takes a module's parameters away after its backward: of one in two halves it knows
        nothing, gathers too little and leaves gradients out, or wrong."""
        if schedule is None or not schedule.splits_backward:
            return None
        if any(plan.param for _, plan in candidate.params):
            return (
                f"region {region.name}: {schedule.name} makes weights' gradients after the "
                "inputs', and FSDP2 (zero 3) has then freed what they need: use zero 1 or 2, or "
                "another schedule"
            )
        return None


@functools.lru_cache(maxsize=128)
def _table(make: Make, **options: int) -> Table:
    """The same for every mesh with as many stages: a search asks for it again and again."""
    return make(**options)

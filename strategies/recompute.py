"""Recompute (activation checkpointing): the forward runs again in the backward instead of keeping
what it made."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from autopar.plugin import (
    AutoparError,
    Candidate,
    Mesh,
    Recomputed,
    Refusal,
    Region,
    Schedule,
    Strategy,
)

SCOPES = {"full": "layers", "block": "layers", "selective": "region", "region": "region"}


@dataclass(frozen=True)
class Recompute(Strategy):
    """Keeps what goes in and runs the rest again when the backward needs it (Chen et al. 2016;
    selective: Korthikanti et al. 2022).

    `scope`: "full" (or "block"), whole layers; "selective" (or "region"), a region alone; None
    leaves the choice to the planner. `together`: so many consecutive layers run again together,
    with only their common input kept (about √ of all layers keeps least); all lie in one stage.
    Above 1 it means whole layers: a region alone has no such group.

    Communication that follows: collectives of the forward come again, but for those after the last
    tensor that the backward needs.
    """

    scope: str | None = None
    together: int = 1
    name: ClassVar[str] = "recompute"
    tier: ClassVar[Literal["dims", "state", "recompute"]] = "recompute"

    def __post_init__(self) -> None:
        if self.scope is not None and self.scope not in tuple(SCOPES):
            raise AutoparError(
                f"recompute has no scope {self.scope!r}: legal are {', '.join(SCOPES)}, and False "
                "for none"
            )
        if type(self.together) is not int or self.together < 1:
            raise AutoparError(
                f"recompute together {self.together!r}: it takes the number of consecutive layers "
                "that run again together, at least 1"
            )
        if self.together > 1 and self.scope is not None and SCOPES[self.scope] == "region":
            raise AutoparError(f"recompute {self.scope!r} is of regions: it takes no `together`")

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """The candidate with its region run again, and with its whole layer run again."""
        if candidate.recompute is not None:
            return
        scope = self._scope()
        if scope != "region":
            if region.layer_once:
                yield Refusal(
                    f"region {region.name}: its layer can't run twice: {region.layer_once}"
                )
            else:
                again = Recomputed("layers", self.together)
                yield candidate.with_recompute(
                    self.name, again, scope="full", **_given(self.together)
                )
        if scope != "layers":
            if region.once:
                yield Refusal(f"region {region.name} can't run twice: {region.once}")
            else:
                yield candidate.with_recompute(self.name, Recomputed("region"), scope="selective")

    def _scope(self) -> str | None:
        """What may run again; None: both."""
        if self.scope is not None:
            return SCOPES[self.scope]
        return "layers" if self.together > 1 else None

    def conflict(
        self, candidate: Candidate, region: Region, mesh: Mesh, schedule: Schedule | None = None
    ) -> str | None:
        """FSDP2 would gather the parameters of all but the group's last layer once more, and a
        backward in two halves would run the forward twice."""
        again = candidate.recompute
        if schedule is not None and schedule.splits_backward:
            return (
                f"region {region.name}: {schedule.name} takes the backward in two halves, and each "
                "would run the forward again: take another schedule"
            )
        if again is None or again.layers == 1 or not any(p.param for _, p in candidate.params):
            return None
        return (
            f"region {region.name}: {again.layers} layers run again together, of which torch's "
            "FSDP2 (zero 3) gathers only the last before its backward: take zero 1 or 2, or "
            "recompute each layer by itself"
        )


def _given(together: int) -> dict[str, int]:
    return {} if together == 1 else {"together": together}

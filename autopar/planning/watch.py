"""How far a search is, for whoever looks on. Nothing of it is in a plan."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Settings (a mesh with a schedule and a number of microbatches) so far: `seen`, of which
    `dropped` can't run, `pruned` have a bound above the best step, and `solved` by the ILP.
    `best_s`: the fastest step so far. `bound_s`: no setting that is still open is faster."""

    seen: int
    dropped: int
    pruned: int = 0
    solved: int = 0
    best_s: float | None = None
    bound_s: float | None = None


Watch = Callable[[Progress], None]


def unwatched(progress: Progress) -> None:
    """Nobody looks on."""

"""Units in which a solver sees one planning problem, chosen from the problem's own numbers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.planning.problem import Choice, PlanningProblem

_TYPICAL = 1e4
_LEAST_GRAIN = 1e-4


@dataclass(frozen=True)
class Scale:
    """Seconds and bytes in the programme's units.

    Seconds: a typical objective is 1e4, so that the solvers' absolute tolerances (1e-6) are far
    below any gap. Bytes: the grain is the largest common divisor of all sizes; it is at least 1e-4,
    and the memory row has half a grain to spare, 50 times those tolerances.
    """

    per_second: float
    grain_bytes: int
    per_grain: float

    def of_seconds(self, seconds: float) -> float:
        return seconds * self.per_second

    def grains(self, size_bytes: int) -> float:
        """Bytes that are no multiple of the grain, rounded up."""
        return math.ceil(size_bytes / self.grain_bytes) * self.per_grain

    def of_bytes(self, size_bytes: int) -> float:
        return size_bytes // self.grain_bytes * self.per_grain


def choose_scale(problem: PlanningProblem) -> Scale:
    """Seconds by the geometric mean of the fastest and the slowest choices: one absurd choice
    shouldn't drown the others. Bytes so that all slots together are at most about 1e4."""
    choices = [slot.choices for slot in problem.slots]
    fastest_s = sum(min(c.seconds for c in some) for some in choices)
    slowest_s = sum(max(c.seconds for c in some) for some in choices)
    conversions_s = sum(s or 0.0 for edge in problem.edges for row in edge.seconds for s in row)
    typical_s = problem.base_seconds + math.sqrt(fastest_s * slowest_s)
    sizes = [b for some in choices for c in some for b in _sizes(c)]
    sizes += [b for edge in problem.edges for row in edge.resident_bytes for b in row]
    sizes += [
        b for one in problem.shared for b in (one.share.resident_bytes, *one.share.held_bytes)
    ]
    grain_bytes = math.gcd(*sizes) or 1
    most_bytes = sum(max(c.resident_bytes for c in some) for some in choices)
    per_grain = _TYPICAL * grain_bytes / max(most_bytes, 1)
    return Scale(
        _TYPICAL / (typical_s or slowest_s + conversions_s or 1.0),
        grain_bytes,
        min(1.0, max(_LEAST_GRAIN, per_grain)),
    )


def _sizes(choice: Choice) -> Iterator[int]:
    if not choice.shares:
        yield from (choice.resident_bytes, choice.transient_bytes)
        yield from (choice.again_bytes, choice.freed_bytes)
    for share in choice.shares:
        yield from (share.resident_bytes, share.transient_bytes, *share.held_bytes)
        yield from (share.again_bytes, share.freed_bytes)

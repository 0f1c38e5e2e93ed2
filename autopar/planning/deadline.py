"""When planning must come to an end, by the clock."""

import math
import time
from dataclasses import dataclass

LEAST_S = 0.05
"""What a solver is given at least: less would be no run at all."""


@dataclass(frozen=True)
class Deadline:
    """`at_s` of the machine's own clock (`time.monotonic`); inf: never."""

    at_s: float = math.inf

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.at_s

    @property
    def left_s(self) -> float | None:
        """What a solver may still take; None: as long as it needs."""
        if math.isinf(self.at_s):
            return None
        return max(self.at_s - time.monotonic(), LEAST_S)

    def at_least(self, some_s: float) -> "Deadline":
        """The same, but not before so many seconds from now."""
        return Deadline(max(self.at_s, time.monotonic() + some_s))


NEVER = Deadline()


def after(limit_s: float | None) -> Deadline:
    """So many seconds from now; None: never."""
    return NEVER if limit_s is None else Deadline(time.monotonic() + limit_s)

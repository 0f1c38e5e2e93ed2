"""Settings of a search of which nothing is priced yet."""

from dataclasses import dataclass

from autopar.layouts.layout import Setting

NOTHING, PARAMS, ROUGHLY, OUTLINE = range(4)
"""What a setting's bound knows of before it is opened: as much as all; what its parameters come
to on its mesh; what its outline takes with its schedule and memory, by another setting's
multipliers; by its own."""


@dataclass(frozen=True)
class Unopened:
    """A mesh and a number of microbatches, with the schedules that it may have: settings of which
    nothing is priced yet."""

    asked: Setting
    scheduled: tuple[Setting, ...]
    bound_s: float = 0.0
    knows: int = NOTHING
    """What its bound knows of."""

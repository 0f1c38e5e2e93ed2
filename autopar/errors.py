"""The errors that a user of autopar can cause; everything else is an assert."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.layouts.layout import Setting
    from autopar.plan import Plan
    from autopar.planning.advice import Advice


class AutoparError(Exception):
    """A user's mistake: says what was wrong, with the numbers, and what to do next."""


class InfeasibleError(AutoparError):
    """Nothing that the planner may choose fits into the devices' memory.

    `short_bytes` is how much the best choice is over the limit on the fullest device, `setting` the
    mesh and microbatches that it runs on. `smallest` is that choice as a plan, with its memory by
    kind and stage (None where a plan from outside doesn't fit, which has just that).
    """

    def __init__(
        self,
        message: str,
        short_bytes: int,
        setting: "Setting | None" = None,
        smallest: "Plan | None" = None,
        advise: "Callable[[bool], Advice] | None" = None,
    ) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes
        self.setting = setting
        self.smallest = smallest
        self._advise = advise

    def advice(self, progress: bool = True) -> "Advice":
        """The smallest changes (memory, devices, a pin lifted, a strategy allowed) that would fit,
        each checked by planning with it, which takes as long as a few calls of `compile`: each may
        take the whole `time_limit_s`. `progress` as there.

        Errors: AutoparError where nothing was planned here (a plan from outside; under torchrun, a
        rank other than 0).
        """
        if self._advise is None:
            raise AutoparError(
                "there is advice only where the planner itself found that nothing fits: on rank 0, "
                "of compile. For a plan that was edited, compile anew with its axes in `pin`"
            )
        return self._advise(progress)

    def __reduce__(self) -> tuple[type["InfeasibleError"], tuple[object, ...]]:
        return type(self), (str(self), self.short_bytes, None, self.smallest)


class OutOfTimeError(AutoparError):
    """A time limit was over before there was a plan, or a proof that there is none."""


class OpaqueWarning(UserWarning):
    """Part of a model can't be analysed: it is only replicated, or not even split by samples."""

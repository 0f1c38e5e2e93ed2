"""The errors that a user of autopar can cause; everything else is an assert."""


class AutoparError(Exception):
    """A user's mistake: says what was wrong, with the numbers, and what to do next."""


class InfeasibleError(AutoparError):
    """Nothing that the planner may choose fits into the devices' memory.

    `short_bytes` is how much the best choice is over the limit on the fullest device.
    """

    def __init__(self, message: str, short_bytes: int) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes

    def __reduce__(self) -> tuple[type["InfeasibleError"], tuple[str, int]]:
        return type(self), (str(self), self.short_bytes)


class OpaqueWarning(UserWarning):
    """Part of a model can't be analysed: it is only replicated, or not even split by samples."""

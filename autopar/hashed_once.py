"""Frozen dataclasses that planning looks up all the time keep their hash."""

from typing import Any, TypeVar

T = TypeVar("T")


def hashed_once(cls: type[T]) -> type[T]:
    """A frozen dataclass whose hash is computed once for each value. The hash stays in the process:
    that of text differs in another one, so pickles go without."""
    compute = cls.__hash__

    def once(self: Any) -> int:
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = compute(self)
            object.__setattr__(self, "_hash", found)
        return found

    def state(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    cls.__hash__ = once  # type: ignore[method-assign]
    cls.__getstate__ = state  # type: ignore[method-assign]
    return cls

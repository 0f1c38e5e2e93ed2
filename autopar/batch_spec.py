"""The structure of a batch, as a value that a plan can hold: from a batch, and back on meta."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import pydantic
import torch
from pydantic.dataclasses import dataclass

from autopar.errors import AutoparError

_STRICT = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
LARGEST = 2**62
"""Elements that a tensor of a batch may have: torch counts them in 64 bits."""


@dataclass(frozen=True, config=_STRICT)
class TensorSpec:
    """A tensor: its whole (global) shape and its dtype's name, "int64"."""

    kind: Literal["tensor"]
    shape: tuple[Annotated[int, pydantic.Field(ge=0)], ...]
    dtype: str


@dataclass(frozen=True, config=_STRICT)
class ValueSpec:
    """A plain value that isn't a tensor: it is part of the program."""

    kind: Literal["value"]
    value: bool | int | float | str | None


@dataclass(frozen=True, config=_STRICT)
class ListSpec:
    """A list or a tuple."""

    kind: Literal["list", "tuple"]
    items: tuple["BatchSpec", ...]


@dataclass(frozen=True, config=_STRICT)
class DictSpec:
    """A dict, in order."""

    kind: Literal["dict"]
    items: Mapping[str, "BatchSpec"]


@dataclass(frozen=True, config=_STRICT)
class OtherSpec:
    """Something that JSON can't describe; `what` is its class."""

    kind: Literal["other"]
    what: str


BatchSpec = Annotated[
    TensorSpec | ValueSpec | ListSpec | DictSpec | OtherSpec,
    pydantic.Field(discriminator="kind"),
]


def describe_batch(batch: Any) -> BatchSpec:
    """The structure of a batch. A mapping of any class at the top counts as a dict, as it does in
    capture."""
    return _describe(dict(batch) if isinstance(batch, Mapping) else batch)


def _describe(part: Any) -> BatchSpec:
    if isinstance(part, torch.Tensor):
        dtype = str(part.dtype).removeprefix("torch.")
        return TensorSpec("tensor", tuple(map(int, part.shape)), dtype)
    if type(part) is list:
        return ListSpec("list", tuple(map(_describe, part)))
    if type(part) is tuple:
        return ListSpec("tuple", tuple(map(_describe, part)))
    if type(part) is dict and all(type(key) is str for key in part):
        return DictSpec("dict", {key: _describe(value) for key, value in part.items()})
    finite = type(part) is not float or math.isfinite(part)
    if type(part) in (bool, int, float, str, type(None)) and finite:
        return ValueSpec("value", part)
    return OtherSpec("other", f"{type(part).__module__}.{type(part).__qualname__}")


def meta_batch(spec: BatchSpec) -> Any:
    """A batch of this structure on the meta device.

    Errors: AutoparError for a dtype that torch doesn't have, a size beyond 64 bits, and what JSON
    can't describe.
    """
    match spec:
        case TensorSpec():
            return _meta_tensor(spec)
        case ValueSpec():
            return spec.value
        case ListSpec():
            build: Callable[..., Any] = list if spec.kind == "list" else tuple
            return build(meta_batch(item) for item in spec.items)
        case DictSpec():
            return {key: meta_batch(item) for key, item in spec.items.items()}
        case OtherSpec():
            raise AutoparError(
                f"the plan's batch holds a {spec.what}, which a plan can't describe: pass batch="
            )


def _meta_tensor(spec: TensorSpec) -> torch.Tensor:
    dtypes = {n: value for n, value in vars(torch).items() if isinstance(value, torch.dtype)}
    if spec.dtype not in dtypes:
        raise AutoparError(f"the plan's batch: torch has no dtype {spec.dtype!r}")
    if math.prod(spec.shape) > LARGEST or any(length > LARGEST for length in spec.shape):
        raise AutoparError(f"the plan's batch: no tensor can have the shape {list(spec.shape)}")
    return torch.empty(spec.shape, dtype=dtypes[spec.dtype], device="meta")


def batch_text(spec: BatchSpec) -> str:
    """A batch's structure for reading: "input_ids int64 [8, 16], labels int64 [8, 16]"."""
    match spec:
        case TensorSpec():
            return f"{spec.dtype} {list(spec.shape)}"
        case ValueSpec():
            return repr(spec.value)
        case ListSpec():
            return f"({', '.join(map(batch_text, spec.items))})"
        case DictSpec():
            return ", ".join(f"{key} {batch_text(item)}" for key, item in spec.items.items())
        case OtherSpec():
            return f"a {spec.what}"

"""Small values of optimizers as JSON, and back: the same values of the same types."""

import math
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.checkpoint.index import CODES, DTYPES


def encode(value: Any, what: str) -> Any:
    """None, booleans, numbers, text, lists and tuples of those, and tensors of one element.

    Errors: AutoparError for anything else; `what` it is goes into the message.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case list():
            return [encode(one, what) for one in value]
        case tuple():
            return {"tuple": [encode(one, what) for one in value]}
        case Tensor() if value.ndim == 0 and value.dtype in DTYPES and not value.is_complex():
            return {"tensor": encode(value.item(), what), "dtype": DTYPES[value.dtype]}
        case _:
            raise AutoparError(
                f"{what} is a {type(value).__name__}; a checkpoint holds numbers, text, tuples and "
                "tensors, and never pickles."
            )


def decode(data: Any, device: torch.device | None = None) -> Any:
    """The value; tensors go to `device`. Errors: ValueError for what `encode` never returns."""
    match data:
        case None | bool() | int() | float() | str():
            return data
        case list():
            return [decode(one, device) for one in data]
        case {"tuple": list(values)} if len(data) == 1:
            return tuple(decode(one, device) for one in values)
        case {"float": "inf" | "-inf" | "nan" as text} if len(data) == 1:
            return float(text)
        case {"tensor": item, "dtype": str(code)} if len(data) == 2 and code in CODES:
            if isinstance(number := decode(item), bool | int | float):
                return torch.tensor(number, dtype=CODES[code], device=device)
    raise ValueError(f"{str(data)[:60]!r} is no value")

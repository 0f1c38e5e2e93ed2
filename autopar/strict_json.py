"""JSON from a stranger: text only, no repeated key, no number that JSON doesn't have."""

import json
import math
from typing import Any, NoReturn

from autopar.errors import AutoparError


def read_json(text: str, what: str) -> Any:
    """The data of a JSON text. `what` it should be goes into the errors ("a plan").

    Errors: AutoparError for anything that isn't JSON, a key that an object has twice, NaN and
    infinities, and nesting beyond what Python can follow.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float
        )
    except RecursionError as error:
        raise AutoparError(f"this is not {what}: it is nested too deeply") from error
    except ValueError as error:
        raise AutoparError(f"this is not {what}: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return found


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond what a number can hold")
    return value

"""A strategy's options: their values are of the types that its fields say, which Python doesn't
check."""

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, replace
from numbers import Real
from typing import Any

from autopar.errors import AutoparError
from autopar.plugin import Strategy

WORDS: Mapping[Any, str] = types.MappingProxyType(
    {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "True or False",
        types.NoneType: "None",
    }
)


def with_options(strategy: Strategy, options: Mapping[str, Any]) -> Strategy:
    """The strategy with these options, which it has. Errors: its own; AutoparError for a value of
    another type than the option's."""
    try:
        made = replace(strategy, **options)
    except (TypeError, ValueError) as error:  # its own check isn't made for such a value
        _check_types(strategy, options)
        raise AutoparError(
            f"{strategy.name} can't have the options {options!r}: {error}"
        ) from error
    _check_types(strategy, options)
    return made


def checked_options(strategy: Strategy) -> Strategy:
    """The strategy itself. Errors: AutoparError for an option whose value is of another type."""
    _check_types(strategy, {f.name: getattr(strategy, f.name) for f in fields(strategy)})
    return strategy


def is_number(value: Any) -> bool:
    """Whether it is one; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_types(strategy: Strategy, options: Mapping[str, Any]) -> None:
    hints = _hints(type(strategy))
    for option, value in options.items():
        kinds = _alternatives(hints.get(option, Any))
        if not any(_is_of(kind, value) for kind in kinds):
            words = " or ".join(WORDS.get(kind, repr(kind)) for kind in kinds)
            raise AutoparError(f"{strategy.name} {option} {value!r}: it takes {words}")


def _hints(cls: type[Strategy]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError:  # a plugin's own names, imported for type checkers alone
        return {}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Types and values, one of which it may be."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(kind for one in typing.get_args(hint) for kind in _alternatives(one))
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else (hint,)


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a value is of a type, or the value that is meant; of other types than an option's
    nothing is known."""
    if kind is float:
        return is_number(value)
    if kind in (int, str):
        return isinstance(value, kind) and not isinstance(value, bool)
    if kind in (bool, types.NoneType):
        return isinstance(value, kind)
    if isinstance(kind, int | str):
        return type(value) is type(kind) and bool(value == kind)
    return True

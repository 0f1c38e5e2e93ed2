"""What a user pins: exact axes and microbatches, strategies on, off, or with options."""

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from autopar.errors import AutoparError
from autopar.plugin import Option, Strategy

StrategyPin = bool | Mapping[str, Option]


@dataclass(frozen=True)
class Pins:
    """`axes`: exact sizes. `microbatches`, `schedule`: exact, or None. `strategies`: name → False
    (off), True (on wherever legal) or options. `layers`: (glob of module paths, strategy pins) on
    top."""

    axes: Mapping[str, int]
    microbatches: int | None
    strategies: Mapping[str, StrategyPin]
    layers: tuple[tuple[str, Mapping[str, StrategyPin]], ...]
    schedule: str | None = None

    def of(self, paths: Iterable[str]) -> Mapping[str, StrategyPin]:
        """The strategy pins of a region with ops in these modules; later globs win."""
        merged = dict(self.strategies)
        for glob, pins in self.layers:
            if matches(glob, paths):
                merged |= pins
        return merged


def matches(glob: str, paths: Iterable[str]) -> bool:
    """Whether a pin's glob names a region with ops in these modules."""
    return any(fnmatch.fnmatchcase(path, glob) for path in paths)


def read_pins(
    pin: Mapping[str, Any] | None, forbid: Iterable[str], strategies: Iterable[Strategy]
) -> Pins:
    """Checks a `pin=` dict and a `forbid=` list against the strategies at hand.

    Errors: AutoparError for an unknown name, option or value, listing what is known.
    """
    by_name = {s.name: s for s in strategies}
    axes_of = {axis.name: s.name for s in strategies for axis in s.axes()}
    _check_forms(pin, forbid)
    given = dict(pin or {})
    layers = given.pop("layers", {})
    microbatches = _count("microbatches", given.pop("microbatches", None))
    schedule = _schedule(given.pop("schedule", None))
    axes: dict[str, int] = {}
    chosen: dict[str, StrategyPin] = {}
    for name, value in given.items():
        if name in axes_of:
            axes[name] = _count(name, value) or 1
        elif name in by_name:
            chosen[name] = strategy_pin(by_name[name], value)
        else:
            raise _unknown("pin", name, by_name, axes_of)
    for name in forbid:
        if name in axes_of:
            if axes.get(name, 1) != 1:
                raise AutoparError(f"axis {name!r} is forbidden and pinned to {axes[name]}")
            axes[name] = 1
        elif name in by_name:
            chosen[name] = False
        else:
            raise _unknown("forbid", name, by_name, axes_of)
    for axis, size in axes.items():
        if size > 1:
            chosen.setdefault(axes_of[axis], True)
    return Pins(axes, microbatches, chosen, _layer_pins(layers, by_name, axes_of), schedule)


def _check_forms(pin: Any, forbid: Any) -> None:
    if pin is not None and not isinstance(pin, Mapping):
        raise AutoparError(f'pin must be a mapping such as {{"dp": 2, "zero": 3}}, not {pin!r}')
    layers = pin.get("layers", {}) if pin else {}
    wrong = (
        [v for v in layers.values() if not isinstance(v, Mapping)]
        if (isinstance(layers, Mapping))
        else []
    )
    if wrong:
        raise AutoparError(
            f'pin "layers" maps globs to mappings such as {{"zero": 3}}, not to {wrong[0]!r}'
        )
    if isinstance(forbid, str):
        raise AutoparError(f'forbid must be a list of names such as ["tp"], not {forbid!r}')


def _count(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise AutoparError(f"pin {name!r}: {value!r} is not a positive number")
    return value


def _schedule(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise AutoparError(f"pin 'schedule': {value!r} is not the name of a schedule")
    return value


def _layer_pins(
    layers: Any, by_name: Mapping[str, Strategy], axes_of: Mapping[str, str]
) -> tuple[tuple[str, Mapping[str, StrategyPin]], ...]:
    if not isinstance(layers, Mapping):
        raise AutoparError(f"pin 'layers' must map globs of module names to pins, not {layers!r}")
    out = []
    for glob, pins in layers.items():
        for name in pins:
            if name not in by_name:
                raise _unknown(f"pin layers[{glob!r}]", name, by_name, axes_of)
        out.append((glob, {n: strategy_pin(by_name[n], v) for n, v in pins.items()}))
    return tuple(out)


def _unknown(
    where: str, name: str, by_name: Mapping[str, Strategy], axes_of: Mapping[str, str]
) -> AutoparError:
    return AutoparError(
        f"{where}: {name!r} is neither an axis ({', '.join(sorted(axes_of))}), 'microbatches', "
        f"'schedule', 'layers', nor a strategy ({', '.join(sorted(by_name))})"
    )


def strategy_pin(strategy: Strategy, value: Any) -> StrategyPin:
    """A strategy's pin as on, off or options. Errors: AutoparError for options that it lacks."""
    options = [f.name for f in fields(strategy)]
    if isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        unknown = set(value) - set(options)
        if unknown:
            raise AutoparError(
                f"pin {strategy.name!r}: no option {sorted(unknown)[0]!r}; there are "
                f"{', '.join(options) or 'none'}"
            )
        replace(strategy, **value)  # its own check of the values
        return dict(value)
    if not options:
        raise AutoparError(f"pin {strategy.name!r}: takes True or False, not {value!r}")
    replace(strategy, **{options[0]: value})
    return {options[0]: value}

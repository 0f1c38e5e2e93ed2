"""What a user pins: exact axes and microbatches, strategies on, off, or with options."""

import fnmatch
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from autopar.errors import AutoparError
from autopar.option_values import with_options
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


@dataclass(frozen=True)
class _Known:
    """The strategies at hand by name, and the owners of axes."""

    strategies: Mapping[str, Strategy]
    owners: Mapping[str, str]

    def by_module(self) -> list[str]:
        """Strategies that one region may have and another not."""
        return sorted(name for name, s in self.strategies.items() if not _is_of_whole_model(s))


def _is_of_whole_model(strategy: Strategy) -> bool:
    """Stages are of all layers: no region has a say in them."""
    return any(axis.splits_layers for axis in strategy.axes())


def read_pins(
    pin: Mapping[str, Any] | None, forbid: Iterable[str], strategies: Iterable[Strategy]
) -> Pins:
    """Checks a `pin=` dict and a `forbid=` list against the strategies at hand. A pin that is None
    is free, as if it were left out.

    Errors: AutoparError for an unknown name, option or value, listing what is known.
    """
    by_name = {s.name: s for s in strategies}
    known = _Known(by_name, {axis.name: s.name for s in by_name.values() for axis in s.axes()})
    _check_forms(pin, forbid)
    given = dict(pin or {})
    layers = given.pop("layers", None)
    microbatches = _count("microbatches", given.pop("microbatches", None))
    schedule = _schedule(given.pop("schedule", None))
    axes, chosen = _whole_model(given, known)
    _bar(forbid, axes, chosen, known)
    for axis, size in axes.items():
        if size > 1:
            chosen.setdefault(known.owners[axis], True)
    of_layers = () if layers is None else _layer_pins(layers, known)
    return Pins(axes, microbatches, chosen, of_layers, schedule)


def _whole_model(
    given: Mapping[str, Any], known: _Known
) -> tuple[dict[str, int], dict[str, StrategyPin]]:
    """Pinned axes and strategies."""
    axes: dict[str, int] = {}
    chosen: dict[str, StrategyPin] = {}
    for name, value in given.items():
        if name not in known.owners and name not in known.strategies:
            raise _unknown("pin", name, known)
        size = _count(name, value) if name in known.owners else None
        if size is not None:
            axes[name] = size
        elif value is not None:
            chosen[name] = strategy_pin(known.strategies[name], value)
    return axes, chosen


def _bar(
    forbid: Iterable[str], axes: dict[str, int], chosen: dict[str, StrategyPin], known: _Known
) -> None:
    """Adds what is forbidden to the pins."""
    for name in forbid:
        if name in known.owners:
            if axes.get(name, 1) != 1:
                raise AutoparError(f"axis {name!r} is forbidden and pinned to {axes[name]}")
            axes[name] = 1
        elif name in known.strategies:
            chosen[name] = False
        else:
            raise _unknown("forbid", name, known)


def _check_forms(pin: Any, forbid: Any) -> None:
    if pin is not None and not isinstance(pin, Mapping):
        raise AutoparError(f'pin must be a mapping such as {{"dp": 2, "zero": 3}}, not {pin!r}')
    layers = pin.get("layers") if pin else None
    for glob, own in layers.items() if isinstance(layers, Mapping) else ():
        if not isinstance(own, Mapping):
            raise AutoparError(
                f'pin "layers" maps globs to mappings such as {{"zero": 3}}, not to {own!r}'
            )
        if not isinstance(glob, str):
            raise AutoparError(
                f'pin "layers" maps globs of module names, of which {glob!r} is none'
            )
    if isinstance(forbid, str) or not all(isinstance(name, str) for name in forbid):
        raise AutoparError(f'forbid must be a list of names such as ["tp"], not {forbid!r}')


def _count(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise AutoparError(f"pin {name!r}: {value!r} is not a positive whole number")
    return value


def _schedule(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise AutoparError(f"pin 'schedule': {value!r} is not the name of a schedule")
    return value


def _layer_pins(layers: Any, known: _Known) -> tuple[tuple[str, Mapping[str, StrategyPin]], ...]:
    if not isinstance(layers, Mapping):
        raise AutoparError(f"pin 'layers' must map globs of module names to pins, not {layers!r}")
    out = []
    for glob, pins in layers.items():
        for name, value in pins.items():
            _check_by_module(glob, name, value, known)
        on = {n: strategy_pin(known.strategies[n], v) for n, v in pins.items() if v is not None}
        out.append((glob, on))
    return tuple(out)


def _check_by_module(glob: str, name: str, value: Any, known: _Known) -> None:
    """Errors: AutoparError for what no glob can pin: what is unknown, or of the whole model."""
    where, names = f"pin layers[{glob!r}]", known.by_module()
    if name in names:
        return
    can = ", ".join(names) or "none"
    if name in known.owners or name in (*known.strategies, "microbatches", "schedule"):
        what = "the axis " if name in known.owners else ""
        raise AutoparError(
            f"{where}: {what}{name!r} is of the whole model, and can't be pinned by module: pin "
            f'{{{json.dumps(name)}: {value!r}}} beside "layers". By module there are {can}'
        )
    raise AutoparError(
        f"{where}: {name!r} is no strategy that can be pinned by module: there are {can}"
    )


def _unknown(where: str, name: str, known: _Known) -> AutoparError:
    axes, strategies = ", ".join(sorted(known.owners)), ", ".join(sorted(known.strategies))
    return AutoparError(
        f"{where}: {name!r} is neither an axis ({axes}), 'microbatches', 'schedule', 'layers', nor "
        f"a strategy ({strategies})"
    )


def strategy_pin(strategy: Strategy, value: Any) -> StrategyPin:
    """A strategy's pin as on, off or options. Errors: AutoparError for options that it lacks, or
    values that they don't take."""
    options = [f.name for f in fields(strategy)]
    if isinstance(value, bool):
        return value
    if not isinstance(value, Mapping):
        if not options:
            raise AutoparError(f"pin {strategy.name!r}: takes True or False, not {value!r}")
        value = {options[0]: value}
    unknown = [name for name in value if name not in options]
    if unknown:
        raise AutoparError(
            f"pin {strategy.name!r}: no option {unknown[0]!r}; there are "
            f"{', '.join(options) or 'none'}"
        )
    with_options(strategy, value)
    return dict(value)

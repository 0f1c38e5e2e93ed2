"""Axes of a mesh over which no region splits anything, and why."""

from collections.abc import Iterator, Mapping, Sequence

from autopar.layouts.layout import Setting
from autopar.planning.annotate import Candidates
from autopar.planning.pins import Pins
from autopar.plugin import Strategy

Where = tuple[str, str]
"""(layer path, region)."""


def turned_off(
    found: Mapping[Where, Candidates],
    paths: Mapping[Where, tuple[str, ...]],
    setting: Setting,
    strategies: Sequence[Strategy],
    pins: Pins,
) -> str | None:
    """Which axis has nothing to do because its strategy is off in all regions, or None. Others may
    split over it as well: then nothing is wrong."""
    owners = {axis.name: s.name for s in strategies for axis in s.axes()}
    for axis, size in _idle(found, setting):
        if all(pins.of(paths[key]).get(owners[axis]) is False for key in found):
            others = _refusals(found, strategies)
            return (
                f"no region can use the axis {axis} = {size}: {owners[axis]!r}, whose axis it is, "
                f"is off. Lift that pin, or leave {axis} at 1"
                + (f" (others don't split over it: {others})" if others else "")
            )
    return None


def unused(
    found: Mapping[Where, Candidates], setting: Setting, strategies: Sequence[Strategy]
) -> str | None:
    """Which axis no region can use, or None."""
    for axis, size in _idle(found, setting):
        why = _refusals(found, strategies) or "no strategy at hand splits anything over it"
        return f"no region can use the axis {axis} = {size}: {why}"
    return None


def _idle(found: Mapping[Where, Candidates], setting: Setting) -> Iterator[tuple[str, int]]:
    layers = setting.schedule.axis if setting.schedule else None
    unique = {id(one): one for one in found.values()}.values()
    for axis, size in setting.mesh.axes:
        used = axis == layers or any(c.uses(axis) for one in unique for c in one.choices)
        if size > 1 and not used:
            yield axis, size


def _refusals(found: Mapping[Where, Candidates], strategies: Sequence[Strategy]) -> str:
    """What strategies that split dims said: those that build on splits say what follows alone."""
    names = [strategy.name for strategy in strategies if strategy.tier == "dims"]
    every = (one.refusals.get(name, ()) for one in found.values() for name in names)
    return "; ".join(list(dict.fromkeys(reason for reasons in every for reason in reasons))[:8])

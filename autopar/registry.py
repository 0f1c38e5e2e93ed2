"""Plugins, found by entry point: the built-in ones exactly as a stranger's."""

import dataclasses
import typing
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from autopar.errors import AutoparError
from autopar.option_values import checked_options
from autopar.plugin import CostModel, Effect, Strategy

STRATEGIES = "autopar.strategies"
COST_MODELS = "autopar.cost_models"
EFFECT_KINDS: tuple[str, ...] = tuple(effect.kind for effect in typing.get_args(Effect))

Plugin = TypeVar("Plugin", Strategy, CostModel)


def select_strategies(
    chosen: Iterable[str | Strategy] | None = None,
    installed: Iterable[EntryPoint] | None = None,
) -> tuple[Strategy, ...]:
    """The strategies named or given in `chosen`, all that are installed where it is None.

    Sorted by name, whatever the order of `chosen` and of discovery. `installed`: the entry points
    to look in; left out, those of the environment.

    Errors: AutoparError for a name that nobody or more than one plugin has, a plugin that breaks
    the contract, an option whose value is of another type, and a mesh axis with two owners.
    """
    found = entry_points(group=STRATEGIES) if installed is None else installed
    strategies = tuple(map(checked_options, _select(chosen, found, Strategy)))
    owners: dict[str, str] = {}
    for strategy in strategies:
        for axis in strategy.axes():
            if axis.name in owners:
                raise AutoparError(
                    f"axis {axis.name!r} is owned by both {owners[axis.name]!r} and "
                    f"{strategy.name!r}: leave one of these strategies out"
                )
            owners[axis.name] = strategy.name
    return strategies


def select_cost_models(
    chosen: Iterable[str | CostModel] | None = None,
    installed: Iterable[EntryPoint] | None = None,
) -> tuple[CostModel, ...]:
    """The cost models named or given in `chosen`, all that are installed where it is None.

    Sorted by name. Errors: as `select_strategies`, and AutoparError for a kind of effect that no
    model or more than one prices.
    """
    found = entry_points(group=COST_MODELS) if installed is None else installed
    models = _select(chosen, found, CostModel)
    for kind in EFFECT_KINDS:
        pricing = [model.name for model in models if kind in model.prices]
        if len(pricing) != 1:
            who = " and ".join(map(repr, pricing)) or "no cost model"
            raise AutoparError(
                f"effects of kind {kind!r} are priced by {who}: exactly one of the chosen models "
                f"({', '.join(model.name for model in models) or 'none'}) must price them"
            )
    return models


@dataclass(frozen=True)
class Installed:
    """A plugin's entry point, and why it can't be used ("" where it can)."""

    name: str
    value: str
    distribution: str
    fault: str


def installed_plugins(
    strategies: Iterable[EntryPoint] | None = None, cost_models: Iterable[EntryPoint] | None = None
) -> Mapping[str, tuple[Installed, ...]]:
    """All plugins by kind ("strategies", "cost models"), sorted by name; broken ones too. The
    arguments as `installed` of `select_strategies`."""
    if strategies is None:
        strategies = entry_points(group=STRATEGIES)
    if cost_models is None:
        cost_models = entry_points(group=COST_MODELS)
    return {
        "strategies": _listed(strategies, Strategy),
        "cost models": _listed(cost_models, CostModel),
    }


def _listed(installed: Iterable[EntryPoint], base: type[Plugin]) -> tuple[Installed, ...]:
    points = list(installed)
    claims = Counter(point.name for point in points)
    found = []
    for point in points:
        fault = "its name is claimed more than once" if claims[point.name] > 1 else ""
        try:
            _load({point.name: point}, point.name, base)
        except AutoparError as error:
            fault = str(error)
        dist = point.dist
        who = "an unknown distribution" if dist is None else f"{dist.name} {dist.version}"
        found.append(Installed(point.name, point.value, who, fault))
    return tuple(sorted(found, key=lambda plugin: (plugin.name, plugin.value)))


# ---------------------------------------------------------------- choosing


def _select(
    chosen: Iterable[str | Plugin] | None, installed: Iterable[EntryPoint], base: type[Plugin]
) -> tuple[Plugin, ...]:
    points = _by_name(installed)
    selected: dict[str, Plugin] = {}
    for wanted in points if chosen is None else chosen:
        plugin = _load(points, wanted, base) if isinstance(wanted, str) else wanted
        if not isinstance(plugin, base):
            raise AutoparError(f"{plugin!r} is neither a name nor a {base.__name__}")
        if plugin.name in selected:
            raise AutoparError(f"{plugin.name!r} is chosen twice")
        selected[plugin.name] = plugin
    return tuple(selected[name] for name in sorted(selected))


def _by_name(installed: Iterable[EntryPoint]) -> dict[str, EntryPoint]:
    claims: dict[str, list[EntryPoint]] = defaultdict(list)
    for point in installed:
        claims[point.name].append(point)
    for name, points in sorted(claims.items()):
        if len(points) > 1:
            who = " and ".join(sorted(map(_origin, points)))
            raise AutoparError(f"the name {name!r} is claimed by {who}: uninstall one of them")
    return {name: points[0] for name, points in sorted(claims.items())}


def _origin(point: EntryPoint) -> str:
    distribution = "an unknown distribution" if point.dist is None else point.dist.name
    return f"{point.value!r} of {distribution}"


# ---------------------------------------------------------------- loading, and the contract


def _load(points: dict[str, EntryPoint], name: str, base: type[Plugin]) -> Plugin:
    if name not in points:
        raise AutoparError(
            f"no {base.__name__} plugin {name!r} is installed: there are {', '.join(points)}"
        )
    point = points[name]
    try:
        found = point.load()
    except Exception as error:
        raise AutoparError(f"{_label(point)} can't be loaded: {error!r}") from error
    fault = _fault(found, name, base)
    if fault:
        raise AutoparError(f"{_label(point)} {fault}")
    plugin: Plugin = found()
    return plugin


def _label(point: EntryPoint) -> str:
    return f"plugin {point.name!r}, {_origin(point)},"


def _fault(found: Any, name: str, base: type[Strategy] | type[CostModel]) -> str | None:
    """How `found` breaks the contract of plugins, or None."""
    if not isinstance(found, type) or not issubclass(found, base):
        return f"is {found!r}, not a subclass of {base.__name__}"
    if "__dataclass_params__" not in vars(found):
        return f"is {found!r}, which isn't decorated with @dataclass(frozen=True)"
    if getattr(found, "name", None) != name:
        return f"has the name {getattr(found, 'name', None)!r}, not that of its entry point"
    missing = sorted(found.__abstractmethods__)
    if missing:
        return f"lacks the method {', '.join(missing)}"
    bare = [field.name for field in dataclasses.fields(found) if _has_no_default(field)]
    if bare:
        return f"has no default for its option {', '.join(bare)}"
    return None


def _has_no_default(field: "dataclasses.Field[Any]") -> bool:
    missing = dataclasses.MISSING
    return field.init and field.default is missing and field.default_factory is missing

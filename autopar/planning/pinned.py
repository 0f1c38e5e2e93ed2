"""Pins that leave nothing open → the one program that they name, without a search."""

from collections.abc import Sequence

from autopar.cluster import ClusterSpec
from autopar.errors import AutoparError
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.layout import Setting
from autopar.layouts.program import Program
from autopar.layouts.stages import Cut, make_cut
from autopar.planning.meshes import axes_in_order, settings
from autopar.planning.outer import Dropped, open_setting
from autopar.planning.pins import Pins
from autopar.planning.schedules import scheduled
from autopar.planning.separable import why_inseparable
from autopar.plugin import Candidate, Refusal, Strategy


def pinned_program(
    model: ModelGraph, cluster: ClusterSpec, strategies: Sequence[Strategy], pins: Pins
) -> Program:
    """The program that the pins name; layers in stages are cut as evenly as their number allows,
    the first parts taking one more.

    Errors: AutoparError where the pins are illegal, or leave a choice open (with an example).
    """
    setting = _setting(model, cluster, strategies, pins)
    outer = open_setting(model, setting, strategies, pins, why_inseparable(model))
    if isinstance(outer, Dropped):
        raise AutoparError(f"the pinned plan can't run: {outer.reason}")
    choices: dict[str, dict[str, Candidate]] = {}
    for (path, region), found in outer.candidates.items():
        if len(found) > 1:
            makers = " or ".join(str(dict(c.made_by)) for c in found[:3])
            raise AutoparError(
                f"the pins leave {len(found)} choices for {path or 'skeleton'}/{region}: {makers}. "
                "Pin or forbid the strategies that make the difference"
            )
        choices.setdefault(path, {})[region] = found[0]
    return Program(model, outer.setting, choices, _cut(model, outer.setting))


def _setting(
    model: ModelGraph, cluster: ClusterSpec, strategies: Sequence[Strategy], pins: Pins
) -> Setting:
    layers = len(model.layers)
    sizes = (pins.axes, pins.microbatches, model.batch_size, layers)
    found: list[Setting] = []
    refused: list[str] = []
    for asked in settings(axes_in_order(strategies), cluster.devices, *sizes):
        for setting in scheduled(asked, strategies, pins, layers):
            if isinstance(setting, Refusal):
                refused.append(setting.reason)
            else:
                found.append(setting)
    if len(found) == 1:
        return found[0]
    if not found:
        why = "; ".join(refused) or f"no mesh of {cluster.devices} devices has these axes"
        raise AutoparError(f"the pinned plan can't run: {why}")
    first, second = found[:2]
    raise AutoparError(
        f"the pins leave {len(found)} settings, for example {first.mesh} with {first.microbatches} "
        f"microbatches and {second.mesh} with {second.microbatches}: pin every axis, microbatches "
        "and the schedule"
    )


def _cut(model: ModelGraph, setting: Setting) -> Cut | None:
    if setting.schedule is None:
        return None
    parts, layers = setting.schedule.table.parts, len(model.layers)
    return make_cut(model.skeleton, [layers // parts + (p < layers % parts) for p in range(parts)])

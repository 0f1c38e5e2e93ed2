"""The schedules of a setting: those that the owner of an axis that splits layers offers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.layouts.layout import Setting
from autopar.planning.pins import Pins
from autopar.planning.problem import Stages
from autopar.plugin import Refusal, Schedule, Strategy
from autopar.schedule import Table


def layer_axis(strategies: Sequence[Strategy]) -> tuple[str, Strategy] | None:
    """The axis that splits layers, and its owner."""
    found = [(a.name, s) for s in strategies for a in s.axes() if a.splits_layers]
    assert len(found) <= 1, f"several axes split layers: {[name for name, _ in found]}"
    return found[0] if found else None


def owner_of(schedule: Schedule | None, strategies: Sequence[Strategy]) -> str | None:
    """The strategy whose schedule it is."""
    found = layer_axis(strategies)
    return found[1].name if schedule is not None and found is not None else None


def scheduled(
    setting: Setting, strategies: Sequence[Strategy], pins: Pins, layers: int
) -> Iterator[Setting | Refusal]:
    """The setting with each schedule that it may have; as it is where no axis splits layers."""
    found = layer_axis(strategies)
    if found is None or setting.mesh.size(found[0]) == 1:
        if pins.schedule is not None:
            axis = found[0] if found else "no axis"
            yield Refusal(f"the schedule {pins.schedule!r} is pinned, but {axis} has size 1")
        else:
            yield setting
        return
    axis, owner = found
    pin = pins.strategies.get(owner.name)
    if pin is False:
        yield Refusal(f"{owner.name!r} is off, but {axis} = {setting.mesh.size(axis)}")
        return
    configured = replace(owner, **pin) if isinstance(pin, Mapping) else owner
    offers = list(configured.schedules(setting.mesh, setting.microbatches, layers))
    schedules = [offer for offer in offers if isinstance(offer, Schedule)]
    chosen = [s for s in schedules if pins.schedule in (None, s.name)]
    for schedule in chosen:
        assert schedule.axis == axis, schedule
        yield replace(setting, schedule=schedule)
    if not chosen:
        why = [offer.reason for offer in offers if isinstance(offer, Refusal)]
        if schedules:
            names = ", ".join(dict.fromkeys(schedule.name for schedule in schedules))
            why.append(f"there is no schedule {pins.schedule!r} for it: there are {names}")
        yield Refusal("; ".join(why) or f"{owner.name!r} has no schedule for it")


def stages_of(setting: Setting) -> Stages:
    """What of a setting's schedule a planning problem sees."""
    schedule = setting.schedule
    assert schedule is not None
    brief = schedule.brief
    assert brief.stages == setting.mesh.size(schedule.axis), schedule
    per_stage = schedule.table.per_stage if schedule.per_stage is None else schedule.per_stage
    # An outline's setting has more microbatches: ranks that share the batch count as such.
    return Stages(schedule.microbatches - per_stage, per_stage, brief.every_in_flight)


def spread(table: Table, layers: int) -> tuple[int, int]:
    """How many layers a part has, at least and at most. Schedules with several parts a stage are
    timed with equal ones: theirs differ by one layer at most."""
    if table.chunks > 1:
        return layers // table.parts, -(-layers // table.parts)
    return 1, layers - table.parts + 1

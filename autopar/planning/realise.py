"""Plan → Program: a plan's decisions put back onto the model that it was made for."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from autopar.errors import AutoparError
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.layout import Setting
from autopar.layouts.program import Program
from autopar.layouts.stages import Cut, layer_calls, make_cut
from autopar.mesh import Mesh
from autopar.option_values import with_options
from autopar.plan import Plan, RegionChoice, ScheduleChoice
from autopar.planning.decide import model_id
from autopar.planning.param_choice import read_form, read_param, read_split
from autopar.planning.schedules import layer_axis
from autopar.plugin import Candidate, ParamPlan, Recomputed, Schedule, Strategy


def realise(model: ModelGraph, plan: Plan, strategies: Sequence[Strategy]) -> Program:
    """The program that a plan describes. `strategies`: among them the owner of its schedule.

    Errors: AutoparError where the plan was made for another model, batch or loss, leaves a region
    out or has one twice, or names what the model or mesh doesn't have.
    """
    check_model(model, plan)
    mesh = Mesh(tuple(plan.mesh.items()))
    schedule = read_schedule(plan, Mesh(tuple(plan.axes.items())), strategies, len(model.layers))
    setting = Setting(mesh, read_split(plan.data_axes, mesh), plan.microbatches, schedule)
    chosen = _chosen(plan, mesh)
    choices: dict[str, dict[str, Candidate]] = {}
    for path, block in model.instances():
        choices[path] = {}
        for region in block.regions:
            if (path, region.name) not in chosen:
                raise AutoparError(f"the plan says nothing of {place(path, region.name)}")
            choices[path][region.name] = chosen.pop((path, region.name))
    if chosen:
        known = [place(path, name) for path, regions in choices.items() for name in regions]
        raise AutoparError(
            f"the plan has {place(*next(iter(chosen)))}, which the model doesn't: there are "
            f"{', '.join(known[:12])}{' …' if len(known) > 12 else ''}"
        )
    return Program(model, setting, choices, read_cut(model, plan))


def read_schedule(
    plan: Plan, mesh: Mesh, strategies: Sequence[Strategy], layers: int
) -> Schedule | None:
    """The schedule that a plan names, as its owner makes it.

    Errors: AutoparError where nobody at hand offers it on the plan's mesh.
    """
    found = layer_axis(strategies)
    said = plan.schedule
    size = 1 if found is None else mesh.size(found[0])
    if said is None:
        if size > 1 and found is not None:
            raise AutoparError(f"the plan has {found[0]} = {size}, but no schedule")
        return None
    schedules = _offers(found[1], said, mesh, plan.microbatches, layers) if found else ()
    for schedule in schedules:
        if (schedule.name, schedule.axis, dict(schedule.options)) == (
            *(said.name, said.axis),
            dict(said.options),
        ):
            return schedule
    options = ", ".join(f"{key} {value}" for key, value in said.options.items())
    known = "; ".join(
        f"{s.name} ({', '.join(f'{k} {v}' for k, v in s.options)})" for s in schedules
    )
    raise AutoparError(
        f"no strategy at hand offers the plan's schedule {said.name} ({options}) along {said.axis} "
        f"on {mesh}: there are {known or 'none'}"
    )


def _offers(
    owner: Strategy, said: ScheduleChoice, mesh: Mesh, microbatches: int, layers: int
) -> tuple[Schedule, ...]:
    """What the owner of an axis offers, and what it does with the options that the plan's schedule
    names, where they are its own: pinned, it may do what it doesn't look at by itself."""
    own = {option.name for option in fields(owner)}
    options = {"schedule": said.name, **said.options}
    asked = [owner]
    with contextlib.suppress(AutoparError):  # no options of its own: then nobody offers them
        asked.append(with_options(owner, {k: v for k, v in options.items() if k in own}))
    offers = [one for by in asked for one in by.schedules(mesh, microbatches, layers)]
    found = [one for one in offers if isinstance(one, Schedule)]
    return tuple({(one.name, one.axis, one.options): one for one in found}.values())


def read_cut(model: ModelGraph, plan: Plan) -> Cut | None:
    """How a plan's layers lie in parts.

    Errors: AutoparError where its parts aren't all the model's layers, in order.
    """
    if plan.schedule is None:
        return None
    parts = plan.schedule.parts
    layers = [str(call.args[1]) for call in layer_calls(model.skeleton)]
    if [path for part in parts for path in part] != layers or not all(parts):
        raise AutoparError(
            "the plan's schedule.parts must hold every layer once, in the model's order, at least "
            f"one a part; the model has {', '.join(layers[:6])}{' …' if len(layers) > 6 else ''}"
        )
    return make_cut(model.skeleton, [len(part) for part in parts])


def check_model(model: ModelGraph, plan: Plan) -> None:
    """Errors: AutoparError where the plan was made for another model, batch or loss."""
    mine = model_id(model)
    if plan.model.fingerprint != mine.fingerprint:
        raise AutoparError(
            f"the plan is for another model, batch or loss: a {plan.model.class_name} with "
            f"{plan.model.parameters:,} parameters, {plan.model.fingerprint[:12]}; this is a "
            f"{mine.class_name} with {mine.parameters:,}, {mine.fingerprint[:12]}. Plan again"
        )


def _chosen(plan: Plan, mesh: Mesh) -> dict[tuple[str, str], Candidate]:
    chosen: dict[tuple[str, str], Candidate] = {}
    for choice in plan.regions:
        candidate = _candidate(choice, mesh)
        for layer in choice.layers:
            if (layer, choice.region) in chosen:
                raise AutoparError(f"the plan has {place(layer, choice.region)} twice")
            chosen[layer, choice.region] = candidate
    return chosen


def place(layer: str, region: str) -> str:
    """A region of a layer for reading, "h.0/ffn"."""
    return f"{layer or 'skeleton'}/{region}"


def _candidate(choice: RegionChoice, mesh: Mesh) -> Candidate:
    where = f"region {place(choice.layers[0], choice.region)}"
    try:
        splits = {
            dim: tuple(
                replace(part, balanced=part.axis in choice.balanced.get(dim, ()))
                for part in read_split(axes, mesh)
            )
            for dim, axes in choice.splits.items()
            if axes
        }
        forms = tuple(read_form(form, mesh) for form in choice.forms)
        found = {name: read_param(p, mesh) for name, p in choice.params.items()}
    except ValueError as error:
        raise AutoparError(f"the plan's {where}: {error}") from error
    params = {name: p for name, p in found.items() if p != ParamPlan()}
    makers: Mapping[str, tuple[tuple[str, bool | int | float | str | None], ...]] = {
        name: tuple(sorted(options.items())) for name, options in choice.strategies.items()
    }
    given = choice.recompute
    again = None if given is None else Recomputed(given.scope, given.layers)
    return Candidate(
        choice.region,
        tuple(sorted(splits.items())),
        tuple(sorted(params.items())),
        tuple(sorted(makers.items())),
        again,
        forms,
    )

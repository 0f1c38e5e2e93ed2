"""Plan → Program: a plan's decisions put back onto the model that it was made for."""

from collections.abc import Mapping

from autopar.errors import AutoparError
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.layout import Setting
from autopar.layouts.program import Program
from autopar.mesh import AxisPart, Mesh, Split
from autopar.plan import Plan, RegionChoice
from autopar.planning.decide import model_id
from autopar.plugin import Candidate, ParamPlan


def realise(model: ModelGraph, plan: Plan) -> Program:
    """The program that a plan describes.

    Errors: AutoparError where the plan was made for another model or batch, leaves a region out,
    or names what the model or mesh doesn't have.
    """
    mine = model_id(model)
    if plan.model.fingerprint != mine.fingerprint:
        raise AutoparError(
            f"the plan is for another model or batch: a {plan.model.class_name} with "
            f"{plan.model.parameters:,} parameters, {plan.model.fingerprint[:12]}; this is a "
            f"{mine.class_name} with {mine.parameters:,}, {mine.fingerprint[:12]}. Plan again"
        )
    mesh = Mesh(tuple(plan.mesh.items()))
    data = tuple(mesh.part(axis) for axis in plan.data_axes)
    setting = Setting(mesh, data, plan.microbatches)
    chosen: dict[tuple[str, str], Candidate] = {}
    for choice in plan.regions:
        candidate = _candidate(choice, mesh)
        chosen.update({(layer, choice.region): candidate for layer in choice.layers})
    choices: dict[str, dict[str, Candidate]] = {}
    for path, block in model.instances():
        choices[path] = {}
        for region in block.regions:
            if (path, region.name) not in chosen:
                raise AutoparError(f"the plan says nothing of {path or 'skeleton'}/{region.name}")
            choices[path][region.name] = chosen[path, region.name]
    return Program(model, setting, choices)


def _candidate(choice: RegionChoice, mesh: Mesh) -> Candidate:
    try:
        splits = {dim: _split(axes, mesh) for dim, axes in choice.splits.items()}
        params = {
            name: ParamPlan(_split(p.param, mesh), _split(p.grad, mesh), _split(p.state, mesh))
            for name, p in choice.params.items()
        }
    except ValueError as error:
        raise AutoparError(f"the plan's region {choice.region!r}: {error}") from error
    makers: Mapping[str, tuple[tuple[str, bool | int | float | str | None], ...]] = {
        name: tuple(sorted(options.items())) for name, options in choice.strategies.items()
    }
    return Candidate(
        choice.region,
        tuple(sorted(splits.items())),
        tuple(sorted(params.items())),
        tuple(sorted(makers.items())),
    )


def _split(axes: tuple[str, ...], mesh: Mesh) -> Split:
    return tuple(_part(name, mesh) for name in axes)


def _part(name: str, mesh: Mesh) -> AxisPart:
    if name not in dict(mesh.axes):
        raise ValueError(f"{name!r} is no axis of the mesh {mesh}")
    return mesh.part(name)

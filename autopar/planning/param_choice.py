"""How a parameter lives, as strategies say it and as the plan writes it."""

from autopar.mesh import Mesh, Split
from autopar.plan import ParamChoice, SendChoice, StateChoice, SyncChoice
from autopar.plugin import GradientSync, ParamPlan, Send, StateSpec


def write_param(plan: ParamPlan) -> ParamChoice:
    """The plan file's form."""
    return ParamChoice(
        _names(plan.param), _names(plan.grad), _names(plan.state), _write_sync(plan.sync)
    )


def read_param(choice: ParamChoice, mesh: Mesh) -> ParamPlan:
    """The strategies' form. Errors: ValueError for an axis that the mesh lacks."""
    return ParamPlan(
        read_split(choice.param, mesh),
        read_split(choice.grad, mesh),
        read_split(choice.state, mesh),
        _read_sync(choice.sync, mesh),
    )


def read_split(axes: tuple[str, ...], mesh: Mesh) -> Split:
    """A split from its axes' names. Errors: ValueError for an axis that the mesh lacks."""
    for name in axes:
        if name not in dict(mesh.axes):
            raise ValueError(f"{name!r} is no axis of the mesh {mesh}")
    return tuple(mesh.part(name) for name in axes)


def _names(split: Split) -> tuple[str, ...]:
    return tuple(part.axis for part in split)


def _write_sync(sync: GradientSync | None) -> SyncChoice | None:
    if sync is None:
        return None
    return SyncChoice(
        _names(sync.axes),
        sync.function,
        dict(sync.options),
        tuple(SendChoice(s.op, s.fraction, s.dtype, s.index_bytes) for s in sync.sends),
        sync.passes,
        tuple(StateChoice(s.name, s.kind) for s in sync.state),
    )


def _read_sync(choice: SyncChoice | None, mesh: Mesh) -> GradientSync | None:
    if choice is None:
        return None
    return GradientSync(
        read_split(choice.axes, mesh),
        choice.function,
        tuple(sorted(choice.options.items())),
        tuple(Send(s.op, s.fraction, s.dtype, s.index_bytes) for s in choice.sends),
        choice.passes,
        tuple(StateSpec(s.name, s.kind) for s in choice.state),
    )

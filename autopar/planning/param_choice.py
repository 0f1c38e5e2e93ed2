"""How a parameter lives and an op is run, as strategies say it and as the plan writes it."""

from autopar.mesh import Mesh, Split
from autopar.plan import (
    ExchangeChoice,
    FormChoice,
    MoveChoice,
    ParamChoice,
    SendChoice,
    StateChoice,
    SyncChoice,
)
from autopar.plugin import Exchange, GradientSync, OpForm, ParamPlan, Send, StateSpec


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


def write_form(form: OpForm) -> FormChoice:
    """The plan file's form of an op's."""
    return FormChoice(
        form.op,
        _names(form.axes),
        tuple(MoveChoice(dim, other, _names(axes)) for dim, other, axes in form.moves),
        form.function,
        form.frees,
        form.whole,
        form.passes,
        form.copies,
        tuple(ExchangeChoice(e.op, e.phase, e.of, e.times, e.wide) for e in form.exchanges),
    )


def read_form(choice: FormChoice, mesh: Mesh) -> OpForm:
    """The strategies' form of an op's. Errors: ValueError for an axis that the mesh lacks."""
    return OpForm(
        choice.op,
        read_split(choice.axes, mesh),
        tuple((move.dim, move.to, read_split(move.axes, mesh)) for move in choice.moves),
        choice.function,
        choice.frees,
        choice.whole,
        choice.passes,
        choice.copies,
        tuple(Exchange(e.op, e.phase, e.of, e.times, e.wide) for e in choice.exchanges),
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

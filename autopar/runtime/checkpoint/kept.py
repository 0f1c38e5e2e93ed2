"""State that strategies keep beside parameters (error feedback of a compressed gradient, say)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.checkpoint.index import Index
from autopar.runtime.gradient_sync import KeptState
from autopar.runtime.leaves import Leaf
from autopar.runtime.pieces import Parts, parts_of
from autopar.runtime.process_mesh import ProcessMesh

SECTION = "kept"
"""kept/STATE/PARAMETER."""


@dataclass(frozen=True, eq=False)
class Kept:
    """State to be filled from a checkpoint, and state that begins at zero."""

    parts: Mapping[str, Parts]
    zero: tuple[KeptState, ...]

    def clear(self) -> None:
        """Zeroes what the checkpoint has nothing for."""
        for one in self.zero:
            one.value.zero_()


def kept_parts(
    kept: tuple[KeptState, ...], leaves: tuple[Leaf, ...], mesh: ProcessMesh
) -> dict[str, Parts]:
    """The state by key. Shares of a sum are summed, so that the state means the same under a plan
    with other ranks. A collective.
    """
    by_name = {leaf.name: leaf for leaf in leaves}
    parts = {}
    for one in kept:
        value, group = one.value, mesh[one.axes]
        if one.kind == "P" and group.size > 1:
            value = value.clone()
            dist.all_reduce(value, group=group.process_group)
        parts[f"{SECTION}/{one.name}/{one.parameter}"] = parts_of(
            by_name[one.parameter], mesh, value
        )
    return parts


def state_names(index: Index) -> frozenset[str]:
    """The names of the states that a checkpoint has."""
    prefix = f"{SECTION}/"
    keys = (name.removeprefix(prefix) for name in index.tensors if name.startswith(prefix))
    return frozenset(key.partition("/")[0] for key in keys)


def open_kept(
    index: Index,
    kept: tuple[KeptState, ...],
    by_saved_name: Mapping[str, Leaf],
    mesh: ProcessMesh,
    drop_state: Collection[str],
) -> Kept:
    """Where the checkpoint's states go. Of a sum's shares the first rank gets all, the others zero.

    Errors: AutoparError for states that nothing here keeps, unless they are dropped.
    """
    saved = {}
    for name, tensor in index.tensors.items():
        section, _, rest = name.partition("/")
        state, _, parameter = rest.partition("/")
        if section == SECTION and state not in drop_state:
            leaf = by_saved_name.get(parameter)
            if leaf is not None and not leaf.here:
                continue
            saved[state, leaf.name if leaf else parameter] = (name, tensor, leaf)
    here = {(one.name, one.parameter): one for one in kept}
    if unknown := sorted(saved.keys() - here.keys()):
        names = ", ".join(sorted({repr(state) for state, _ in unknown}))
        raise AutoparError(
            f"The checkpoint has state that this plan doesn't know: {names} (of {unknown[0][1]} "
            f"and {len(unknown) - 1} more parameters). Load it under a plan that does, or go on "
            f"without: drop_state=({names},)."
        )
    parts, zero = {}, []
    for key, one in here.items():
        if one.name in drop_state:
            continue
        if key not in saved or (one.kind == "P" and mesh[one.axes].rank):
            zero.append(one)
            continue
        name, tensor, leaf = saved[key]
        assert leaf is not None, key
        if tensor.shape != leaf.declaration.shape or tensor.dtype != one.value.dtype:
            raise AutoparError(
                f"The checkpoint's {one.name} of {leaf.name} is {tensor.shape} {tensor.dtype}, "
                f"this plan's is {leaf.declaration.shape} {one.value.dtype}: go on without it, "
                f"drop_state=({one.name!r},)."
            )
        parts[name] = parts_of(leaf, mesh, one.value)
    return Kept(parts, tuple(zero))

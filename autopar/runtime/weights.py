"""Weights in and out: whole tensors under the plain model's names."""

from collections.abc import Mapping, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.runtime.leaves import Leaf
from autopar.runtime.process_mesh import ProcessMesh


def load_weights(
    leaves: Sequence[Leaf], mesh: ProcessMesh, state: Mapping[str, Tensor]
) -> set[str]:
    """Every rank takes its parts of a plain state dict; no communication. Returns the names of the
    leaves that were there.

    Non-persistent buffers may be missing, as in plain state dicts: they stay what they are.

    Errors: AutoparError for names missing, names unknown, other shapes.
    """
    found = matched(leaves, state.keys())
    for name, leaf in found.items():
        if leaf.here:
            leaf.store(mesh, state[name])
    return {leaf.name for leaf in found.values()}


def matched(leaves: Sequence[Leaf], names: Set[str]) -> dict[str, Leaf]:
    """Leaves by the name (of several, where tied) under which plain weights have them.

    Errors: AutoparError for names missing and names unknown.
    """
    known = {name for leaf in leaves for name in (leaf.name, *leaf.also)}
    if unknown := sorted(names - known):
        raise AutoparError(f"The program has no {listed(unknown)}: are these another model's?")
    found = {leaf: _name(leaf, names) for leaf in leaves}
    missing = [leaf.name for leaf in leaves if needed(leaf) and found[leaf] is None]
    if missing:
        raise AutoparError(f"The weights given lack {listed(missing)}")
    return {name: leaf for leaf, name in found.items() if name is not None}


def load_from_rank0(leaves: Sequence[Leaf], mesh: ProcessMesh, model: nn.Module | None) -> None:
    """Rank 0's model gives every rank its parts, one tensor at a time; others may pass None.

    Errors: AutoparError, on every rank, where rank 0's model is on the meta device, lacks a name,
    has another shape, or has parameters that the program doesn't know.
    """
    state: dict[str, Tensor] = {}
    if mesh.rank == 0 and model is not None:
        state = dict(model.named_buffers(remove_duplicate=False))
        state.update(model.named_parameters(remove_duplicate=False))
    problem = [_problem(leaves, state, model)] if mesh.rank == 0 else [""]
    if mesh.world.size > 1:
        dist.broadcast_object_list(problem, src=0, group=mesh.world.process_group)
    if problem[0]:
        raise AutoparError(problem[0])
    for leaf in leaves:
        shape, dtype = leaf.declaration.shape, leaf.declaration.dtype
        if mesh.rank == 0:
            given = _find(leaf, state)
            assert given is not None, leaf.name
            whole = given.detach().to(mesh.device, dtype).contiguous()
        else:
            whole = torch.empty(shape, dtype=dtype, device=mesh.device)
        if mesh.world.size > 1:
            dist.broadcast(whole, src=0, group=mesh.world.process_group)
        if leaf.here:
            leaf.store(mesh, whole)


def full_gradients(leaves: Sequence[Leaf], mesh: ProcessMesh) -> dict[str, Tensor]:
    """Whole gradients on every rank, of leaves that have one. A collective."""
    has = torch.tensor([leaf.here and _has_gradient(leaf) for leaf in leaves]).int()
    has = has.to(mesh.device)
    if mesh.world.size > 1:  # no rank has all leaves, nor an element of each
        dist.all_reduce(has, dist.ReduceOp.MAX, group=mesh.world.process_group)
    return {
        leaf.name: leaf.whole(mesh, leaf.grad if leaf.here else None)
        for leaf, there in zip(leaves, has.tolist(), strict=True)
        if there
    }


def _has_gradient(leaf: Leaf) -> bool:
    """Whether there is one; a shard without elements doesn't know."""
    return leaf.grad is not None and (leaf.grad.numel() > 0 or 0 in leaf.declaration.shape)


def full_state_dict(leaves: Sequence[Leaf], mesh: ProcessMesh) -> dict[str, Tensor]:
    """Whole tensors on every rank under the plain model's names, those of tied tensors included
    (sharing memory). A collective.
    """
    state = {}
    for leaf in leaves:
        if leaf.declaration.persistent:
            whole = leaf.whole(mesh, leaf.value if leaf.here else None)
            state.update(dict.fromkeys((leaf.name, *leaf.also), whole))
    return state


def needed(leaf: Leaf) -> bool:
    """Whether a plain state dict holds the leaf."""
    return leaf.declaration.persistent


def _name(leaf: Leaf, names: Set[str]) -> str | None:
    return next((name for name in (leaf.name, *leaf.also) if name in names), None)


def _find(leaf: Leaf, state: Mapping[str, Tensor]) -> Tensor | None:
    name = _name(leaf, state.keys())
    return None if name is None else state[name]


def _problem(leaves: Sequence[Leaf], state: Mapping[str, Tensor], model: nn.Module | None) -> str:
    """What is wrong with rank 0's model, or ""."""
    if model is None:
        return "Rank 0 has no model to take the weights from: pass it one, or call load_weights"
    known = {name for leaf in leaves for name in (leaf.name, *leaf.also)}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if unknown := sorted(parameters - known):
        return f"The program was compiled from another model: it has no {listed(unknown)}"
    for leaf in leaves:
        given = _find(leaf, state)
        if given is None:
            return f"The program was compiled from another model: rank 0's has no {leaf.name}"
        if given.is_meta:
            return f"{leaf.name} of rank 0's model is on the meta device: call load_weights instead"
        if tuple(given.shape) != leaf.declaration.shape:
            return (
                f"{leaf.name} has shape {tuple(given.shape)} in rank 0's model; the program was "
                f"compiled for {leaf.declaration.shape}"
            )
    return ""


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"

"""The batch: checked, cut into ranks' shares and microbatches, compared between peers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError
from autopar.runtime.process_mesh import Group
from autopar.runtime.program import Input, Program


def local_tensors(batch: Any, program: Program, device: torch.device) -> list[Tensor]:
    """The tensors of this rank's share in the order of the program's inputs, on `device`.

    Errors: AutoparError where their number, a shape or a dtype is not what the program is for.
    """
    leaves, _, inputs = _match(batch, program)
    pieces = program.data_parallel_size
    by_name = {one.name: leaf for leaf, one in zip(leaves, inputs, strict=True) if one is not None}
    for one in program.inputs:
        shape = (one.shape[0] // pieces, *one.shape[1:]) if one.split else one.shape
        share = f"1/{pieces} of {one.shape} on dim 0" if one.split else "given whole to every rank"
        _check(by_name[one.name], one, shape, f"this rank's share, {share}")
    return [by_name[one.name].to(device) for one in program.inputs]


def microbatches(tensors: list[Tensor], program: Program) -> list[tuple[Tensor, ...]]:
    """A local batch in equal pieces on dim 0; inputs that aren't split go whole into each."""
    columns = [
        tensor.chunk(program.microbatches) if one.split else [tensor] * program.microbatches
        for tensor, one in zip(tensors, program.inputs, strict=True)
    ]
    return list(zip(*columns, strict=True))


def shard_batch(batch: Any, program: Program, data_rank: int) -> Any:
    """The share of a global batch that the ranks with this data rank take: the same structure.

    Errors: AutoparError where a shape or dtype is not what the program is for.
    """
    leaves, spec, inputs = _match(batch, program)
    for position, one in enumerate(inputs):
        if one is not None:
            _check(leaves[position], one, one.shape, "of the global batch")
            if one.split:
                leaves[position] = leaves[position].chunk(program.data_parallel_size)[data_rank]
    return pytree.tree_unflatten(leaves, spec)


def check_peers(
    tensors: list[Tensor], program: Program, data: Group, world: Group, device: torch.device
) -> None:
    """Compares checksums of the batch over all ranks: a collective of 16 bytes a rank.

    Errors: AutoparError on every rank where ranks that work on the same samples (equal on all axes
    but the data axes) were given different ones, or inputs that aren't split differ at all.
    """
    if world.size == 1:
        return
    sums = [0, 0]
    for tensor, one in zip(tensors, program.inputs, strict=True):
        sums[0 if one.split else 1] += _checksum(tensor)
    mine = torch.tensor([total % 2**62 for total in sums], device=device)
    rows = [torch.empty_like(mine) for _ in range(world.size)]
    torch.distributed.all_gather(rows, mine, group=world.process_group)
    given = [row.tolist() for row in rows]
    first: dict[tuple[int, ...], int] = {}
    for rank, (split, whole) in enumerate(given):
        coordinate = program.mesh.coordinate(rank)
        share = tuple(coordinate[axis] for axis in data.axes)
        peer = first.setdefault(share, rank)
        if split != given[peer][0]:
            raise AutoparError(
                f"Ranks {peer} and {rank} were given different local batches, but differ only "
                f"along axes that don't split the batch ({program.mesh}, batch over "
                f"{data.axes or 'no axis'}). Choose a rank's samples by data_parallel_rank, not by "
                "its global rank."
            )
        if whole != given[0][1]:
            raise AutoparError(
                f"Ranks 0 and {rank} were given different values of an input that every rank "
                f"takes whole: {[one.name for one in program.inputs if not one.split]}"
            )


def _match(batch: Any, program: Program) -> tuple[list[Any], Any, list[Input | None]]:
    """The batch's leaves, its structure, and which input each leaf is (None: not a tensor), by the
    names that follow from the structure: a tuple isn't taken for a dict.

    Errors: AutoparError for other tensors, and for other plain values than those compiled in.
    """
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        batch = dict(batch)  # Hugging Face's BatchEncoding is a leaf to pytree
    paths, spec = pytree.tree_flatten_with_path(batch)
    leaves = [leaf for _, leaf in paths]
    named = [_name(path) if isinstance(leaf, Tensor) else None for path, leaf in paths]
    given = [name for name in named if name is not None]
    known = {one.name: one for one in program.inputs}
    if sorted(given) != sorted(known):
        raise AutoparError(
            f"The batch has {len(given)} tensors, the program takes {len(known)}: "
            f"{', '.join(known)}; given: {', '.join(given) or 'none'}. Pass the same structure as "
            "to autopar.compile."
        )
    values = {
        _name(path): leaf
        for path, leaf in paths
        if leaf is not None and not isinstance(leaf, Tensor)
    }
    if values != program.values:
        raise AutoparError(
            f"The batch's values beside tensors are {values}; the program was compiled with "
            f"{dict(program.values)}, which are part of it. Pass a value that changes as a tensor, "
            "or compile again."
        )
    return leaves, spec, [None if name is None else known[name] for name in named]


def _name(path: tuple[Any, ...]) -> str:
    """The name that capture gives the tensor at a pytree path: its keys."""
    keys = [getattr(k, "key", getattr(k, "idx", getattr(k, "name", ""))) for k in path]
    name = "_".join(map(str, keys)) or "batch"
    return name if name.isidentifier() else f"batch_{name}"


def _check(tensor: Tensor, one: Input, shape: tuple[int, ...], what: str) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != one.dtype:
        raise AutoparError(
            f"Input {one.name!r} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; "
            f"expected {shape} and {one.dtype} ({what}). A program is for one batch size: compile "
            "again for another."
        )


def _checksum(tensor: Tensor) -> int:
    """A 64-bit sum of the tensor's bytes, weighted by place."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8).to(torch.int64)
    # Odd multipliers are invertible modulo 2^64, so that no single byte's change gets lost.
    weights = torch.arange(len(data), device=data.device) * -7046029254386353131 | 1
    return int((data * weights).sum())

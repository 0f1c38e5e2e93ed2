"""The roots of a program on this rank: the whole model, or the parts that lie on this stage; and
what every rank knows of the parts that lie elsewhere.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.runtime.fsdp import close_root
from autopar.runtime.leaves import Leaf, Place, leaves_of
from autopar.runtime.process_mesh import ProcessMesh
from autopar.runtime.program import Program


@dataclass(frozen=True, eq=False)
class Roots:
    """`parts`: this rank's roots by part (0 alone, without stages). `leaves`: its tensors.
    `catalogue`: those of all ranks in the model's order, `leaves` among them."""

    parts: Mapping[int, Any]
    leaves: tuple[Leaf, ...]
    catalogue: tuple[Leaf, ...]


def build(program: Program, mesh: ProcessMesh) -> Roots:
    """Makes this rank's roots, uninitialised. A collective."""
    if program.stages is None:
        root = _root(program.models[0], mesh)
        leaves = leaves_of(root, mesh)
        return Roots({0: root}, leaves, leaves)
    axis, count = program.stages.axis, program.stages.table.stages
    group = mesh[axis]
    parts = {
        part: _root(model, mesh)
        for part, model in enumerate(program.models)
        if part % count == group.rank
    }
    found: dict[str, list[tuple[int, Leaf]]] = {}
    for part, model in enumerate(program.models):
        there = parts[part] if part in parts else model(_on_meta(mesh))
        for leaf in leaves_of(there, mesh):
            found.setdefault(leaf.name, []).append((part % count, leaf))
    catalogue = tuple(_placed(copies, axis, group.rank) for copies in found.values())
    shared = {leaf.place.stages for leaf in catalogue if leaf.place is not None}
    mesh.open_among(axis, sorted(stages for stages in shared if len(stages) > 1))
    return Roots(parts, tuple(leaf for leaf in catalogue if leaf.here), catalogue)


def _root(model: type[Any], mesh: ProcessMesh) -> Any:
    root = model(mesh)
    if "shard" in vars(model):
        root.shard()
    close_root(root)
    return root


def _on_meta(mesh: ProcessMesh) -> ProcessMesh:
    """The mesh for parts that are only looked at: their tensors take no memory."""
    there = copy(mesh)
    there.device = torch.device("meta")
    return there


def _placed(copies: list[tuple[int, Leaf]], axis: str, stage: int) -> Leaf:
    """A tensor with the stages that hold it; on one of those, that stage's copy."""
    stages = tuple(sorted({held for held, _ in copies}))
    mine = [leaf for held, leaf in copies if held == stage]
    for again in mine[1:]:
        _share_buffer(mine[0], again)
    leaf = mine[0] if mine else copies[0][1]
    here = bool(mine)
    return replace(leaf, place=Place(axis, stages, here, here and stages[0] == stage))


def _share_buffer(one: Leaf, other: Leaf) -> None:
    """Two parts of a stage have a buffer in common. (No plan gives them a common parameter.)"""
    assert one.declaration.buffer, f"{one.name} is a parameter of two parts of one stage"
    path, _, name = other.key.rpartition(".")
    other.module.get_submodule(path)._buffers[name] = one.value


def of_part(roots: Roots, part: int) -> Iterator[Leaf]:
    """The leaves that a part's root declared."""
    modules = set(roots.parts[part].modules())
    return (leaf for leaf in roots.leaves if leaf.module in modules)

"""An emitted module, run and read."""

import hashlib
import linecache
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.mesh import Mesh
from autopar.runtime.pipeline import Wire
from autopar.schedule import Table


@dataclass(frozen=True)
class Input:
    """One tensor of the batch: its shape in the global batch, and whether dim 0 is split over the
    data axes and then over microbatches (else every microbatch on every rank gets it whole).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    split: bool


@dataclass(frozen=True)
class Stages:
    """How microbatches run through parts of the model along an axis: which inputs each part takes,
    by name, and what each hands to the next (the last part: the loss)."""

    axis: str
    table: Table
    takes: tuple[tuple[str, ...], ...]
    boundaries: tuple[tuple[Wire, ...], ...]


@dataclass(frozen=True)
class Program:
    """What an emitted module says about itself (its names in capitals)."""

    models: tuple[type[Any], ...]
    """The root's class, a Container made with the mesh; one for each part where layers lie in
    stages."""
    mesh: Mesh
    microbatches: int
    data_axes: tuple[str, ...]
    loss_sums: tuple[str, ...]
    inputs: tuple[Input, ...]
    groups: tuple[tuple[str, ...], ...]
    """Sets of more than one axis that forward communicates over."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What the batch held beside tensors when it was compiled: part of the program."""
    stages: Stages | None = None

    @property
    def data_parallel_size(self) -> int:
        """How many different shares of the global batch there are."""
        return math.prod(self.mesh.size(axis) for axis in self.data_axes)

    def defines(self, method: str) -> bool:
        """Whether the roots have this optional method (`counts`, `sync_gradients`)."""
        return any(method in vars(model) for model in self.models)


def run_program(source: str) -> types.ModuleType:
    """Executes emitted source as a module. Tracebacks show its lines.

    The source is code: run only what a compiler run on this machine has written.
    """
    name = f"autopar_program_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(name)
    module.__file__ = filename
    exec(compile(source, filename, "exec"), module.__dict__)
    return module


def read_program(module: types.ModuleType) -> Program:
    """The facts that an emitted module states. GROUPS and VALUES may be missing: there are none."""
    models = module.MODEL if isinstance(module.MODEL, tuple) else (module.MODEL,)
    program = Program(
        models,
        Mesh(tuple((name, int(size)) for name, size in module.MESH)),
        int(module.MICROBATCHES),
        tuple(module.DATA_AXES),
        tuple(module.LOSS_SUMS),
        tuple(
            Input(name, tuple(shape), getattr(torch, dtype), split)
            for name, shape, dtype, split in module.INPUTS
        ),
        tuple(tuple(axes) for axes in getattr(module, "GROUPS", ())),
        dict(getattr(module, "VALUES", {})),
        _stages(module),
    )
    pieces = program.data_parallel_size * program.microbatches
    for one in program.inputs:
        assert not one.split or one.shape[0] % pieces == 0, f"{one} doesn't fall into {pieces}"
    return program


def _stages(module: types.ModuleType) -> Stages | None:
    """STAGES and what goes with it, if the module has them."""
    if not hasattr(module, "STAGES"):
        return None
    table: Table = module.SCHEDULE
    table.check()
    boundaries = tuple(
        tuple(Wire(tuple(shape), getattr(torch, dtype), grad) for shape, dtype, grad in wires)
        for wires in module.BOUNDARIES
    )
    takes = tuple(tuple(names) for names in module.TAKES)
    assert len(boundaries) == len(takes) == table.parts == len(module.MODEL)
    return Stages(module.STAGES, table, takes, boundaries)

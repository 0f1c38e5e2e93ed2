"""What a checkpoint is made of: weights, optimizer, random streams, the step number."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.runtime.checkpoint import optimizer as optimizers
from autopar.runtime.checkpoint.index import Facts, Index
from autopar.runtime.checkpoint.kept import SECTION as KEPT
from autopar.runtime.gradient_sync import KeptState
from autopar.runtime.leaves import Leaf
from autopar.runtime.pieces import Parts, parts_of, whole
from autopar.runtime.process_mesh import ProcessMesh
from autopar.runtime.random_stream import RandomStream

STEP = "step"
WEIGHT = "weight"
"""weight/NAME: a parameter or buffer, non-persistent ones as well."""
RANDOM = "random"
"""random/RANK/DEVICE: the stream of one data-parallel rank."""
SEED, STREAMS = "random.seed", "random.streams"
SECTIONS = frozenset({WEIGHT, optimizers.SECTION, KEPT, RANDOM})


@dataclass(frozen=True, eq=False)
class Running:
    """A training program on this rank, as far as checkpoints go."""

    leaves: tuple[Leaf, ...]
    mesh: ProcessMesh
    optimizer: torch.optim.Optimizer
    kept: tuple[KeptState, ...]
    random: RandomStream
    data_rank: int
    """Which stream of random numbers this rank draws from, of `data_size`."""
    data_size: int
    step: int
    catalogue: tuple[Leaf, ...] = ()
    """The leaves of all ranks: `leaves` are those of this one."""

    @property
    def everywhere(self) -> tuple[Leaf, ...]:
        """All leaves of the program."""
        return self.catalogue or self.leaves


def collect(running: Running, kept: Mapping[str, Parts]) -> tuple[Mapping[str, Parts], Facts]:
    """All that this rank holds, by key, and what isn't a tensor. `kept`: see `kept_parts`.

    Errors: AutoparError for optimizer state that a checkpoint can't hold.
    """
    parts = {
        f"{WEIGHT}/{leaf.name}": parts_of(leaf, running.mesh, leaf.value) for leaf in running.leaves
    }
    state, facts = optimizers.state_parts(running.optimizer, running.leaves, running.mesh)
    parts |= state | dict(kept)
    for device, stream in running.random.state.items():
        parts[f"{RANDOM}/{running.data_rank}/{device}"] = whole(stream)
    facts |= {
        STEP: running.step,
        SEED: running.random.seed - running.data_rank,
        STREAMS: running.data_size,
    }
    return parts, facts


def random_parts(running: Running, index: Index) -> dict[str, Parts]:
    """Empty tensors for this rank's random stream; none where the checkpoint has no such stream,
    since its data-parallel size or its kind of device is another.
    """
    wanted = {
        f"{RANDOM}/{running.data_rank}/{device}": torch.empty_like(stream)
        for device, stream in running.random.state.items()
    }
    same = all(
        key in index.tensors
        and index.tensors[key].shape == tuple(tensor.shape)
        and index.tensors[key].dtype == tensor.dtype
        for key, tensor in wanted.items()
    )
    if not same or index.facts.get(STREAMS) != running.data_size:
        return {}
    return {key: whole(tensor) for key, tensor in wanted.items()}


def reseeded(running: Running, facts: Facts) -> int:
    """A seed for a rank whose stream the checkpoint doesn't have: the same whenever the checkpoint
    is loaded on that many data ranks, and unlike any that was drawn from before.
    """
    told: tuple[Any, ...] = (facts[SEED], facts[STEP], running.data_size, running.data_rank)
    return int.from_bytes(hashlib.sha256(repr(told).encode()).digest()[:8], "little") % 2**62

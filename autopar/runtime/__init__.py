"""What emitted modules import beside torch, and the TrainingModule that runs them."""

from autopar.runtime.batch_norm import sync_batch_norm
from autopar.runtime.collectives import (
    all_gather,
    all_reduce,
    all_reduce_partial,
    all_to_all,
    enter,
    local_part,
    once,
    reduce_scatter,
    ring,
    shard,
    unshard,
)
from autopar.runtime.count import CollectiveCounter
from autopar.runtime.experts import Route, combine, dispatch, grouped_mm, route
from autopar.runtime.fsdp import shard_fully
from autopar.runtime.gradient_sync import gradient, keep_state, state
from autopar.runtime.launch import initialise
from autopar.runtime.layout import cat, split, split_padded
from autopar.runtime.opaque import OpaqueLayer
from autopar.runtime.parameters import (
    Container,
    Declaration,
    declare,
    declare_layers,
    run_layers,
)
from autopar.runtime.process_mesh import Group, ProcessMesh
from autopar.runtime.program import run_program
from autopar.runtime.random_stream import masks_apart
from autopar.runtime.training import StepResult, TrainingModule
from autopar.runtime.vocabulary import vocab_cross_entropy, vocab_embedding
from autopar.runtime.zero import shard_state

__all__ = [
    "CollectiveCounter",
    "Container",
    "Declaration",
    "Group",
    "OpaqueLayer",
    "ProcessMesh",
    "Route",
    "StepResult",
    "TrainingModule",
    "all_gather",
    "all_reduce",
    "all_reduce_partial",
    "all_to_all",
    "cat",
    "combine",
    "declare",
    "declare_layers",
    "dispatch",
    "enter",
    "gradient",
    "grouped_mm",
    "initialise",
    "keep_state",
    "local_part",
    "masks_apart",
    "once",
    "reduce_scatter",
    "ring",
    "route",
    "run_layers",
    "run_program",
    "shard",
    "shard_fully",
    "shard_state",
    "split",
    "split_padded",
    "state",
    "sync_batch_norm",
    "unshard",
    "vocab_cross_entropy",
    "vocab_embedding",
]

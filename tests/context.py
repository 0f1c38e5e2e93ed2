"""Context parallelism against the plain model: tasks for a pool."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from equality import CLIP_NORM, OFF, Comparison, Edit, edited, run
from families import FAMILIES
from models import Job, float32_raised, gpt2, llama

import autopar

RING, SWAP = {"context": "ring"}, {"context": "all_to_all"}
CASES: dict[str, dict[str, Any]] = {
    "cp4_ring": {"cp": 4, **RING},
    "cp4_all_to_all": {"cp": 4, **SWAP},
    "cp2_ring": {"cp": 2, **RING},
    "cp2_all_to_all": {"cp": 2, **SWAP},
}
STRATEGIES = (
    "data",
    "sequence",
    "tensor",
    "zero",
    "expert",
    "pipeline",
    "recompute",
    "context",
)


def padded(job: Job) -> Job:
    """Samples of different lengths: positions after their end are hidden, and have no label."""
    length = job.batch["input_ids"].shape[1]
    lengths = torch.tensor([16, 9, 3, 12, 16, 5, 1, 14])
    mask = torch.arange(length) < lengths[:, None]
    labels = job.batch["labels"].masked_fill(~mask, -100)
    return replace(job, batch={**job.batch, "labels": labels, "attention_mask": mask.long()})


MODELS: dict[str, Callable[[], Job]] = {
    "gpt2": gpt2,
    "llama": llama,
    "llama4": lambda: llama(kv_heads=4),
    "bert": lambda: FAMILIES["bert"].tiny(),
    "bert_padded": lambda: padded(FAMILIES["bert"].tiny()),
    "gpt2_padded": lambda: padded(gpt2()),
    "llama_padded": lambda: padded(llama()),
}


def compiled(job: Job, case: str, cluster: str | dict[str, Any]) -> autopar.Compiled:
    """A job planned for CPU processes under one of CASES."""
    off = {name: on for name, on in OFF.items() if not name.startswith("wide")}
    return autopar.compile(
        job.model,
        cluster,
        job.batch,
        loss=job.loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        clip_norm=CLIP_NORM,
        strategies=STRATEGIES,
        pin={**off, **CASES[case]},
    )


def compare(model: str, case: str, cluster: str, *edits: Edit) -> Comparison:
    """One model in float64, on every rank."""
    with float32_raised():
        job = MODELS[model]()
        return run(job, edited(compiled(job, case, cluster), edits))

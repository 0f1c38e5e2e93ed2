"""Context parallelism against the plain model: tasks for a pool."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from equality import CLIP_NORM, OFF, Comparison, Edit, edited, run
from experts import wide
from families import FAMILIES
from models import Job, float32_raised, gpt2, llama
from moe import MOE, grouped

import autopar

CASES: dict[str, dict[str, Any]] = {
    f"{name}_{form}": {**pins, "context": form}
    for form in ("ring", "all_to_all")
    for name, pins in {
        "cp4": {"cp": 4},
        "cp2": {"cp": 2},
        "cp2_tp2": {"cp": 2, "tp": 2, "tensor": True},
        "cp2_tp2_sequence": {"cp": 2, "tp": 2, "tensor": True, "sequence": True},
        "cp2_dp2": {"cp": 2, "dp": 2},
        "cp2_dp2_microbatches2": {"cp": 2, "dp": 2, "microbatches": 2},
        **{f"cp4_zero{stage}": {"cp": 4, "zero": stage} for stage in (1, 2, 3)},
        "cp2_dp2_zero3_microbatches2": {"cp": 2, "dp": 2, "zero": 3, "microbatches": 2},
        "cp2_dp2_hybrid2": {"cp": 2, "dp": 2, "zero": {"stage": 2, "within": 2}},
        "cp2_pp2_1f1b": {"cp": 2, "pp": 2, "microbatches": 4, "schedule": "1f1b"},
        "cp2_pp2_zero_bubble": {"cp": 2, "pp": 2, "microbatches": 2, "schedule": "zero_bubble"},
        "cp2_ep2": {"cp": 2, "ep": 2},
        "cp2_ep2_zero3": {"cp": 2, "ep": 2, "zero": 3},
        "cp4_full": {"cp": 4, "recompute": "full"},
        "cp4_selective": {"cp": 4, "recompute": "selective"},
        "cp4_zero3_full": {"cp": 4, "zero": 3, "recompute": "full"},
    }.items()
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
    with wide() if model in MOE else float32_raised():
        job = grouped(model) if model in MOE else MODELS[model]()
        job.model.double()
        return run(job, edited(compiled(job, case, cluster), edits))

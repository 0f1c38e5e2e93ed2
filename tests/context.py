"""Context parallelism against the plain model: tasks for a pool."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import families
import torch
import torch.nn.functional as F
from equality import OFF, Comparison, planned_as, run
from experts import wide
from families import FAMILIES
from models import Job, float32_raised, gpt2, llama
from moe import MOE, grouped
from test_dropout import Masks, recorded
from torch import Tensor

import autopar
from autopar.runtime import ProcessMesh, attention_blocks, collectives
from autopar.runtime import context as runtime

MESHES: dict[str, dict[str, Any]] = {
    "cp4": {"cp": 4},
    "cp2": {"cp": 2},
    "cp2_tp2": {"cp": 2, "tp": 2, "tensor": True},
    "cp2_tp2_sequence": {"cp": 2, "tp": 2, "tensor": True, "sequence": True},
    "cp2_dp2": {"cp": 2, "dp": 2},
    "cp2_dp2_microbatches2": {"cp": 2, "dp": 2, "microbatches": 2},
    "cp4_zero1": {"cp": 4, "zero": 1},
    "cp4_zero2": {"cp": 4, "zero": 2},
    "cp4_zero3": {"cp": 4, "zero": 3},
    "cp2_dp2_zero3_microbatches2": {"cp": 2, "dp": 2, "zero": 3, "microbatches": 2},
    "cp2_dp2_hybrid2": {"cp": 2, "dp": 2, "zero": {"stage": 2, "within": 2}},
    "cp2_pp2_1f1b": {"cp": 2, "pp": 2, "microbatches": 4, "schedule": "1f1b"},
    "cp2_pp2_zero_bubble": {"cp": 2, "pp": 2, "microbatches": 2, "schedule": "zero_bubble"},
    "cp2_ep2": {"cp": 2, "ep": 2},
    "cp2_ep2_zero3": {"cp": 2, "ep": 2, "zero": 3},
    "cp2_pp2_full": {
        "cp": 2,
        "pp": 2,
        "microbatches": 4,
        "schedule": "1f1b",
        "recompute": "full",
    },
    "cp4_full": {"cp": 4, "recompute": "full"},
    "cp4_selective": {"cp": 4, "recompute": "selective"},
    "cp4_zero3_full": {"cp": 4, "zero": 3, "recompute": "full"},
}
CASES: dict[str, dict[str, Any]] = {
    f"{name}_{form}": {**pins, "context": form}
    for name, pins in MESHES.items()
    for form in ("ring", "all_to_all")
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
    "phi3_one_key_head": families._tiny(families._phi3(16, 2, 2, 1, 32, 48, 24)),
    "gpt2_padded": lambda: padded(gpt2()),
    "llama_padded": lambda: padded(llama()),
}


def compiled(job: Job, case: str, cluster: str | dict[str, Any]) -> autopar.Compiled:
    """A job planned for CPU processes under one of CASES."""
    off = {name: on for name, on in OFF.items() if not name.startswith("wide")}
    return planned_as(job, cluster, STRATEGIES, {**off, **CASES[case]})


def compare(model: str, case: str, cluster: str) -> Comparison:
    """One model in float64, on every rank."""
    with wide() if model in MOE else float32_raised():
        job = grouped(model) if model in MOE else MODELS[model]()
        job.model.double()
        return run(job, compiled(job, case, cluster))


# ---------------------------------------------------------------- the runtime alone


@dataclass(frozen=True)
class Shape:
    """An attention: heads of queries and keys, and what hides keys."""

    heads: int
    key_heads: int
    causal: bool = False
    mask: str = ""
    width: int = 8
    """Channels of a value; torch's fused kernels want as many as of a query, which has 8."""


SHAPES: dict[str, Shape] = {
    "plain": Shape(2, 2),
    "causal": Shape(2, 2, causal=True),
    "grouped": Shape(4, 2, causal=True),
    "one_key_head": Shape(4, 1),
    "narrow_values": Shape(4, 2, causal=True, width=4),
    "padding": Shape(2, 2, mask="padding"),
    "causal_padding": Shape(4, 2, mask="causal_padding"),
    "nothing_seen": Shape(2, 2, mask="nothing_seen"),
    "added_by_head": Shape(4, 2, mask="added_by_head"),
}
BATCH, LENGTH, WIDTH = 3, 16, 8


def mask_of(shape: Shape, generator: torch.Generator) -> Tensor | None:
    """[batch or 1, heads or 1, queries or 1, keys]."""
    if shape.mask == "added_by_head":
        return torch.randn(1, shape.heads, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    if not shape.mask:
        return None
    seen = torch.arange(LENGTH) < torch.tensor([16, 9, 2])[:, None]
    mask = seen[:, None, None, :]
    if shape.mask == "causal_padding":
        return mask & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if shape.mask == "nothing_seen":  # by whole rows, of the first chunk on
        return mask & (torch.arange(LENGTH) > 4)[:, None]
    return mask


def attention_errors(name: str, dtype: torch.dtype) -> list[float]:
    """Errors of ring attention's output and gradients on this rank of four."""
    mesh, shape = ProcessMesh((("cp", 4),)), SHAPES[name]
    axis, generator = mesh["cp"], torch.Generator().manual_seed(5)
    heads, keys = shape.heads, shape.key_heads
    ends = ((heads, WIDTH), (keys, WIDTH), (keys, shape.width), (heads, shape.width))
    sizes = [(BATCH, h, LENGTH, width) for h, width in ends]
    every = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    mask = mask_of(shape, generator)
    grouped = shape.heads != shape.key_heads

    def mine(x: Tensor) -> Tensor:
        return collectives.local_part(x, dim=2, axis=axis, balanced=True).detach()

    q, k, v, toward = (x.to(dtype).double() for x in every)
    for x in (q, k, v):
        x.requires_grad_()
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=shape.causal, enable_gqa=grouped
    )
    out.backward(toward)
    a, b, c = (mine(x).to(dtype).requires_grad_() for x in (q, k, v))
    local_mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    with mock.patch.object(attention_blocks, "QUERIES", 3):
        found = runtime.ring_attention(
            a, b, c, attn_mask=local_mask, is_causal=shape.causal, enable_gqa=grouped, axis=axis
        )
        found.backward(mine(toward).to(dtype))
    pairs = [(found, out), *((x.grad, y.grad) for x, y in ((a, q), (b, k), (c, v)))]
    errors = []
    for ours, theirs in pairs:
        assert ours is not None and theirs is not None
        errors.append(float((ours.detach().double() - mine(theirs)).abs().max()))
    mesh.close()
    return errors


# ---------------------------------------------------------------- dropout


RATE = 0.25


def dropped(case: str) -> tuple[float, dict[str, Tensor], Masks]:
    """Loss, gradients, this rank's masks of one step of GPT-2 that drops a quarter everywhere."""
    masks: Masks = []
    with float32_raised():
        job = gpt2(dropout=RATE)
        parallel = compiled(job, case, "cpu:4").materialize()
        local = parallel.shard_batch(job.batch)
        with recorded(masks):
            loss = parallel.forward_backward(local)
        gradients = parallel.full_gradients()
        parallel.close()
    return float(loss), gradients, masks


def whole_mask(ranks: list[Masks], call: int) -> Tensor:
    """A call's mask of the whole tensor: of activations by balanced chunks of positions, of
    attention by heads."""
    kind, parts = ranks[0][call][0], [masks[call][1] for masks in ranks]
    for i, one in enumerate(parts):
        assert not any(torch.equal(one, other) for other in parts[:i])
    if kind == "attention":
        return torch.cat(parts, 1)
    halves = [part.chunk(2, 1) for part in parts]
    return torch.cat([*(h[0] for h in halves), *(h[1] for h in halves[::-1])], 1)

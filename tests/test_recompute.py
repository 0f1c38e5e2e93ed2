"""Recompute: the same numbers, the collectives that come again, and refusals with their reasons."""

import dataclasses

import pytest
import torch
from equality import OFF, RECOMPUTE, Comparison, Edit, compare, compiled, edited
from families import FAMILIES
from gpt2_regions import FFN_REGION, mesh, refined, refusal
from models import MODELS, Job, float32_raised, gpt2
from pool import Pool
from torch import nn

import autopar
from autopar.capture import capture
from autopar.cluster import resolve_cluster
from autopar.graph.analyse import analyse
from autopar.plugin import Candidate, Recomputed
from autopar.strategies.recompute import Recompute

TOLERANCE = 1e-9
CASES = [
    (model, case)
    for model in MODELS
    for case in RECOMPUTE
    if model != "mlp" or ("selective" in case and "sequence" not in case)  # it has no layers
]


@pytest.mark.parametrize(("model", "case"), CASES)
def test_equality_under_recompute(pool4: Pool, model: str, case: str) -> None:
    """Loss, every gradient, the norm, weights after three clipped steps; bytes as planned."""
    for comparison in pool4.run(compare, model, case):
        assert isinstance(comparison, Comparison)
        assert comparison.worst <= TOLERANCE, comparison
        assert comparison.counted == comparison.planned


PRESERVED = Edit(r"use_reentrant=False", "use_reentrant=False, preserve_rng_state=False", 1)


def dropped(case: str, edits: tuple[Edit, ...]) -> dict[str, torch.Tensor]:
    """A task for the pool: gradients of a model with dropout, always from the same seed."""
    with float32_raised():
        job = gpt2(dropout=0.1)
        torch.manual_seed(7)
        parallel = edited(compiled(job, case), edits).materialize()
        parallel.forward_backward(parallel.shard_batch(job.batch))
        gradients = parallel.full_gradients()
        parallel.close()
    return gradients


@pytest.mark.parametrize("case", ["full", "selective", "together"])
def test_masks_are_the_same_when_they_are_drawn_again(pool4: Pool, case: str) -> None:
    """With dropout, gradients equal those of the program that keeps its masks; a checkpoint that
    doesn't restore the random state is seen."""
    kept, again = pool4.run(dropped, "dp4", ())[0], pool4.run(dropped, case, ())[0]
    assert worst(kept, again) <= TOLERANCE
    if case == "full":
        assert worst(kept, pool4.run(dropped, case, (PRESERVED,))[0]) > 1e-3


def worst(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest error of a gradient."""
    assert left.keys() == right.keys()
    return max(float((left[n] - right[n]).norm()) / max(float(left[n].norm()), 1e-6) for n in left)


def recomputed_layers(job: Job, limit_bytes: int | None) -> tuple[int, int]:
    """How many layers the planner recomputes, at least in part, within a limit; the plan's
    memory."""
    cluster = resolve_cluster("cpu:4")
    whole = cluster.device.memory_bytes
    plan = autopar.compile(
        job.model,
        cluster,
        job.batch,
        pin={**{k: v for k, v in OFF.items() if k not in ("recompute", *WIDE)}, "dp": 4},
        memory_fraction=1.0 if limit_bytes is None else limit_bytes / whole,
    ).plan
    assert plan.predicted.memory_bytes <= plan.memory_limit_bytes
    layers = {path for choice in plan.regions if choice.recompute for path in choice.layers}
    return len(layers), plan.predicted.memory_bytes


WIDE = ("wide_batch", "wide_ffn")


def test_the_planner_recomputes_where_memory_asks_for_it() -> None:
    """None while there is memory, more layers the less there is."""
    job = gpt2(torch.float32, layers=4)
    none, ample_bytes = recomputed_layers(job, None)
    assert none == 0
    counts = []
    for share in (1.0, 0.95, 0.87, 0.77):
        count, used_bytes = recomputed_layers(job, int(ample_bytes * share))
        assert used_bytes <= ample_bytes * share
        counts.append(count)
    assert counts[0] == 0 and counts == sorted(counts) and 0 < counts[1] < counts[-1], counts


def test_of_equals_what_runs_once_is_taken() -> None:
    """BERT's token types are looked up for nothing that the backward needs: to run them again costs
    nothing and frees nothing."""
    job = FAMILIES["bert"].full["bert-large"](64)
    pin = {"dp": 8, "zero": 1}
    plan = autopar.compile(job.model, "v100:8", job.batch, loss=job.loss, pin=pin).plan
    assert not [choice.region for choice in plan.regions if choice.recompute]


def test_what_changes_a_buffer_runs_once() -> None:
    """Batch norm's running statistics would be changed twice."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    graph = analyse(capture(model, torch.randn(8, 4), lambda out, batch: out.square().mean()))
    reasons = [region.once for region in graph.skeleton.regions]
    assert any("running statistics" in reason for reason in reasons), reasons


def test_groups_of_layers_under_zero_3_are_refused() -> None:
    """With the reason, and never for regions alone instead."""
    job = MODELS["gpt2"]()
    for recompute in ({"scope": "full", "together": 2}, {"together": 2}):
        pin = {"dp": 4, "zero": 3, "recompute": recompute, "tp": 1, "microbatches": 1}
        with pytest.raises(autopar.AutoparError, match=r"FSDP2 \(zero 3\) gathers only"):
            autopar.compile(job.model, "cpu:4", job.batch, pin=pin)


def test_a_group_is_of_whole_layers() -> None:
    """Regions alone have none, not even of a layer that can't run again."""
    layers = Recomputed("layers", 2)
    (made,) = refined(Recompute(together=2), FFN_REGION, mesh(dp=4))
    assert isinstance(made, Candidate) and made.recompute == layers
    once = dataclasses.replace(FFN_REGION, layer_once="it draws")
    assert "can't run twice: it draws" in refusal(Recompute(together=2), once, mesh(dp=4))
    assert len(refined(Recompute(together=1), FFN_REGION, mesh(dp=4))) == 2


def test_half_a_group_is_refused() -> None:
    """A layer can't run again together with one that keeps its tensors."""
    together = {"recompute": {"scope": "full", "together": 2}}
    pin = {"dp": 4, "tp": 1, "microbatches": 1, "recompute": False, "layers": {"*.0.*": together}}
    job = MODELS["gpt2"]()
    with pytest.raises(autopar.AutoparError, match="with its whole layer and 1 next to it, which"):
        autopar.compile(job.model, "cpu:4", job.batch, pin=pin)

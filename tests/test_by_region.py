"""Seconds by region: together they are the plan's, and each is who caused it."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from clusters import cluster
from models import Job, classifier, deep_classifier, gpt2, llama
from moe import grouped
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.plan import Plan, RegionCost

CASES: list[tuple[str, Job, dict[str, Any]]] = [
    ("dp", gpt2(), {"dp": 4, "zero": False}),
    ("tp", llama(), {"tp": 4}),
    ("all", gpt2(), {"dp": 2, "tp": 2, "zero": 3, "recompute": "full", "microbatches": 2}),
    ("hybrid", gpt2(), {"dp": 4, "zero": {"stage": 2, "within": 2}, "recompute": "selective"}),
    ("mlp", classifier(), {"dp": 2, "tp": 2}),
    ("experts", grouped("mixtral"), {"ep": 2, "dp": 2}),
]
AXES = (("dp",), ("tp",), ("dp", "tp"))
STAGED: list[tuple[str, Job, dict[str, Any]]] = [
    ("1f1b", gpt2(), {"pp": 2, "dp": 2, "zero": 1, "schedule": "1f1b", "microbatches": 2}),
    ("interleaved", deep_classifier(), {"pp": 2, "tp": 2, "schedule": "interleaved"}),
]


def planned(job: Job, pin: dict[str, Any]) -> Plan:
    compiled = autopar.compile(job.model, cluster(), job.batch, loss=job.loss, pin=pin)
    return compiled.explained(meshes=0)


def totals(costs: tuple[RegionCost, ...]) -> tuple[float, float, float]:
    return (
        sum(cost.compute_s for cost in costs),
        sum(cost.exposed_s for cost in costs),
        sum(cost.optimizer_s for cost in costs),
    )


@pytest.mark.parametrize(("job", "pin"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_regions_add_up_to_the_step(job: Job, pin: dict[str, Any]) -> None:
    plan = planned(job, pin)
    p = plan.predicted
    assert totals(plan.region_costs) == pytest.approx(
        (p.compute_s, p.communication_s, p.optimizer_s)
    )
    *regions, rest = plan.region_costs
    assert [(c.layers, c.region) for c in regions] == [(c.layers, c.region) for c in plan.regions]
    assert (rest.layers, rest.region) == ((), "") and rest.optimizer_s == pytest.approx(0, abs=1e-9)
    assert all(cost.compute_s > 0 for cost in regions if cost.region not in ("stream", "mixing"))
    assert rest.compute_s < 0.1 * p.compute_s, "ops on inputs alone"


@pytest.mark.parametrize(("job", "pin"), [c[1:] for c in STAGED], ids=[c[0] for c in STAGED])
def test_regions_of_all_stages(job: Job, pin: dict[str, Any]) -> None:
    plan = planned(job, pin)
    compute_s, exposed_s, optimizer_s = totals(plan.region_costs)
    assert exposed_s == pytest.approx(sum(c.seconds for c in plan.collectives))  # none hides here
    own = sum(stage.step_s for stage in plan.predicted.stages)
    assert compute_s + exposed_s + optimizer_s == pytest.approx(own)
    rest = plan.region_costs[-1]
    sends = sum(c.seconds for c in plan.collectives if c.op == "send")
    assert 0 < sends <= rest.exposed_s


def test_what_belongs_to_no_region_is_the_steps_scalars() -> None:
    """Under data parallelism alone everything else is a parameter's gradient."""
    plan = planned(*CASES[0][1:])
    by_phase: dict[str, float] = defaultdict(float)
    for total in plan.collectives:
        by_phase[total.phase] += total.seconds
    rest = plan.region_costs[-1]
    assert rest.exposed_s == pytest.approx(by_phase["forward"] + by_phase["optimizer"])
    gradients = sum(cost.exposed_s for cost in plan.region_costs[:-1])
    assert gradients == pytest.approx(by_phase["grad_sync"])


def test_a_reduction_is_the_regions_that_made_it_necessary() -> None:
    """tp without sequence: Megatron's f and g belong to attention and MLP, none to the norms."""
    job = gpt2()
    plan = planned(job, {"tp": 4, "sequence": False, "zero": False})
    spent = {(c.layers[0], c.region): c.exposed_s for c in plan.region_costs[:-1]}
    assert spent["transformer.h.0", "heads"] == pytest.approx(spent["transformer.h.0", "ffn"])
    assert spent["transformer.h.0", "heads"] > 0 == spent["transformer.h.0", "stream"]


def wide() -> Job:
    """GPT-2, wide enough to keep an accelerator busy, without weights."""
    config = GPT2Config(n_embd=4096, n_layer=2, n_head=32, vocab_size=1024, n_positions=1024)
    with torch.device("meta"):
        model: nn.Module = GPT2LMHeadModel(config)
        tokens = torch.empty(16, 1024, dtype=torch.int64)
    return Job(model.to(torch.bfloat16), {"input_ids": tokens, "labels": tokens}, None)


@pytest.mark.parametrize("zero", [3, 1])
def test_what_hides_behind_compute_counts_little(zero: int) -> None:
    """On accelerators ZeRO 3 gathers while ops run; the sums are the plan's all the same."""
    job = wide()
    pin = {"dp": 2, "tp": 2, "zero": zero, "microbatches": 2, "recompute": False}
    plan = autopar.compile(job.model, "h100:4", job.batch, pin=pin).explained(meshes=0)
    p = plan.predicted
    whole = (p.compute_s, p.communication_s, p.optimizer_s)
    assert totals(plan.region_costs) == pytest.approx(whole)
    assert all(min(c.compute_s, c.exposed_s, c.optimizer_s) >= 0 for c in plan.region_costs)
    sent = {axes: sum(c.seconds for c in plan.collectives if c.axes == axes) for axes in AXES}
    hidden = sum(sent.values()) - p.communication_s
    if zero == 3:
        assert hidden > 0.5 * sent["dp",], "most of what ZeRO sends hides, nothing of tp's"
    spent = {(c.layers[0], c.region): c.exposed_s for c in plan.region_costs[:-1]}
    assert spent["transformer.h.0", "ffn"] > 0.4 * sent["tp",] / 2


def test_the_summary_has_the_table() -> None:
    plan = planned(*CASES[4][1:])
    text = " ".join(plan.summary().split())
    assert "seconds of a step by region" in text and "inputs, scalars, sends" in text
    assert (
        "seconds of a step by region"
        not in autopar.recipe(
            CASES[4][1].model, cluster(), CASES[4][1].batch, loss=CASES[4][1].loss
        ).plan.summary()
    )

"""Seconds by region: together they are the plan's, and each is who caused it."""

from collections import defaultdict
from typing import Any

import pytest
from clusters import cluster
from models import Job, classifier, deep_classifier, gpt2, llama
from moe import grouped

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
    assert exposed_s == pytest.approx(sum(c.seconds for c in plan.collectives))
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

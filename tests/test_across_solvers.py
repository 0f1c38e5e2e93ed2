"""HiGHS and CBC plan the same: each one's certificate holds for the other's plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from clusters import cluster
from families import FAMILIES
from models import Job, classifier, gpt2, llama

import autopar


@dataclass(frozen=True)
class Case:
    """A model on devices with so little memory that plans mix strategies."""

    job: Callable[[], Job]
    memory_bytes: int
    pin: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "gpt2": Case(gpt2, 350_000),
    "mlp": Case(classifier, 30_000),
    "pipeline": Case(lambda: gpt2(layers=4), 700_000, {"pp": 2}),
    "experts": Case(FAMILIES["mixtral"].tiny, 1_200_000),
    "free": Case(llama, 10**9),
}


def planned(case: Case, solver: str) -> autopar.Plan:
    """The plan by a solver."""
    job = case.job()
    spec = cluster(memory_bytes=case.memory_bytes)
    pin = dict(case.pin) or None
    return autopar.compile(job.model, spec, job.batch, loss=job.loss, pin=pin, solver=solver).plan


@pytest.mark.parametrize("name", CASES)
def test_each_solvers_certificate_holds_for_the_others_plan(name: str) -> None:
    """No bound is above what the other solver found, so that the steps differ by no more than the
    gaps say."""
    plans = [planned(CASES[name], solver) for solver in ("highs", "cbc")]
    assert [plan.certificate.solver for plan in plans] == ["highs", "cbc"]
    for one in plans:
        for other in plans:
            assert one.certificate.bound_s <= other.predicted.step_s * (1 + 1e-9)
    least, most = sorted(plan.predicted.step_s for plan in plans)
    assert most * (1 - max(plan.certificate.gap for plan in plans)) <= least * (1 + 1e-9)

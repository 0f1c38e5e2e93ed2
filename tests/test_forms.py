"""Every form of model and batch: captured identically, and equal on real processes."""

import pytest
from captured import check_same
from equality import Comparison, compiled, run
from forms import BATCHES, FROZEN, LANGUAGE
from models import float32_raised
from pool import Pool

FORMS = {**BATCHES, **FROZEN, **LANGUAGE}
CASES = [
    *((form, "dp4") for form in BATCHES),
    *((form, case) for form in FROZEN for case in ("dp2_tp2_sequence", "zero3_tp2")),
    *((form, "zero3_tp2_sequence") for form in LANGUAGE),
    ("adapters", "zero3_microbatches2"),
    ("adapters", "hybrid3"),
    ("adapters", "full_zero3"),
    ("frozen_layers", "zero3"),
    ("frozen_layers", "pp2_dp2_zero3_1f1b"),
]


@pytest.mark.parametrize("form", FORMS)
def test_captured_graphs_compute_what_the_model_does(form: str) -> None:
    """Loss, every gradient and buffer updates."""
    job = FORMS[form]()
    check_same(job.model, job.batch, job.loss)


def compare(form: str, case: str) -> Comparison:
    """A task for the pool: one form under one plan."""
    with float32_raised():
        job = FORMS[form]()
        return run(job, compiled(job, case))


@pytest.mark.parametrize(("form", "case"), CASES)
def test_equality(pool4: Pool, form: str, case: str) -> None:
    """Loss, every gradient, the norm and weights after three clipped steps; bytes as planned."""
    for comparison in pool4.run(compare, form, case):
        assert comparison.worst <= 1e-9, comparison
        assert comparison.counted == comparison.planned


@pytest.mark.parametrize("form", FROZEN)
def test_frozen_weights_have_neither_gradient_nor_state(form: str) -> None:
    """What the plan counts are the trained parameters: a gradient and AdamW's two values each."""
    job = FROZEN[form]()
    trained = sum(p.numel() for p in job.model.parameters() if p.requires_grad) * 8
    whole = sum(p.numel() for p in job.model.parameters()) * 8
    memory = compiled(job, "dp4").plan.predicted.memory
    assert memory["gradient"] == trained < whole
    assert memory["optimizer"] == 2 * trained


@pytest.mark.parametrize("form", FROZEN)
def test_frozen_weights_are_sharded_by_zero_3(form: str) -> None:
    """Each of four ranks has a quarter of all values."""
    job = FROZEN[form]()
    rows = [(-(-p.shape[0] // 4), p[0].numel()) for p in job.model.parameters()]
    memory = compiled(job, "zero3").plan.predicted.memory
    assert memory["parameter"] == 8 * sum(count * rest for count, rest in rows)

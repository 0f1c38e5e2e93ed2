"""Families that nobody tuned anything for: captured, run again, and trained in parallel."""

import contextlib

import pytest
from captured import check_same
from equality import Comparison, compiled, run
from models import float32_raised
from other_families import AS_IT_IS, OTHERS
from pool import Pool

import autopar
from autopar.graph.analyse import analyse

QUICK = [("bloom", "dp2_tp2"), ("albert", "dp2_tp2"), ("gemma2", "zero3_tp2")]
QUICK += [("mamba", "dp2_tp2"), ("whisper", "dp2_tp2_sequence"), ("swin", "dp2_tp2")]
CASES = ("dp4", "dp2_tp2", "dp2_tp2_sequence", "zero3_tp2")
NO_SEQUENCE = ("gemma2", "bloom", "deberta", "mpnet", "gpt_oss", "mamba", "swin", "convnext")
"""Their sequence isn't found: attention is written out (or there is none). BEiT has 17 patches."""
PAIRS = [(family, case) for family in OTHERS for case in CASES]
SLOW = [pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS if pair not in QUICK]
SOME = ("bloom", "falcon_grouped", "beit", "gemma2")
"""Those with ops that others lack."""


def precision(family: str) -> contextlib.AbstractContextManager[None]:
    """Casts to float32 raised to float64, where the family stands that."""
    return contextlib.nullcontext() if family in AS_IT_IS else float32_raised()


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f in SOME else pytest.mark.slow) for f in OTHERS],
)
def test_capture_and_run_again(family: str) -> None:
    """Loss, gradients and buffers are the plain model's; every op has a rule."""
    with precision(family):
        job = OTHERS[family]()
        model = analyse(check_same(job.model, job.batch, job.loss))
    assert [text for block in model.blocks for text in block.opaque.values()] == []
    assert model.mixing == ()


def compare_other(family: str, case: str) -> Comparison | str:
    """A task for the pool: one family under one case, or why that is refused."""
    with precision(family):
        job = OTHERS[family]()
        try:
            program = compiled(job, case)
        except autopar.AutoparError as error:
            return str(error)
        return run(job, program)


@pytest.mark.parametrize(("family", "case"), [*QUICK, *SLOW])
def test_equality(pool4: Pool, family: str, case: str) -> None:
    """Loss, every gradient, the norm, weights and buffers after three steps; bytes as planned. Only
    a sequence that can't be split is refused, with the reason."""
    tolerance = 1e-5 if family in AS_IT_IS else 1e-9
    for comparison in pool4.run(compare_other, family, case):
        if isinstance(comparison, str):
            assert "sequence" in case and family in (*NO_SEQUENCE, "beit"), comparison
            why = "sequence = 17 isn't divisible by 2" if family == "beit" else "no sequence dim"
            assert why in comparison, comparison
            continue
        assert isinstance(comparison, Comparison)
        errors = comparison.errors
        if family in AS_IT_IS:  # AdamW makes steps of the sign of gradients that are zero by theory
            errors.pop("weights")
        assert max(errors.values()) <= tolerance, comparison
        assert comparison.counted == comparison.planned

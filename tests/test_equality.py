"""Equality first: every emitted program against the plain model, on four processes."""

from dataclasses import replace

import pytest
from equality import EIGHT, PINS, Comparison, compare, compiled, run
from models import MODELS, Classifier, classifier, float32_raised
from pool import Pool

import autopar

TOLERANCE = 1e-9
CASES = [
    (model, case)
    for model in MODELS
    for case in (*PINS, *EIGHT)
    if model != "mlp" or not ("seq" in case or "mixed" in case)  # no sequence, no layers
]


def check(comparisons: list[object]) -> None:
    for comparison in comparisons:
        assert isinstance(comparison, Comparison)
        assert comparison.worst <= TOLERANCE, comparison
        assert comparison.counted == comparison.planned


@pytest.mark.parametrize(("model", "case"), [(m, case) for m, case in CASES if case in PINS])
def test_equality(pool4: Pool, model: str, case: str) -> None:
    """Loss, every gradient, the norm, weights after three clipped steps; bytes as planned."""
    check(pool4.run(compare, model, case))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "case"), [(m, case) for m, case in CASES if case in EIGHT])
def test_equality_on_eight(pool8: Pool, model: str, case: str) -> None:
    """The same on eight processes."""
    check(pool8.run(compare, model, case))


def compare_uneven(case: str) -> Comparison:
    """A task for the pool: layers of 6, 12 and 5 rows, which four ranks don't share evenly."""
    with float32_raised():
        job = replace(classifier(), model=Classifier(12, 6, 5).double())
        job.batch["y"].clamp_(max=4)
        return run(job, compiled(job, case))


@pytest.mark.parametrize("case", ["zero1", "zero2_microbatches2", "zero3"])
def test_shards_of_different_sizes(pool4: Pool, case: str) -> None:
    """Padding counts as bytes and changes no number."""
    check(pool4.run(compare_uneven, case))


@pytest.mark.parametrize("case", [case for case in PINS if "sequence" in case])
def test_sequence_is_legal_nowhere_in_an_mlp(case: str) -> None:
    """A pin that no region can satisfy is an error with the refusals."""
    with pytest.raises(autopar.AutoparError, match="'sequence' is pinned, but legal in no region"):
        compiled(MODELS["mlp"](), case)

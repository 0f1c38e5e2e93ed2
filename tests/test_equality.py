"""Equality first: every emitted program against the plain model, on four processes."""

import pytest
from equality import PINS, Comparison, compare, compiled
from models import MODELS
from pool import Pool

import autopar

TOLERANCE = 1e-9
CASES = [
    (model, case) for model in MODELS for case in PINS if not (model == "mlp" and "seq" in case)
]


@pytest.mark.parametrize(("model", "case"), CASES)
def test_equality(pool4: Pool, model: str, case: str) -> None:
    """Loss, every gradient, the norm, weights after three clipped steps; bytes as planned."""
    for comparison in pool4.run(compare, model, case):
        assert isinstance(comparison, Comparison)
        assert comparison.worst <= TOLERANCE, comparison
        assert comparison.counted == comparison.planned


@pytest.mark.parametrize("case", [case for case in PINS if "sequence" in case])
def test_sequence_is_legal_nowhere_in_an_mlp(case: str) -> None:
    """A pin that no region can satisfy is an error with the refusals."""
    with pytest.raises(autopar.AutoparError, match="'sequence' is pinned, but legal in no region"):
        compiled(MODELS["mlp"](), case)

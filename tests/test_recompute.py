"""Recompute: the same numbers, the collectives that come again, and refusals with their reasons."""

import pytest
from equality import RECOMPUTE, Comparison, compare
from models import MODELS
from pool import Pool

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

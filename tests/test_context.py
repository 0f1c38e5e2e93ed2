"""Context parallelism: the emitted module against the plain model, its faults, its refusals."""

import context
import pytest
from equality import Comparison
from pool import Pool

TOLERANCE = 1e-9


@pytest.mark.parametrize(
    ("model", "case"),
    [
        ("gpt2", "cp4_all_to_all"),
        ("gpt2", "cp4_ring"),
        ("llama", "cp4_ring"),
        ("bert", "cp4_ring"),
        ("bert", "cp4_all_to_all"),
        ("bert_padded", "cp4_ring"),
        ("bert_padded", "cp4_all_to_all"),
        ("gpt2_padded", "cp4_ring"),
    ],
)
def test_equal(pool4: Pool, model: str, case: str) -> None:
    """Loss, every gradient, the norm, weights after three clipped steps; bytes."""
    for found in pool4.run(context.compare, model, case, "cpu:4"):
        assert isinstance(found, Comparison)
        assert found.worst <= TOLERANCE, found.errors
        assert found.counted == found.planned

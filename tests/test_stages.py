"""Layers in stages: the emitted program against the plain model, on four processes."""

from collections.abc import Callable

import pytest
from equality import STAGED, Comparison, compiled, run
from models import Job, deep_classifier, float32_raised, gpt2, llama
from pool import Pool

TOLERANCE = 1e-9
MODELS: dict[str, Callable[[], Job]] = {
    "gpt2": lambda: gpt2(layers=4),  # its embedding is tied to its head
    "gpt2_uneven": lambda: gpt2(layers=3),
    "llama": lambda: llama(layers=4),
    "llama_uneven": lambda: llama(layers=3),
    "mlp": deep_classifier,
}
CASES = [
    ("gpt2", "pp4_1f1b"),
    ("llama", "pp4_gpipe"),
    ("mlp", "pp4_zero_bubble"),
    ("gpt2", "pp4_zero_bubble"),
    ("mlp", "pp4_1f1b"),
    ("gpt2", "pp2_dp2_interleaved"),
    ("llama", "pp2_dp2_interleaved"),
    ("gpt2_uneven", "pp2_tp2"),
    ("llama_uneven", "pp2_tp2"),
    ("llama", "pp2_tp2_sequence"),
    ("gpt2_uneven", "pp2_tp2_sequence"),
    *(
        (model, case)
        for case in STAGED
        if "zero" in case and "dp" in case
        for model in ("gpt2", "llama")
    ),
    ("mlp", "pp2_dp2_zero1_1f1b"),
    ("gpt2_uneven", "pp2_dp2_zero3_1f1b"),
]


def compare(model: str, case: str) -> Comparison:
    """A task for the pool: one case, on every rank."""
    with float32_raised():
        job = MODELS[model]()
        return run(job, compiled(job, case))


@pytest.mark.parametrize(("model", "case"), CASES)
def test_equality(pool4: Pool, model: str, case: str) -> None:
    """Loss, every gradient, the norm, weights after three clipped steps; bytes as planned."""
    for comparison in pool4.run(compare, model, case):
        assert isinstance(comparison, Comparison)
        assert comparison.worst <= TOLERANCE, comparison
        assert comparison.counted == comparison.planned

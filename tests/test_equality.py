"""Equality first: every emitted program against the plain model, on four processes."""

import gc
import weakref
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


def left_over(case: str) -> int:
    """A task for the pool: how many of a program's weights are there when it is gone."""
    job = classifier()
    parallel = compiled(job, case).materialize()
    parallel.train_step(parallel.shard_batch(job.batch))
    weights = [weakref.ref(leaf.value) for leaf in parallel.leaves]
    parallel.close()
    del parallel
    gc.collect()
    return sum(weight() is not None for weight in weights)


@pytest.mark.parametrize("case", ["dp4", "zero1", "zero2_microbatches2", "zero3"])
def test_nothing_is_left_of_a_program(pool4: Pool, case: str) -> None:
    """Neither weights nor groups of processes, whose threads wait for messages for ever."""
    assert pool4.run(left_over, case) == [0] * 4

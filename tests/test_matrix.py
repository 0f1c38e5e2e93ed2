"""The matrix: models under plans with every strategy and every two that can meet, each equal to the
plain model, with the bytes that its plan says."""

import random
from typing import Any

import matrix
import matrix_runs
import pytest
import torch
from matrix import MATRIX, TRAITS, pairs, traits_of, world_of
from matrix_runs import MODELS, Found
from pool import Pool

import autopar

TOLERANCE = 1e-9
FOUR = [pair for pair in MATRIX if world_of(pair[1]) == 4]
EIGHT = [pair for pair in MATRIX if world_of(pair[1]) == 8]
QUICK = random.Random(5).sample(FOUR, 6)
"""In every run."""
APART = {
    frozenset(two): reason
    for two, reason in [
        *(
            (("zero_bubble", scope), "takes the backward in two halves")
            for scope in ("regions", "layers", "groups")
        ),
        (("zero_bubble", "zero3"), r"FSDP2 \(zero 3\) has then freed"),
        (("groups", "zero3"), r"FSDP2 \(zero 3\) gathers only the last"),
    ]
}
"""Two that can't meet, and what a user is told."""


def check(found: list[Any], words: str) -> None:
    for one in found:
        assert isinstance(one, Found)
        assert one.traits == traits_of(words)
        assert one.comparison.worst <= TOLERANCE, one.comparison.errors
        assert one.comparison.counted == one.comparison.planned
        if one.token_bytes is not None:
            sent, routed = one.token_bytes
            assert sent == routed


@pytest.mark.parametrize(
    ("model", "words"),
    [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow) for pair in FOUR],
)
def test_equal_on_four(pool4: Pool, model: str, words: str) -> None:
    """Loss, every gradient, the norm, weights after three clipped steps; bytes."""
    check(pool4.run(matrix_runs.compare, model, words, timeout_s=300), words)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "words"), EIGHT)
def test_equal_on_eight(pool8: Pool, model: str, words: str) -> None:
    """The same with three axes and more."""
    check(pool8.run(matrix_runs.compare, model, words, timeout_s=300), words)


def test_the_matrix_is_whole() -> None:
    """Every model; every strategy, and every two in one plan but those that are refused; groups of
    four for each strategy that sends from rank to rank."""
    assert len(set(MATRIX)) == len(MATRIX) >= 60
    assert {model for model, _ in MATRIX} == set(MODELS)
    met = set().union(*(pairs(traits_of(words)) for _, words in MATRIX))
    one_schedule = pairs(matrix.SCHEDULES)
    assert pairs(TRAITS) - met == one_schedule | set(APART)
    fours = {"ring": "cp4", "all_to_all": "cp4", "tp": "tp4", "dp": "dp4", "expert": "ep4"}
    fours |= dict.fromkeys(matrix.SCHEDULES, "pp4")
    for trait, axis in fours.items():
        assert any(axis in words.split() and trait in traits_of(words) for _, words in MATRIX)


@pytest.mark.parametrize("two", APART, ids=lambda two: " + ".join(sorted(two)))
def test_what_cannot_meet_is_refused(two: frozenset[str]) -> None:
    """By the plugin that knows why."""
    schedule = two & set(matrix.SCHEDULES)
    words = " ".join(["pp2 dp2 m4" if schedule else "dp4", *two])
    job = MODELS["gpt2"]()
    with pytest.raises(autopar.AutoparError, match=APART[two]):
        matrix_runs.compiled(job, words)


@pytest.mark.parametrize(
    "model", [name for name in MODELS if name not in ("vit", "resnet", "llama_one")]
)
def test_labels_are_ignored_unevenly(model: str) -> None:
    """Over samples (data, experts, microbatches) and over the halves of a sequence (context): a
    count of a rank's own labels would be wrong."""
    batch = MODELS[model]().batch
    if "labels" not in batch:  # a regression over every element
        assert model == "transformer"
        return
    seen = batch["labels"] != -100
    for parts in (2, 4, 8):
        counts = torch.stack([part.sum() for part in seen.chunk(parts)])
        assert len(counts.unique()) > 1
    chunks = torch.stack([part.sum() for part in seen.chunk(4, dim=1)])
    assert chunks[0] + chunks[3] != chunks[1] + chunks[2]

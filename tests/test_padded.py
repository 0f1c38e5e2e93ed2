"""Vocabularies, heads and widths that tp doesn't divide: ranks hold equal pieces of them, the last
ones padded."""

from typing import Any

import pytest
import torch
from equality import OFF, STRATEGIES, Comparison, Edit, compiled, edited, planned_as, run
from families import FAMILIES
from models import float32_raised
from more_models import ODD
from pool import Pool

import autopar
from autopar.capture import capture
from autopar.graph.analyse import analyse
from autopar.inspection import figures
from autopar.runtime import TrainingModule

TOLERANCE = 1e-9
CASES = [
    ("odd_gpt2", "tp4"),
    ("odd_gpt2", "dp2_tp2_sequence"),
    ("odd_gpt2", "zero3_tp2"),
    ("odd_gpt2", "pp2_tp2_sequence"),
    ("five_words", "tp4_sequence"),
    ("odd_llama", "dp2_tp2_microbatches2"),
    ("odd_llama", "zero2_tp2_microbatches2"),
    ("odd_bert", "zero1_tp2"),
    ("odd_qwen3", "dp2_tp2_sequence"),
]
PINS: dict[str, dict[str, Any]] = {
    "dp2_tp2_microbatches2": {"dp": 2, "tp": 2, "microbatches": 2},
    "zero2_tp2_microbatches2": {"dp": 2, "tp": 2, "zero": 2, "microbatches": 2},
}
EVERY = ["tp4", "tp4_sequence", "dp2_tp2", "dp2_tp2_sequence", "pp2_tp2", "pp2_tp2_sequence"]
EVERY += [f"zero{stage}_tp2{how}" for stage in (1, 2, 3) for how in ("", "_sequence")]
SLOW = [(model, case) for model in ODD for case in EVERY if (model, case) not in CASES]


def planned(model: str, case: str) -> autopar.Compiled:
    """One model under one case."""
    job = ODD[model]()
    if case not in PINS:
        return compiled(job, case)
    return planned_as(job, "cpu:4", STRATEGIES, {**OFF, "tensor": True, **PINS[case]})


def compare_odd(model: str, case: str, edits: tuple[Edit, ...] = ()) -> Comparison:
    """A task for the pool: one case, on every rank."""
    with float32_raised():
        return run(ODD[model](), edited(planned(model, case), edits))


@pytest.mark.parametrize(
    ("model", "case"), [*CASES, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
)
def test_equality(pool4: Pool, model: str, case: str) -> None:
    """Loss, every gradient, the norm, weights after three clipped steps; bytes as planned."""
    for comparison in pool4.run(compare_odd, model, case):
        assert isinstance(comparison, Comparison)
        assert comparison.worst <= TOLERANCE, comparison
        assert comparison.counted == comparison.planned


@pytest.mark.parametrize("model", ["odd_gpt2", "five_words"])
def test_padding_that_counts_as_words_is_seen(pool4: Pool, model: str) -> None:
    """Scores of the padding are 0, so that they would be likely words."""
    fault = (Edit(r"\n +classes=vocab,", ""),)
    worst = [c.worst for c in pool4.run(compare_odd, model, "tp4", fault)]
    assert min(worst) > 1e-4


def padding(model: str) -> float:
    """A task for the pool: the largest number in the padding of weights, gradients and state after
    some steps."""
    with float32_raised():
        job, program = ODD[model](), planned(model, "tp4")
        parallel: TrainingModule = program.materialize()
        for _ in range(2):
            parallel.train_step(parallel.shard_batch(job.batch))
        parallel.forward_backward(parallel.shard_batch(job.batch))
        (leaf,) = [leaf for leaf in parallel.leaves if leaf.name == "transformer.wte.weight"]
        vocab, rows = leaf.declaration.shape[0], len(leaf.value)
        real = min(max(vocab - parallel.mesh["tp"].rank * rows, 0), rows)
        assert leaf.grad is not None
        tensors = [leaf.value.detach(), leaf.grad]
        tensors += [v for v in parallel.optimizer.state[leaf.value].values() if v.ndim]
        assert len(tensors) == 4
        largest = max(float(t[real:].abs().sum()) for t in tensors)
        parallel.close()
    return largest


def test_padding_stays_zero(pool4: Pool) -> None:
    """So it changes neither norm nor state, and a checkpoint may leave it out."""
    assert pool4.run(padding, "five_words") == [0.0] * 4


def test_odd_dims_are_padded() -> None:
    """Words, heads and the mlp's width."""
    job = ODD["odd_gpt2"]()
    graph = analyse(capture(job.model, job.batch, None))
    vocab = graph.skeleton.region("vocab")
    assert [(d.name, d.size) for d in vocab.dims if d.pads] == [("vocab", 127)]
    layer = [d for region in graph.blocks[1].regions for d in region.dims if d.pads]
    assert [(d.name, d.size) for d in layer] == [("heads", 5), ("ffn", 37)]


@pytest.mark.parametrize("size", ["gpt2-124M", "gpt2-xl"])
def test_share_of_parameters_that_two_devices_split(size: str) -> None:
    """50,257 words, and 25 heads: all but norms, positions and biases."""
    job = FAMILIES["gpt2"].full[size]()
    assert figures(analyse(capture(job.model, job.batch, job.loss))).splittable_share >= 0.99


class Softened(torch.nn.Module):
    """Scores that are summed up before the loss: padding would count."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 7), torch.nn.Linear(7, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features, contracted over the odd dim."""
        out: torch.Tensor = self.down(self.up(x).cosh())
        return out


def test_a_dim_that_is_summed_over_is_not_padded() -> None:
    """cosh(0) is 1: refused with the sizes."""
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    with pytest.raises(autopar.AutoparError, match=r"ffn = 7 isn't divisible by tp = 2"):
        autopar.compile(
            Softened(),
            "cpu:2",
            batch,
            loss=lambda out, given: torch.nn.functional.mse_loss(out, given["y"]),
            pin={"tp": 2},
        )

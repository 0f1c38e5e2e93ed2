"""Layers that torch can't export: their own code runs, on the parameters of the emitted module."""

import functools
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from equality import CLIP_NORM, OFF, Comparison, Edit, compiled, edited, run
from models import float32_raised
from opaque_models import OPAQUE, Clipped, Judging, job
from pool import Pool
from test_equality import check
from test_faults import RED, worst_of
from torch import Tensor, nn

import autopar


def compare(name: str, case: str, edits: tuple[Edit, ...] = ()) -> Comparison:
    """A task for the pool."""
    with float32_raised(), warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.OpaqueWarning)
        made = OPAQUE[name]()
        return run(made, edited(compiled(made, case), edits))


@pytest.mark.parametrize(
    ("model", "case"),
    [
        ("layer", "dp4"),
        ("layer", "zero1_microbatches2"),
        ("layer", "zero2"),
        ("layer", "zero3"),
        ("layer", "zero3_tp2"),
        ("gate", "zero3"),
        ("gate", "dp2_tp2"),
        ("judging", "dp4"),
        ("normed", "dp4"),
        ("idle", "dp4"),
        ("idle", "zero1_microbatches2"),
        ("idle", "zero2"),
        ("idle", "zero3"),
        ("idle", "dp2_tp2"),
    ],
)
def test_equality(pool4: Pool, model: str, case: str) -> None:
    """A rank's samples through the model's own code; layers that mix samples run on all of them."""
    check(pool4.run(compare, model, case))


def compare_on_two(stage: int) -> Comparison:
    """A task for the pool of two."""
    with float32_raised(), warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.OpaqueWarning)
        made = OPAQUE["layer"]()
        pin = {**OFF, "dp": 2, "zero": stage or False}
        program = autopar.compile(
            made.model,
            "cpu:2",
            made.batch,
            loss=made.loss,
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
            clip_norm=CLIP_NORM,
            pin={k: v for k, v in pin.items() if not k.startswith("wide")},
        )
        return run(made, program)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equality_on_two(pool2: Pool, stage: int) -> None:
    check(pool2.run(compare_on_two, stage))


def test_fault_is_seen(pool4: Pool) -> None:
    """Without the sum of one gradient over dp only that parameter, and what follows, is wrong."""
    edit = Edit(r'("other\.weight", 12, 12), sums=\("dp",\)', r"\1")
    errors = worst_of(pool4.run(compare, "layer", "dp4", (edit,)))
    for part, error in errors.items():
        red = part in ("norm", "weights") or part.endswith("other.weight")
        assert (error > RED) == red, (part, errors)


class Watching(Clipped):
    """Independent for the small runs, which stay far below the threshold."""

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, sequence, hidden]."""
        return super().forward(x) + (x.mean() if bool((x > 100).any()) else 0)


def watch() -> str:
    """A task for the pool: the first batch is beyond the threshold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.OpaqueWarning)
        made = job(Watching())
        program = compiled(made, "dp4")
        parallel = program.materialize()
        with torch.no_grad():
            made.model.embed.weight.mul_(1e6)  # type: ignore[union-attr, operator]
        parallel.load_from_rank0(made.model)
        try:
            parallel.forward_backward(parallel.shard_batch(made.batch))
        except autopar.AutoparError as error:
            return str(error)
        return "nothing was raised"


def test_first_batch_is_checked(pool4: Pool) -> None:
    for text in pool4.run(watch):
        assert "the layer layers.0 (Watching) treats samples together" in text, text


def test_plan_and_warning_name_layer_and_line() -> None:
    pattern = r"(?s)Clipped \(layers\.1\): .*opaque_models\.py:\d+ can't be exported"
    with pytest.warns(autopar.OpaqueWarning, match=pattern):
        program = compiled(OPAQUE["layer"](), "dp4")
    assert any(text.startswith("Clipped runs its own code") for text in program.plan.assumptions)
    assert program.plan.predicted.memory["saved"] > 0
    with pytest.raises(autopar.AutoparError, match=r"opaque_models\.py:.*depends on other"):
        compiled(OPAQUE["judging"](), "dp4_microbatches2")


def test_meta_model_is_planned_alike() -> None:
    """Weights are drawn, one layer at a time."""
    made = OPAQUE["layer"]()
    meta = replace(made, model=made.model.to("meta"))
    with pytest.warns(autopar.OpaqueWarning):
        program = compiled(meta, "dp4")
    assert "samples are independent" in program.plan.opaque[-1]
    assert all(parameter.is_meta for parameter in meta.model.parameters())


class Noisy(Clipped):
    """Random numbers beside dropout, and Python on values."""

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, sequence, hidden]."""
        return super().forward(x) + 0.1 * torch.randn_like(x)


class Random(nn.Module):
    """Random numbers by an op without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, sequence, hidden]."""
        return nn.functional.rrelu(self.linear(x), training=True)


@pytest.mark.parametrize(("layer", "what"), [(Noisy, "own code"), (Random, "aten.rrelu")])
def test_random_numbers_for_all_samples_are_refused(layer: type[nn.Module], what: str) -> None:
    """Ranks along dp draw different ones: replicas of the layer would drift apart."""
    with pytest.raises(autopar.AutoparError, match=rf"different random numbers for .*{what}"):
        compiled(job(layer()), "dp4")


class Shifting(nn.Module):
    """What it returns has as many rows as the values say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, sequence, hidden]."""
        result: Tensor = self.linear(x[x.mean((1, 2)) > 0])
        return result


def test_shape_that_depends_on_values_is_an_error() -> None:
    with pytest.raises(autopar.AutoparError, match=r"layers\.0 \(Shifting\)"):
        compiled(job(Shifting()), "dp4")


SCRIPT = """
import sys, warnings
sys.path[:0] = {paths!r}
warnings.simplefilter("ignore")
import torch, autopar
from opaque_models import OPAQUE
job = OPAQUE["layer"]()
program = autopar.load(sys.argv[1], job.model, loss=job.loss)
parallel = program.materialize()
expected = job.loss(job.model(job.batch["ids"]), job.batch)
print(abs(float(parallel.evaluate(job.batch)) - float(expected)) < 1e-12)
"""


def test_loaded_in_a_fresh_process(tmp_path: Path) -> None:
    made = OPAQUE["layer"]()
    with pytest.warns(autopar.OpaqueWarning):
        autopar.compile(made.model, "cpu:1", made.batch, loss=made.loss).save(tmp_path)
    script = SCRIPT.format(paths=[str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "True"


def test_program_needs_the_model() -> None:
    from autopar.runtime import TrainingModule, run_program

    made = job(Judging())
    with pytest.warns(autopar.OpaqueWarning):
        program = autopar.compile(made.model, "cpu:1", made.batch, loss=made.loss)
    parallel = TrainingModule(run_program(program.source))
    parallel.load_from_rank0(made.model)
    with pytest.raises(autopar.AutoparError, match="pass the model"):
        parallel.evaluate(made.batch)

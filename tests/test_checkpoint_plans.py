"""Checkpoints across plans that the compiler made, in float64, optimizer included."""

import functools
from pathlib import Path

import pytest
import torch
from checkpoints import Whole, differences, whole
from equality import CLIP_NORM, PINS, compiled
from models import MODELS, float32_raised
from more_models import ODD
from pool import Pool

import autopar
from autopar.runtime import TrainingModule, run_program

TOLERANCE = 1e-9
PLANS = ("dp4", "tp4", "dp2_tp2_sequence", "zero3", "zero3_tp2", "dp4_microbatches2")
WITHOUT_SEQUENCE = {"dp2_tp2_sequence": "dp2_tp2"}
"""An MLP has no sequence."""
BEFORE, AFTER = 3, 10
"""Steps before the save and after."""

Found = tuple[Whole, list[float]]


def plans(model: str) -> list[str]:
    return [WITHOUT_SEQUENCE.get(plan, plan) if model == "mlp" else plan for plan in PLANS]


def start(program: autopar.Compiled) -> TrainingModule:
    """A program without weights, as on a meta model."""
    return TrainingModule(
        run_program(program.source), optimizer=program.optimizer, clip_norm=program.clip_norm
    )


def train(parallel: TrainingModule, batch: dict[str, torch.Tensor], steps: int) -> list[float]:
    local = parallel.shard_batch(batch)
    return [parallel.train_step(local).loss.item() for _ in range(steps)]


def across(model: str, sources: list[str], targets: list[str], folder: Path) -> tuple[int, float]:
    """How many loads, and the largest difference of a loss; anything but equal bits raises."""
    with float32_raised():
        job = {**MODELS, **ODD}[model]()
        programs = {plan: compiled(job, plan) for plan in dict.fromkeys(sources + targets)}
        loads, worst = 0, 0.0
        for source in sources:
            parallel = programs[source].materialize()
            train(parallel, job.batch, BEFORE)
            parallel.save_checkpoint(folder / source)
            expected = whole(parallel)
            uninterrupted = train(parallel, job.batch, AFTER)
            parallel.close()
            assert len(expected.state) >= 3 * len(expected.weights) - 3
            assert len(set(uninterrupted)) == AFTER, "a loss that stands still shows nothing"
            for target in targets:
                again = start(programs[target])
                again.load_checkpoint(folder / source)
                assert not (wrong := differences(whole(again), expected)), (source, target, wrong)
                found = train(again, job.batch, AFTER)
                again.close()
                loads += 1
                worst = max(worst, *(abs(a - b) for a, b in zip(found, uninterrupted, strict=True)))
    return loads, worst


@pytest.mark.parametrize(
    ("model", "source", "target"),
    [("gpt2", "zero3_tp2", "tp4"), ("mlp", "dp2_tp2", "zero3"), ("odd_gpt2", "dp2_tp2", "tp4")],
)
def test_one_plan_to_another(
    pool4: Pool, tmp_path: Path, model: str, source: str, target: str
) -> None:
    for loads, worst in pool4.run(across, model, [source], [target], tmp_path, timeout_s=400):
        assert loads == 1 and worst <= TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("model", ["gpt2", "mlp"])
def test_each_plan_to_each(pool4: Pool, tmp_path: Path, model: str) -> None:
    """Weights and optimizer state equal bit for bit, the next ten losses as uninterrupted."""
    names = plans(model)
    results = pool4.run(across, model, names, names, tmp_path, timeout_s=1800)
    for loads, worst in results:
        print(f"{model}: {loads} loads, losses within {worst:.1e}")
        assert loads == 36 and worst <= TOLERANCE


# ---------------------------------------------------------------- other numbers of processes


def pinned(model: str, processes: int) -> autopar.Compiled:
    """A job for fewer processes: tensor parallel over all."""
    job = {**MODELS, **ODD}[model]()
    tensor = {"tp": processes, "tensor": True} if processes > 1 else {}
    return autopar.compile(
        job.model,
        f"cpu:{processes}",
        job.batch,
        loss=job.loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        clip_norm=CLIP_NORM,
        strategies=("data", "sequence", "tensor", "zero"),
        pin={"sequence": False, "zero": False, "microbatches": 1, **tensor},
    )


def saved_on_four(model: str, folder: Path) -> Found:
    with float32_raised():
        job = {**MODELS, **ODD}[model]()
        parallel = compiled(job, "zero3_tp2").materialize()
        train(parallel, job.batch, BEFORE)
        parallel.save_checkpoint(folder)
        found = whole(parallel), train(parallel, job.batch, AFTER)
        parallel.close()
    return found


def loaded_on(model: str, processes: int, folder: Path) -> Found:
    with float32_raised():
        job = {**MODELS, **ODD}[model]()
        parallel = start(pinned(model, processes))
        parallel.load_checkpoint(folder)
        return whole(parallel), train(parallel, job.batch, AFTER)


@pytest.mark.parametrize(
    "model",
    ["odd_gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "mlp"))],
)
def test_saved_on_four_loaded_on_two_and_on_one(
    pool4: Pool, pool2: Pool, tmp_path: Path, model: str
) -> None:
    (expected, uninterrupted), *_ = pool4.run(saved_on_four, model, tmp_path, timeout_s=400)
    on_two = pool2.run(loaded_on, model, 2, tmp_path, timeout_s=400)
    for found, losses in (*on_two, loaded_on(model, 1, tmp_path)):
        assert not differences(found, expected)
        assert max(abs(a - b) for a, b in zip(losses, uninterrupted, strict=True)) <= TOLERANCE


def test_the_plans_exist() -> None:
    assert set(PLANS) <= PINS.keys() and len(set(plans("mlp"))) == len(set(PLANS)) == 6

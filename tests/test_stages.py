"""Layers in stages: the emitted program against the plain model, on four processes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import edits
import pytest
import torch
from equality import STAGED, Comparison, Edit, compiled, edited, run
from families import FAMILIES
from models import Job, classifier, deep_classifier, float32_raised, gpt2, llama
from pool import Pool

import autopar
from autopar.runtime import run_program, training

TOLERANCE = 1e-9
MODELS: dict[str, Callable[[], Job]] = {
    "gpt2": lambda: gpt2(layers=4),  # its embedding is tied to its head
    "gpt2_uneven": lambda: gpt2(layers=3),
    "llama": lambda: llama(layers=4),
    "llama_uneven": lambda: llama(layers=3),
    "mlp": deep_classifier,
    "t5": FAMILIES["t5"].tiny,  # its encoder's output and its embedding are used in many parts
    "mixtral": FAMILIES["mixtral"].tiny,
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
    ("t5", "pp2_tp2"),
    ("t5", "pp4_1f1b"),
    ("t5", "pp2_dp2_zero1_zero_bubble"),
    ("mixtral", "pp2_tp2"),
    *(("gpt2", case) for case in STAGED if STAGED[case].get("recompute")),
    ("llama_uneven", "pp2_dp2_1f1b_full"),
    ("llama_uneven", "pp2_dp2_1f1b_groups"),
    ("llama", "pp2_dp2_zero3_selective"),
    ("t5", "pp2_tp2_full"),
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


def run_edited(model: str, case: str, edits: tuple[Edit, ...]) -> Comparison:
    """A task for the pool: a case with its source edited."""
    with float32_raised():
        job = MODELS[model]()
        return run(job, edited(compiled(job, case), edits))


def test_another_schedule_gives_the_same(pool4: Pool) -> None:
    """What a stage does first changes no number."""
    edit = Edit(r"one_forward_one_backward", "gpipe", 2)
    for comparison in pool4.run(run_edited, "gpt2", "pp4_1f1b", (edit,)):
        assert comparison.worst <= TOLERANCE


# ---------------------------------------------------------------- edited plans


def moved(plan: autopar.Plan) -> autopar.Plan:
    """The second layer on the other stage."""

    def move(data: Any) -> None:
        first, second = data["schedule"]["parts"]
        if len(first) == 1:
            first.append(second.pop(0))
        else:
            second.insert(0, first.pop())

    return edits.edited(plan, move)


def compare_moved(model: str, case: str) -> Comparison:
    """A task for the pool: a plan whose cut was changed by hand."""
    with float32_raised():
        job = MODELS[model]()
        made = compiled(job, case)
        plan = moved(made.plan)
        again = autopar.emit(
            *(job.model, plan),
            loss=job.loss,
            optimizer=made.optimizer,
            clip_norm=made.clip_norm,
        )
        assert again.plan.schedule is not None and plan.schedule is not None
        assert again.plan.schedule.parts == plan.schedule.parts != made.plan.schedule.parts  # type: ignore[union-attr]
        return run(job, again)


def test_layers_moved_by_hand(pool4: Pool) -> None:
    for comparison in pool4.run(compare_moved, "gpt2_uneven", "pp2_tp2"):
        assert comparison.worst <= TOLERANCE, comparison
        assert comparison.counted == comparison.planned


def _schedule(**changes: Any) -> Any:
    return lambda data: data["schedule"].update(changes)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data["schedule"]["parts"][0].pop(), "must hold every layer once"),
        (lambda data: data["schedule"]["parts"].reverse(), "must hold every layer once"),
        (_schedule(name="2f2b"), "no strategy at hand offers the plan's schedule 2f2b"),
        (_schedule(axis="dp"), "no strategy at hand offers the plan's schedule 1f1b"),
        (_schedule(options={"stages": 2, "microbatches": 8}), "microbatches 8.*: there are gpipe"),
        (lambda data: data.update(schedule=None), "the plan has pp = 2, but no schedule"),
    ],
)
def test_an_illegal_edit_is_an_error(edit: Any, message: str) -> None:
    job = MODELS["gpt2_uneven"]()
    plan = edits.edited(compiled(job, "pp2_tp2").plan, edit)
    with pytest.raises(autopar.AutoparError, match=message):
        autopar.emit(job.model, plan)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"pp": 4}, "3 repeated layers are too few for 4 stages along pp"),
        ({"pp": 2, "schedule": "2f2b"}, "no schedule '2f2b' for it: there are gpipe, 1f1b, zero"),
        ({"pp": 1, "schedule": "1f1b"}, "the schedule '1f1b' is pinned, but pp has size 1"),
        ({"pp": 2, "pipeline": False}, "'pipeline' is off, but pp = 2"),
        ({"pp": 2, "schedule": "interleaved"}, "3 repeated layers are too few for 2 stages of 2"),
        (
            {"pp": 2, "dp": 2, "zero": 3, "schedule": "zero_bubble"},
            r"'zero' is pinned, but legal in no region.*FSDP2 \(zero 3\) has then freed",
        ),
        (
            {"pp": 2, "schedule": "zero_bubble", "recompute": "full"},
            r"'recompute' is pinned, but legal in no region.*takes the backward in two halves",
        ),
        (
            {"pp": 2, "schedule": "1f1b", "recompute": {"scope": "full", "together": 3}},
            r"3 layers that run again together would lie in different parts of 1f1b: 3 layers can",
        ),
        ({"schedule": 1}, "pin 'schedule': 1 is not the name of a schedule"),
        ({"pp": 2, "pipeline": {"chunks": 1}}, "chunks 1: an interleaved stage has at least 2"),
        ({"pp": 2, "pipeline": "2f2b"}, "there is no schedule '2f2b': there are gpipe, 1f1b"),
    ],
)
def test_refusals(pin: dict[str, Any], message: str) -> None:
    job = MODELS["gpt2_uneven"]()
    with pytest.raises(autopar.AutoparError, match=message):
        autopar.compile(job.model, "cpu:4", job.batch, pin={"microbatches": 4, **pin})


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_layers_that_run_again_together_lie_in_one_stage(schedule: str) -> None:
    """Groups of two and one of five layers: a cut after three would be even. By hand neither."""
    job = gpt2(layers=5)
    again = {"scope": "full", "together": 2}
    pin = {"pp": 2, "microbatches": 4, "schedule": schedule, "recompute": again}
    plan = autopar.compile(job.model, "cpu:2", job.batch, pin=pin).plan
    assert plan.schedule is not None
    assert sorted(len(part) for part in plan.schedule.parts) in ([2, 3], [1, 4])
    assert len(plan.schedule.parts[0]) in (2, 4)
    with pytest.raises(autopar.AutoparError, match=r"run again together.*in parts 0 to 1"):
        autopar.emit(job.model, moved(plan))


def test_groups_are_priced_as_they_run() -> None:
    """Less is saved for a microbatch than by single layers, and more is there again at once."""
    job, memory = gpt2(layers=8), []
    for together in (1, 2, 4):
        again = {"scope": "full", "together": together}
        pin = {"pp": 2, "microbatches": 4, "schedule": "gpipe", "recompute": again}
        memory.append(autopar.compile(job.model, "cpu:2", job.batch, pin=pin).plan.predicted.memory)
    assert memory[0]["saved"] > memory[1]["saved"] > memory[2]["saved"]
    assert memory[0]["transient"] < memory[2]["transient"]


def test_why_no_cut_is_left() -> None:
    """What is found after a setting was opened is told as well."""
    job = MODELS["t5"]()
    pin = {"pp": 2, "microbatches": 4, "schedule": "interleaved"}
    with pytest.raises(autopar.AutoparError, match=r"shared.weight is used in parts 0, 2, 3"):
        autopar.compile(job.model, "cpu:2", job.batch, pin=pin)


def test_a_model_without_layers() -> None:
    job = classifier()
    with pytest.raises(autopar.AutoparError, match="0 repeated layers are too few for 2 stages"):
        autopar.compile(job.model, "cpu:2", job.batch, loss=job.loss, pin={"pp": 2})


# ---------------------------------------------------------------- checkpoints, dropout


def across(source: str, targets: tuple[str, ...], folder: Path) -> float:
    """A task for the pool: the largest difference of a loss after a load under another plan."""
    with float32_raised():
        job = MODELS["gpt2"]()
        parallel = compiled(job, source).materialize()
        local = parallel.shard_batch(job.batch)
        for _ in range(2):
            parallel.train_step(local)
        parallel.save_checkpoint(folder / source)
        saved = {name: tensor.clone() for name, tensor in parallel.full_state_dict().items()}
        wanted = [parallel.train_step(local).loss.item() for _ in range(3)]
        parallel.close()
        worst = 0.0
        for target in targets:
            made = compiled(job, target)
            again = training.TrainingModule(
                run_program(made.source), optimizer=made.optimizer, clip_norm=made.clip_norm
            )
            again.load_checkpoint(folder / source)
            state = again.full_state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())
            local = again.shard_batch(job.batch)
            losses = [again.train_step(local).loss.item() for _ in range(3)]
            worst = max(worst, *(abs(a - b) / b for a, b in zip(losses, wanted, strict=True)))
            again.close()
        return worst


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("pp2_tp2", ("dp4", "pp4_1f1b", "pp2_dp2_zero3_interleaved")),
        ("zero3_tp2", ("pp2_tp2", "pp2_dp2_zero1_zero_bubble")),
    ],
)
def test_checkpoints_across_plans(
    pool4: Pool, tmp_path: Path, source: str, targets: tuple[str, ...]
) -> None:
    """Saved under stages and loaded without, and the reverse: same weights, same losses."""
    assert max(pool4.run(across, source, targets, tmp_path)) <= TOLERANCE


def dropout_losses(folder: Path) -> tuple[list[float], list[float], float]:
    """A task for the pool: losses of a run, of one that goes on from its checkpoint, and the loss
    without dropout."""
    job = gpt2(layers=4, dropout=0.2)
    made = compiled(job, "pp2_dp2_zero1_1f1b")
    parallel = made.materialize()
    local = parallel.shard_batch(job.batch)
    plain = parallel.evaluate(local).item()
    parallel.train_step(local)
    parallel.save_checkpoint(folder)
    losses = [parallel.train_step(local).loss.item() for _ in range(3)]
    parallel.close()
    again = made.materialize()
    again.load_checkpoint(folder)
    resumed = [again.train_step(local).loss.item() for _ in range(3)]
    again.close()
    return losses, resumed, plain


def test_dropout_goes_on_where_it_was(pool4: Pool, tmp_path: Path) -> None:
    """Each stage and data rank has a stream of its own, and a checkpoint has all of them."""
    found: list[Any] = pool4.run(dropout_losses, tmp_path)
    for losses, resumed, plain in found:
        assert losses == resumed and plain not in losses
        assert (losses, plain) == (found[0][0], found[0][2])
    streams = {key for file in tmp_path.rglob("*.json") for key in _keys(file) if "random/" in key}
    assert {key.split("/")[1] for key in streams} == {"0", "1", "2", "3"}


def _keys(file: Path) -> set[str]:
    return set(re.findall(r'"(random/\d+/\w+)"', file.read_text(encoding="utf-8")))


def test_recomputed_layers_keep_their_inputs_alone() -> None:
    """For every microbatch in flight; what a layer makes again is there once."""
    job = MODELS["gpt2"]()
    pins = {"pp": 2, "tp": 1, "microbatches": 8, "schedule": "gpipe"}
    kept, again = (
        autopar.compile(job.model, "cpu:2", job.batch, pin={**pins, "recompute": recompute}).plan
        for recompute in (False, "full")
    )
    assert kept.schedule == again.schedule
    # 8 samples in flight · 2 layers · positions · hidden · 8 bytes
    inputs = 8 * 2 * 16 * 32 * 8
    assert inputs < again.predicted.memory["saved"] < 0.5 * kept.predicted.memory["saved"]
    assert again.predicted.memory["transient"] > kept.predicted.memory["transient"]
    assert again.predicted.compute_s > kept.predicted.compute_s


# ---------------------------------------------------------------- the choice


def test_the_fastest_schedule_is_chosen() -> None:
    """Left open, every schedule is a candidate, and none is faster by its own plan."""
    job = MODELS["gpt2"]()
    free = autopar.compile(job.model, "cpu:2", job.batch, pin={"pp": 2, "microbatches": 4}).plan
    assert free.schedule is not None
    tried = {free.schedule.name, *(other.schedule.split()[0] for other in free.alternatives)}
    assert tried == {"gpipe", "1f1b", "zero_bubble", "interleaved"}
    for name in sorted(tried):
        pin = {"pp": 2, "microbatches": 4, "schedule": name}
        alone = autopar.compile(job.model, "cpu:2", job.batch, pin=pin).plan
        assert alone.schedule is not None and alone.schedule.name == name
        assert free.predicted.step_s <= alone.predicted.step_s * (1 + 1e-3)
        assert name in alone.summary()

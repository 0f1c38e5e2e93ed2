"""Checkpoints of hand-written programs: saved under one, loaded under another."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from checkpoints import Whole, differences, whole
from pool import Pool
from torch import nn
from toy_programs import (
    CLIP_NORM,
    HEADER,
    PROGRAMS,
    adamw,
    batch,
    load,
    loaded,
    one_process,
    plain_model,
)

from autopar.runtime import TrainingModule, run_program
from autopar.runtime.checkpoint import planners
from autopar.runtime.pieces import Piece, cut

TOLERANCE = 1e-9
Found = tuple[Whole, list[float]]


def empty(name: str, **options: Any) -> TrainingModule:
    """A program without weights."""
    return TrainingModule(run_program(HEADER + PROGRAMS[name]), **options)


def losses(parallel: TrainingModule, steps: int = 3) -> list[float]:
    local = parallel.shard_batch(batch())
    return [parallel.train_step(local).loss.item() for _ in range(steps)]


def saved(name: str, folder: Path, **options: Any) -> Found:
    """Trains three steps and saves; what was saved, and the losses after."""
    parallel = load(name, **options)
    losses(parallel, 3)
    parallel.save_checkpoint(folder)
    found = whole(parallel), losses(parallel)
    parallel.close()
    return found


def loaded_again(name: str, folder: Path, **options: Any) -> Found:
    parallel = empty(name, **options)
    parallel.load_checkpoint(folder)
    found = whole(parallel), losses(parallel)
    parallel.close()
    return found


def check(found: Found, expected: Found, what: str) -> list[str]:
    problems = differences(found[0], expected[0])
    worst = max(abs(a - b) for a, b in zip(found[1], expected[1], strict=True))
    problems += [f"losses differ by {worst}"] if not worst <= TOLERANCE else []
    return [f"{what}: {problem}" for problem in problems]


def in_a_ring(folder: Path) -> list[str]:
    options = {"optimizer": adamw, "clip_norm": CLIP_NORM}
    problems, names = [], list(PROGRAMS)
    for place, source in enumerate(names):
        expected = saved(source, folder / source, **options)
        assert any("exp_avg of" in name for name in expected[0].state)
        for target in (names[place - 1], names[place - 3]):
            found = loaded_again(target, folder / source, **options)
            problems += check(found, expected, f"{source} to {target}")
    return problems


def test_each_program_to_two_others(pool4: Pool, tmp_path: Path) -> None:
    """Fused weights, uneven shards, tied, frozen and unused parameters, a buffer."""
    for problems in pool4.run(in_a_ring, tmp_path):
        assert not problems, "\n".join(problems)


def in_small_chunks(folder: Path) -> tuple[list[str], int]:
    with mock.patch.object(planners, "CHUNK_BYTES", 40):
        expected = saved("dp2 tp2", folder)
    files = len(list(folder.glob("*/rank-*.safetensors")))
    return check(loaded_again("tp2 dp2 sequence zero", folder), expected, "small chunks"), files


def test_tensors_in_many_chunks_over_all_ranks(pool4: Pool, tmp_path: Path) -> None:
    for problems, files in pool4.run(in_small_chunks, tmp_path):
        assert not problems and files == 4


def test_cut() -> None:
    tensor = torch.arange(2 * 5 * 7).reshape(1, 2, 5, 7)
    again = torch.zeros(3, 4, 8, 7, dtype=tensor.dtype)
    small = list(cut(Piece((2, 1, 3, 0), tensor), 100))
    for piece in small:
        assert piece.view.nbytes <= 100
        box = zip(piece.offsets, piece.view.shape, strict=True)
        again[tuple(slice(start, start + size) for start, size in box)] += piece.view
    assert torch.equal(again[2:3, 1:3, 3:8], tensor) and again.sum() == tensor.sum()
    assert len(list(cut(Piece((), torch.zeros(())), 1))) == 1


# ---------------------------------------------------------------- optimizers


def grouped(pairs: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    named = list(pairs)
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in named if p.ndim < 2], "lr": 0.3},
        {"params": [p for _, p in named if p.ndim >= 2], "betas": (0.5, 0.7)},
    ]
    return torch.optim.Adam(groups, lr=0.01)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Adam amsgrad": partial(torch.optim.Adam, amsgrad=True, betas=(0.5, 0.7)),
    "Adam lr tensor": partial(torch.optim.Adam, lr=torch.tensor(0.01), foreach=False),
    "Adam groups": grouped,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": partial(torch.optim.SGD, weight_decay=0.1),
    "SGD momentum": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}


def every_optimizer(folder: Path) -> list[str]:
    problems = []
    for name, factory in OPTIMIZERS.items():
        expected = saved("tp2 dp2 sequence zero", folder / name, optimizer=factory)
        found = loaded_again("dp4 zero", folder / name, optimizer=factory)
        problems += check(found, expected, name)
    return problems


def test_every_optimizer(pool4: Pool, tmp_path: Path) -> None:
    for problems in pool4.run(every_optimizer, tmp_path):
        assert not problems, "\n".join(problems)


def test_learning_rate_that_a_scheduler_changed(tmp_path: Path) -> None:
    parallel = loaded()
    scheduler = torch.optim.lr_scheduler.StepLR(parallel.optimizer, 1, gamma=0.5)
    for _ in range(3):
        losses(parallel, 1)
        scheduler.step()
    parallel.save_checkpoint(tmp_path)
    again = one_process()
    (group,) = again.optimizer.param_groups
    again.load_checkpoint(tmp_path)
    assert again.optimizer.param_groups[0] is group, "a scheduler made before holds the groups"
    assert group["lr"] == 1e-3 / 8 and group["initial_lr"] == 1e-3 and again.steps == 3
    assert losses(again) == losses(parallel)


def test_saved_on_one_process_and_on_four(pool4: Pool, tmp_path: Path) -> None:
    parallel = loaded()
    losses(parallel, 3)
    parallel.save_checkpoint(tmp_path)
    expected = whole(parallel), losses(parallel)
    for found in pool4.run(loaded_again, "tp2 dp2 sequence zero", tmp_path):
        assert not check(found, expected, "one to four")
    (found, *_) = pool4.run(saved, "dp4 zero", tmp_path)
    again = one_process()
    again.load_checkpoint(tmp_path)
    assert not check((whole(again), losses(again)), found, "four to one")


# ---------------------------------------------------------------- random numbers

DROPOUT = {
    name: HEADER
    + PROGRAMS[name].replace(
        "        for layer in self.layers:",
        "        x = F.dropout(x, 0.5, self.training)\n        for layer in self.layers:",
    )
    for name in ("dp2 tp2", "tp4")
}


def with_dropout(folder: Path, source: str, target: str) -> tuple[list[float], list[list[float]]]:
    parallel = TrainingModule(run_program(DROPOUT[source]), seed=5)
    parallel.load_weights(plain_model().state_dict())
    losses(parallel, 3)
    parallel.save_checkpoint(folder)
    expected = losses(parallel)
    parallel.close()
    found = []
    for seed in (7, 8):
        again = TrainingModule(run_program(DROPOUT[target]), seed=seed)
        again.load_checkpoint(folder)
        found.append(losses(again))
        again.close()
    return expected, found


def test_random_streams_go_on(pool4: Pool, tmp_path: Path) -> None:
    """Under as many data ranks the same masks; under others new ones, the same at each load."""
    for expected, found in pool4.run(with_dropout, tmp_path / "same", "dp2 tp2", "dp2 tp2"):
        assert found == [expected, expected]
    for expected, (first, second) in pool4.run(with_dropout, tmp_path / "other", "dp2 tp2", "tp4"):
        assert first == second and first[0] != expected[0]

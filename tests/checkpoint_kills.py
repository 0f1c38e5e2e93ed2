"""Processes that save checkpoints until they are killed."""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from toy_programs import HEADER, PROGRAMS, batch, loaded

from autopar.runtime import TrainingModule, run_program

PROCESSES = 2
ZERO = PROGRAMS["dp4 zero"].replace('("dp", 4)', f'("dp", {PROCESSES})')
LARGE = "hidden, ffn, vocab, dtype = 256, 512, 1024, torch.float64"
"""So that a save writes megabytes."""
OPERATIONS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir"})
"""What Python reports to audit hooks before it does it."""


def large(mesh: str) -> TrainingModule:
    source = (HEADER + mesh).replace("hidden, ffn, vocab, dtype = 6, 8, 18, torch.float64", LARGE)
    assert LARGE in source
    return TrainingModule(run_program(source))


def fill(parallel: TrainingModule, step: int) -> None:
    """Everything that a checkpoint holds becomes the step's number."""
    parallel.steps = step
    (group,) = parallel.optimizer.param_groups
    group["lr"] = float(step)
    with torch.no_grad():
        for leaf in parallel.leaves:
            leaf.value.fill_(step)
            if leaf.declaration.trainable:
                parallel.optimizer.state[leaf.value] = {
                    "step": torch.tensor(float(step)),
                    "exp_avg": torch.full_like(leaf.value, step, requires_grad=False),
                }


def filled(parallel: TrainingModule) -> set[float]:
    """All different numbers that a loaded program holds: one, if the checkpoint is whole."""
    found = {float(parallel.steps), parallel.optimizer.param_groups[0]["lr"]}
    for leaf in parallel.leaves:
        found |= set(leaf.value.detach().unique().tolist())
        state = parallel.optimizer.state.get(leaf.value, {})
        assert len(state) == 2 * leaf.declaration.trainable, leaf.name
        for value in state.values():
            found |= set(value.unique().tolist())
    return found


def save_until_killed(rank: int, store: str, folder: Path, resume: bool, pipe: Connection) -> None:
    """Goes on from the newest checkpoint (`resume`) and saves step after step; rank 0 sends
    ("begin", step) before each save and ("saved", step) after it.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    parallel = large(ZERO)
    fill(parallel, 0)
    parallel._unloaded.clear()
    if resume:
        parallel.load_checkpoint(folder)
        assert len(filled(parallel)) == 1, filled(parallel)
    while True:
        fill(parallel, parallel.steps + 1)
        if rank == 0:
            pipe.send(("begin", parallel.steps))
        parallel.save_checkpoint(folder)
        if rank == 0:
            pipe.send(("saved", parallel.steps))


def save_and_end_at(operation: int, folder: Path) -> None:
    """Saves, but ends like a killed process before the file system's operation of this number;
    exits with 0 where there are fewer.
    """
    torch.set_num_threads(1)
    parallel = loaded()
    parallel.train_step(batch())
    parallel.steps = operation + 100
    left = operation

    def end(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        path = str(arguments[0]) if arguments else ""
        # Deleting a folder's content names it relative to the folder.
        if event in OPERATIONS and (path.startswith(str(folder)) or not os.path.isabs(path)):
            left -= 1
            if left == 0:
                os._exit(9)

    sys.addaudithook(end)
    parallel.save_checkpoint(folder)

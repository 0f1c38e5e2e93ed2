"""A kill at any moment of a save leaves the last complete checkpoint."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_kills import PROCESSES, filled, large, save_and_end_at, save_until_killed
from pool import fork_server
from toy_programs import PROGRAMS, one_process

from autopar.runtime.checkpoint.folder import complete

ONE = PROGRAMS["dp2 tp2"].replace('("dp", 2), ("tp", 2)', '("dp", 1), ("tp", 1)')


def start(folder: Path, scratch: Path) -> tuple[list[Any], Any]:
    """Two processes that save, and the pipe that rank 0 reports to."""
    server = fork_server()
    ours, theirs = server.Pipe(duplex=False)
    store = scratch / f"store{time.monotonic_ns()}"
    resume = bool(complete(folder))
    arguments = [(rank, str(store), folder, resume, theirs) for rank in range(PROCESSES)]
    processes = [server.Process(target=save_until_killed, args=one) for one in arguments]
    for process in processes:
        process.start()
    theirs.close()
    return processes, ours


def kill_in_a_save(processes: list[Any], pipe: Any, draw: random.Random) -> int:
    """Kills all, in random order, some time after a save began; returns the last step saved."""
    begun: list[float] = []
    done: list[float] = []
    saved = 0
    while len(begun) < draw.randint(2, 4) or len(done) < 1:
        assert pipe.poll(120), "no save in 120 s"
        kind, step = pipe.recv()
        (begun if kind == "begin" else done).append(time.monotonic())
        saved = step if kind == "saved" else saved
    time.sleep(draw.random() * (done[0] - begun[0]))
    for process in draw.sample(processes, len(processes)):
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()
    while pipe.poll():
        try:
            kind, step = pipe.recv()
        except EOFError:
            break
        saved = step if kind == "saved" else saved
    return saved


def kills(times: int, scratch: Path) -> int:
    """How many of the kills left a save unfinished; what is loaded after each is checked."""
    folder, draw, unfinished = scratch / "checkpoints", random.Random(0), 0
    folder.mkdir()
    for _ in range(times):
        processes, pipe = start(folder, scratch)
        saved = kill_in_a_save(processes, pipe, draw)
        unfinished += any(path.name.startswith(".") for path in folder.iterdir())
        again = large(ONE)
        again.load_checkpoint(folder)
        (number,) = filled(again)
        # The last save may have been complete before its process could say so.
        assert saved <= number <= saved + 1, (saved, number)
        assert 1 <= len(complete(folder)) <= 3
    return unfinished


def test_kills_in_the_middle_of_a_save(tmp_path: Path) -> None:
    kills(2, tmp_path)


@pytest.mark.slow
def test_twenty_kills_in_the_middle_of_a_save(tmp_path: Path) -> None:
    unfinished = kills(20, tmp_path)
    print(f"{unfinished} of 20 kills left an unfinished save")
    assert unfinished >= 10


def test_an_end_before_every_operation_of_the_file_system(tmp_path: Path) -> None:
    """Each in turn, with older checkpoints there to be deleted, until a save gets through."""
    operation = 0
    while True:
        operation += 1
        before = complete(tmp_path)
        process = fork_server().Process(target=save_and_end_at, args=(operation, tmp_path))
        process.start()
        process.join()
        assert process.exitcode in (0, 9)
        after = complete(tmp_path)
        assert len(after) >= len(before[-1:]) and after[-1:] >= before[-1:]
        for path in after:  # what looks complete is complete
            one_process().load_checkpoint(path)
        if after:
            again = one_process()
            again.load_checkpoint(tmp_path)
            step = 100 + operation if after[-1:] != before[-1:] else int(before[-1].name[-8:])
            assert again.steps == step
        if process.exitcode == 0:
            break
    assert operation > 15 and len(complete(tmp_path)) == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]

"""A pool of gloo processes for tests. Importing torch and transformers is what takes the time: a
fork server does it once for all pools of a session, and a pool is there in a moment."""

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

GRACE_S = 5.0
"""How long the other ranks may go on once one has failed."""
IMPORTED = ("autopar", "torch.distributed.fsdp", "torch.export", "transformers.modeling_utils")
"""What the fork server has imported; none of it starts a thread."""


def fork_server() -> Any:
    """A context whose processes begin with IMPORTED; one is forked in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


class PoolError(Exception):
    """A task failed or hung on some ranks; the message has their tracebacks."""


class Pool:
    """`size` processes in one gloo group; each runs a task at the same time as the others.

    A task is a top-level function of a module that can be imported by name. After a failure all
    processes are ended, and the next task gets new ones.
    """

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, task: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """What `task(*args)` returned on each rank. Errors: PoolError."""
        if not self._processes:
            self._start()
        message = pickle.dumps((task, args))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        answers = self._collect(time.monotonic() + timeout_s)
        problems = [
            f"rank {rank}: {'hung' if answer is None else answer[1]}"
            for rank, answer in enumerate(answers)
            if answer is None or not answer[0]
        ]
        if problems:
            self.close()
            raise PoolError("\n".join(problems))
        return [answer[1] for answer in answers if answer is not None]

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = fork_server()
        # Port 0: the system picks a free one, and the store keeps it.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pairs = [context.Pipe() for _ in range(self.size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(
                target=_work, args=(rank, self.size, self._store.port, theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()

    def _collect(self, deadline: float) -> list[tuple[bool, Any] | None]:
        """(succeeded, result or traceback) of each rank; None where it did not answer in time."""
        answers: list[tuple[bool, Any] | None] = [None] * self.size
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answer = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    answer = (False, "the process died")
                answers[rank] = answer
                if not answer[0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers


def _work(rank: int, size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            task, args = pickle.loads(message)
            answer = pickle.dumps((True, task(*args)))
        except Exception:  # noqa: BLE001 (reported to the test)
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)

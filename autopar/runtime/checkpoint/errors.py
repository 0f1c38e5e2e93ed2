"""What fails on one rank fails on every rank, with the same message."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from autopar.errors import AutoparError
from autopar.runtime.process_mesh import ProcessMesh

T = TypeVar("T")


def on_every_rank(mesh: ProcessMesh, work: Callable[[], T]) -> T:
    """What `work` returns here, once it has succeeded on every rank. A collective.

    Errors: AutoparError where it raised one (or an OSError) anywhere: the lowest rank's. Another
    exception is raised as it is where it happened and quoted in an AutoparError elsewhere.
    """
    failure: Exception | None = None
    result: list[T] = []
    try:
        result.append(work())
    except Exception as error:  # noqa: BLE001 (raised below, after the other ranks know)
        failure = error
    ours = None if failure is None else _message(failure)
    messages: list[str | None] = [ours]
    if mesh.world.size > 1:
        messages = [None] * mesh.world.size
        dist.all_gather_object(messages, ours, group=mesh.world.process_group)
    if failure is not None and not isinstance(failure, AutoparError | OSError):
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            where = f" (rank {rank})" if mesh.world.size > 1 else ""
            raise AutoparError(f"{message}{where}") from failure
    return result[0]


@contextmanager
def translated(what: str, advice: str) -> Iterator[None]:
    """torch's CheckpointException, which is no Exception, as an AutoparError that says what failed
    on which rank; where a rank met a fault of the program, as a RuntimeError with its traceback.
    """
    try:
        # Without a process group torch warns that it saves in a single process: so it should.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as failed:
        failures = {rank: error for rank, (error, _) in failed.failures.items()}
        for error in failures.values():
            if not isinstance(error, Exception):
                raise error from None
            if not isinstance(error, AutoparError | OSError | SafetensorError):
                raise RuntimeError(f"{what} failed: {failed}") from failed
        first = min(failures)
        raise AutoparError(
            f"{what} failed on rank {first}: {_message(failures[first])} {advice}".strip()
        ) from failed


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, AutoparError) else f"{type(error).__name__}: {error}."

"""Ranks that must hold the same: rank 0 decides, the others take it and compare hashes."""

import hashlib
from collections.abc import Callable

import torch.distributed as dist

from autopar.errors import AutoparError


def from_rank0(decide: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """What `decide` returns on rank 0, on every rank; without a process group, here.

    Rank 0's AutoparError is raised on every rank; after any other exception there the other ranks
    raise an AutoparError that quotes it. A collective.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return decide()
    message: list[object] = [None]
    if dist.get_rank() == 0:
        try:
            message = [decide()]
        except AutoparError as error:
            message = [error]
        except Exception as error:
            dist.broadcast_object_list([AutoparError(f"rank 0 failed: {error!r}")], src=0)
            raise
    dist.broadcast_object_list(message, src=0)
    (received,) = message
    if isinstance(received, AutoparError):
        raise received
    assert isinstance(received, tuple)
    check_same("\0".join(received), "plans")
    return received


def check_same(text: str, what: str) -> None:
    """Raises AutoparError on every rank unless all hold the same text. A collective; without a
    process group there is nothing to compare."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) != 1:
        held = ", ".join(f"rank {rank} {found}" for rank, found in enumerate(digests))
        raise AutoparError(
            f"the ranks hold different {what} (SHA-256: {held}): give every rank the same"
        )

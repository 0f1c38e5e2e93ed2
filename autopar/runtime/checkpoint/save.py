"""Saving: DCP writes, then one rename makes it a checkpoint."""

import shutil
from pathlib import Path

from torch.distributed.checkpoint.state_dict_saver import save

from autopar.errors import AutoparError
from autopar.runtime.agree import from_rank0
from autopar.runtime.checkpoint import folder as folders
from autopar.runtime.checkpoint.errors import translated
from autopar.runtime.checkpoint.kept import kept_parts
from autopar.runtime.checkpoint.planners import SaveParts
from autopar.runtime.checkpoint.state import Running, collect
from autopar.runtime.checkpoint.storage import Writer


def save_checkpoint(running: Running, folder: Path, keep: int) -> Path:
    """Writes a new checkpoint into `folder` and deletes all but the `keep` newest ones; returns
    where it lies. A collective.

    Errors: AutoparError, on every rank, where a rank couldn't write; what was there stays.
    """
    if keep < 1:
        raise AutoparError(f"keep must be at least 1 checkpoint, not {keep}")
    kept = kept_parts(running.kept, running.leaves, running.mesh)
    (name,) = from_rank0(lambda: (str(_begin(folder, running.step)),))
    unfinished = Path(name)
    final = folders.final(unfinished)
    mesh = running.mesh
    advice = (
        f"{final.parent} is as it was before. Every rank must be able to write there: check its "
        "permissions, the space left, and that all nodes share it."
    )
    try:
        with translated(f"Saving {final}", advice):
            save(
                {},
                storage_writer=Writer(unfinished, mesh.rank, folders.finish),
                planner=SaveParts(lambda: collect(running, kept)),
                process_group=mesh.world.process_group,
                no_dist=mesh.world.size == 1,
            )
    except BaseException:
        if mesh.rank == 0:
            # What can't be removed now is removed by the next save.
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    from_rank0(lambda: _remove_older(final, keep))
    return final


def _begin(folder: Path, step: int) -> Path:
    try:
        return folders.begin(folder, step)
    except OSError as error:
        raise AutoparError(
            f"{folder} can't hold checkpoints ({type(error).__name__}: {error}): pass a folder "
            "that rank 0 can write to."
        ) from error


def _remove_older(final: Path, keep: int) -> tuple[str, ...]:
    try:
        folders.remove_older(final.parent, keep)
    except OSError as error:
        raise AutoparError(
            f"{final} is complete, but older checkpoints couldn't be deleted "
            f"({type(error).__name__}: {error}): delete them by hand, or pass a larger keep."
        ) from error
    return ()

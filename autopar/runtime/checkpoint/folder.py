"""A folder of numbered checkpoints, of which a kill at any moment loses none.

A checkpoint is written under a name that starts with a dot, made durable, and renamed, which is one
step for the file system: a folder named like a checkpoint is complete. An old one is renamed away
before it is deleted. The names count saves first and tell the step after, since a run that was
rolled back may save a step again, and the last one saved is the newest.
"""

import os
import re
import shutil
from pathlib import Path

from autopar.errors import AutoparError

INDEX = "checkpoint.json"
NAME = re.compile(r"(\d{6,})-step-(\d{8,})")
UNFINISHED, REMOVED = ".unfinished-", ".removed-"


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first; none where there is no folder."""
    if not folder.is_dir():
        return []
    found = [
        (int(name[1]), path) for path in folder.iterdir() if (name := NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


def newest(folder: Path) -> Path:
    """The checkpoint to load: the one saved last, or `folder` itself where it is a checkpoint.

    Errors: AutoparError where there is none.
    """
    if (folder / INDEX).is_file():
        return folder
    if found := complete(folder):
        return found[-1]
    unfinished = [path.name for path in folder.glob(f"{UNFINISHED}*")] if folder.is_dir() else []
    state = "isn't a folder" if not folder.is_dir() else "holds no complete checkpoint"
    began = f" (only {', '.join(sorted(unfinished))}, cut off while it was saved)" * bool(
        unfinished
    )
    raise AutoparError(
        f"{folder} {state}{began}. Pass the folder that save_checkpoint was given, or one "
        "checkpoint in it; a plain state dict or safetensors are for load_weights."
    )


def earlier(checkpoint: Path) -> Path | None:
    """The complete checkpoint before this one, if it is still there."""
    found = complete(checkpoint.parent)
    place = found.index(checkpoint) if checkpoint in found else 0
    return found[place - 1] if place else None


def begin(folder: Path, step: int) -> Path:
    """A new folder to write a checkpoint of `step` into; what earlier kills left is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name.startswith((UNFINISHED, REMOVED)):
            shutil.rmtree(path)
    done = complete(folder)
    last = NAME.fullmatch(done[-1].name) if done else None
    number = int(last[1]) + 1 if last else 1
    unfinished = folder / f"{UNFINISHED}{number:06d}-step-{step:08d}"
    unfinished.mkdir()
    return unfinished


def final(unfinished: Path) -> Path:
    """The name that an unfinished checkpoint gets once it is complete."""
    return unfinished.with_name(unfinished.name.removeprefix(UNFINISHED))


def finish(unfinished: Path) -> None:
    """Makes the checkpoint the newest complete one. Its files must be synced already."""
    sync(unfinished)
    unfinished.rename(final(unfinished))
    sync(unfinished.parent)


def remove_older(folder: Path, keep: int) -> None:
    """Deletes all but the `keep` newest complete checkpoints."""
    for path in complete(folder)[:-keep]:
        removed = path.rename(path.with_name(f"{REMOVED}{path.name}"))
        shutil.rmtree(removed)


def sync(folder: Path) -> None:
    """Makes a folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

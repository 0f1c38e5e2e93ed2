"""From torch's exception to the layer and the line that a user can change."""

import linecache
import os
import sysconfig
from types import FrameType, TracebackType
from typing import NamedTuple

import torch
from torch import nn

from autopar.errors import AutoparError

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_STDLIB = sysconfig.get_paths()["stdlib"]


class _Frame(NamedTuple):
    frame: FrameType
    line: int


def capture_error(error: Exception, model: nn.Module, root: str) -> AutoparError:
    """An AutoparError that names the innermost layer of `model` (which sits at path `root`), its
    class and the user's line, and quotes the first line of torch's message."""
    frames = _frames(error.__traceback__)
    path, module = _innermost(frames, model, root)
    where = f"{path or 'the model'} ({type(module).__name__})"
    message = str(error).strip().splitlines()
    quoted = f"{type(error).__name__}: {message[0]}" if message else type(error).__name__
    return AutoparError(
        f"can't capture {where} at {_users_line(frames)}\n  {quoted}\n  {_advice(error)}"
    )


def _advice(error: Exception) -> str:
    if any(word in type(error).__name__ for word in ("DataDependent", "DynamicOutputShape")):
        return (
            "Models are captured without values: Python must not depend on those of tensors"
            " (.item(), if tensor:, boolean indexing). Compute with tensors instead (torch.where)."
        )
    return (
        "Check that model and batch run in plain PyTorch. If they do, it is torch.export"
        "(strict=False) that can't trace this line: write it in another way."
    )


def _frames(traceback: TracebackType | None) -> list[_Frame]:
    frames = []
    while traceback is not None:
        frames.append(_Frame(traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames


def _innermost(frames: list[_Frame], model: nn.Module, root: str) -> tuple[str, nn.Module]:
    # By __dict__, since torch.export traces through proxies that share it with the module.
    known = {
        id(module.__dict__): (".".join(p for p in (root, name) if p), module)
        for name, module in model.named_modules()
    }
    for frame, _ in reversed(frames):
        owner = frame.f_locals.get("self")
        found = known.get(id(getattr(owner, "__dict__", None)))
        if found is not None:
            return found
    return root, model


def innermost_module(error: Exception, model: nn.Module) -> tuple[str, nn.Module]:
    """The path and the module of the innermost layer that an error came through; ("", model) where
    it was no layer's."""
    return _innermost(_frames(error.__traceback__), model, "")


def users_place(error: Exception) -> str:
    """The user's line that an error came from, "model.py:12"."""
    parts = _users_line(_frames(error.__traceback__)).split(":")
    return f"{os.path.basename(parts[0])}:{parts[1]}" if len(parts) > 2 else parts[0]


def _users_line(frames: list[_Frame]) -> str:
    for frame, line in reversed(frames):
        file = frame.f_code.co_filename
        installed = file.startswith((_TORCH, _OWN)) or (
            file.startswith(_STDLIB) and "-packages" not in file
        )
        if not installed and not file.startswith("<"):
            source = linecache.getline(file, line).strip()
            return f"{file}:{line}: {source}"
    return "an unknown line"

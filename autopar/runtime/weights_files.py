"""Weights from safetensors, each rank reading its own part."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.checkpoint.folder import INDEX, complete
from autopar.runtime.leaves import Leaf
from autopar.runtime.pieces import Piece, parts_of
from autopar.runtime.process_mesh import ProcessMesh
from autopar.runtime.weights import matched
from autopar.strict_json import read_json

FILE = re.compile(r"[^/\\\0]+\.safetensors")


def load_files(leaves: Sequence[Leaf], mesh: ProcessMesh, path: Path) -> set[str]:
    """Every rank reads its parts from a safetensors file, or from a folder of them as
    `save_pretrained` leaves it; no communication. Returns the names of the leaves that were there.

    Errors: AutoparError for files that aren't safetensors, a name in two of them, names missing,
    names unknown, other shapes.
    """
    with ExitStack() as stack:
        sources: dict[str, Any] = {}
        for file in safetensors_files(path):
            opened = stack.enter_context(_opened(file))
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                if name in sources:
                    raise AutoparError(f"{name} is in two files of {path}: pass one of them")
                sources[name] = opened
        found = matched(leaves, sources.keys())
        for name, leaf in found.items():
            shape = tuple(sources[name].get_slice(name).get_shape())
            if shape != leaf.declaration.shape:
                raise AutoparError(
                    f"{name} has shape {shape} in {path}; the program's is {leaf.declaration.shape}"
                )
        with torch.no_grad():
            for name, leaf in found.items():
                for piece in parts_of(leaf, mesh, leaf.value).pieces if leaf.here else ():
                    piece.view.copy_(_read(sources[name], name, piece))
    return {leaf.name for leaf in found.values()}


def safetensors_files(path: Path) -> list[Path]:
    """The files that `path` means: itself, what the folder's one index lists, or all in the folder.

    Errors: AutoparError where there are none.
    """
    if path.is_file():
        return [path]
    if (path / INDEX).is_file() or complete(path):
        raise AutoparError(f"{path} holds checkpoints: load_checkpoint reads them")
    indices = sorted(path.glob("*.safetensors.index.json")) if path.is_dir() else []
    if len(indices) > 1:
        names = ", ".join(index.name for index in indices)
        raise AutoparError(f"{path} has several indices ({names}): pass a folder with one model")
    found = list(_listed_files(indices[0])) if indices else sorted(path.glob("*.safetensors"))
    if not found:
        raise AutoparError(f"{path} holds no safetensors: pass a file, or the folder they are in")
    return found


def _listed_files(index: Path) -> Iterator[Path]:
    data = read_json(index.read_text(encoding="utf-8"), "an index of safetensors")
    names = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(names, Mapping):
        raise AutoparError(f"{index} has no weight_map: it is no index of safetensors")
    for name in sorted(set(map(str, names.values()))):
        if not FILE.fullmatch(name):
            raise AutoparError(f"{index} lists {name!r}, which is no safetensors file beside it")
        yield index.with_name(name)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except (OSError, SafetensorError) as error:
        raise AutoparError(f"{file} can't be read as safetensors: {error}") from error


def _read(source: Any, name: str, piece: Piece) -> Tensor:
    if not piece.offsets:
        whole: Tensor = source.get_tensor(name)
        return whole
    bounds = zip(piece.offsets, piece.view.shape, strict=True)
    part: Tensor = source.get_slice(name)[tuple(slice(a, a + size) for a, size in bounds)]
    return part

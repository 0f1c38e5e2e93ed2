"""What a checkpoint says about itself: one JSON file, never code."""

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.runtime.checkpoint.folder import INDEX, earlier
from autopar.strict_json import read_json

FORMAT = "autopar checkpoint 1"
FILE = re.compile(r"rank-\d{5,}\.safetensors")
DTYPES = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.complex64: "C64",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint64: "U64",
        torch.uint32: "U32",
        torch.uint16: "U16",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)
"""The names of safetensors."""
CODES = MappingProxyType({code: dtype for dtype, code in DTYPES.items()})

Facts = Mapping[str, Any]
"""What isn't a tensor, JSON values by name."""


@dataclass(frozen=True)
class Chunk:
    """A box of a whole tensor, the file that holds it, and the CRC-32 of its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    crc32: int


@dataclass(frozen=True)
class Saved:
    """A whole tensor, in chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """A checkpoint: its tensors by key, its facts, and the size in bytes of each file."""

    tensors: Mapping[str, Saved]
    facts: Facts
    files: Mapping[str, int]


def chunk_name(key: str, offsets: tuple[int, ...]) -> str:
    """What a chunk is called inside its safetensors file."""
    return f"{key}@{','.join(map(str, offsets))}"


def corrupt(checkpoint: Path, what: str) -> AutoparError:
    """The error for a checkpoint that isn't what was written."""
    before = earlier(checkpoint)
    advice = (
        f"{before} is the one before it: pass that to load_checkpoint"
        if before
        else "there is no earlier one beside it: restore it from a copy"
    )
    return AutoparError(f"The checkpoint {checkpoint} is corrupt: {what}; {advice}.")


# ---------------------------------------------------------------- writing


def to_json(index: Index) -> str:
    """The index as text, with a checksum of itself."""
    content = {
        "format": FORMAT,
        "facts": dict(index.facts),
        "files": dict(index.files),
        "tensors": {
            key: {
                "dtype": DTYPES[saved.dtype],
                "shape": saved.shape,
                "chunks": [[c.offsets, c.sizes, c.file, c.crc32] for c in saved.chunks],
            }
            for key, saved in index.tensors.items()
        },
    }
    text = _canonical(content)
    return f'{{"crc32":{zlib.crc32(text.encode())},"content":{text}}}\n'


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


# ---------------------------------------------------------------- reading


def from_json(text: str, checkpoint: Path) -> Index:
    """The index in `text`, read from `checkpoint`. Errors: AutoparError for anything else."""
    try:
        data = read_json(text, "a checkpoint's index")
        content = data["content"]
        if data["crc32"] != zlib.crc32(_canonical(content).encode()):
            raise ValueError("its checksum differs from its content's")
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
        files = {_file(name): _number(size) for name, size in _object(content["files"]).items()}
        tensors = {key: _saved(one) for key, one in _object(content["tensors"]).items()}
        index = Index(tensors, _object(content["facts"]), files)
        _check_chunks(index)
    except (AutoparError, ValueError, TypeError, KeyError, IndexError) as error:
        reason = f"{type(error).__name__} {error}" if isinstance(error, KeyError) else str(error)
        raise corrupt(checkpoint, f"{INDEX} can't be read ({reason})") from error
    return index


def check_files(index: Index, checkpoint: Path) -> None:
    """Errors: AutoparError where a file is missing or has another size than was written."""
    for name, size in index.files.items():
        path = checkpoint / name
        if not path.is_file():
            raise corrupt(checkpoint, f"{name} ({size} bytes) is missing")
        if (found := path.stat().st_size) != size:
            raise corrupt(checkpoint, f"{name} has {found} bytes, {size} were written")


def _check_chunks(index: Index) -> None:
    """No chunk claims more than its file can hold: nothing is allocated on a stranger's word."""
    claimed = dict.fromkeys(index.files, 0)
    for key, saved in index.tensors.items():
        if not saved.chunks or (not saved.shape and len(saved.chunks) > 1):
            raise ValueError(f"{key} of shape {saved.shape} has {len(saved.chunks)} chunks")
        for chunk in saved.chunks:
            if chunk.file not in claimed:
                raise ValueError(f"{key} lies in {chunk.file!r}, which isn't among its files")
            if not len(chunk.offsets) == len(chunk.sizes) == len(saved.shape):
                raise ValueError(f"a chunk of {key} hasn't {len(saved.shape)} dims")
            claimed[chunk.file] += math.prod(chunk.sizes) * saved.dtype.itemsize
    for name, size in claimed.items():
        if size > index.files[name]:
            raise ValueError(f"chunks of {size} bytes lie in {name} of {index.files[name]} bytes")


def _saved(data: Any) -> Saved:
    chunks = [
        Chunk(_numbers(offsets), _numbers(sizes), _file(file), _number(crc32))
        for offsets, sizes, file, crc32 in data["chunks"]
    ]
    return Saved(CODES[data["dtype"]], _numbers(data["shape"]), tuple(chunks))


def _object(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{str(data)[:40]!r} should be an object")
    return data


def _file(name: Any) -> str:
    """A name of ours only: one that leads out of the folder must not be opened."""
    if not isinstance(name, str) or not FILE.fullmatch(name):
        raise ValueError(f"{str(name)[:80]!r} is no file of a checkpoint")
    return name


def _numbers(data: Any) -> tuple[int, ...]:
    if not isinstance(data, list):
        raise ValueError(f"{str(data)[:40]!r} should be a list of numbers")
    return tuple(_number(one) for one in data)


def _number(data: Any) -> int:
    if type(data) is not int or not 0 <= data < 2**63:
        raise ValueError(f"{str(data)[:40]!r} should be a whole number")
    return data

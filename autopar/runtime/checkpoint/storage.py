"""DCP's storage in safetensors: one file a rank, a tensor in it for each chunk."""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from autopar.runtime.checkpoint.folder import INDEX
from autopar.runtime.checkpoint.index import (
    DTYPES,
    Chunk,
    Index,
    Saved,
    chunk_name,
    corrupt,
    to_json,
)


class Writer(StorageWriter):
    """Writes one checkpoint into an empty folder; `finish` is called on rank 0 once all is there.

    A chunk is copied to the host, summed up and written before the next one is looked at.
    """

    def __init__(self, folder: Path, rank: int, finish: Callable[[Path], None]) -> None:
        self.folder = folder
        self.file = f"rank-{rank:05d}.safetensors"
        self._finish = finish

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to reset: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keeps the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Keeps the plans."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file, durable. Results hold (file, CRC-32)."""
        results: list[WriteResult] = []
        # The largest elements first, so that every chunk is aligned to its elements.
        items = sorted(plan.items, key=lambda item: -_dtype(item).itemsize)
        if items:
            with open(self.folder / self.file, "xb") as file:
                file.write(_header(items))
                for item in items:
                    data = _bytes(planner.resolve_data(item))
                    file.write(data)
                    place = (self.file, zlib.crc32(data))
                    results.append(WriteResult(item.index, len(data), place))
                file.flush()
                os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index, on rank 0, when every rank has written its file."""
        places = {result.index: result.storage_data for rank in results for result in rank}
        files = {file for file, _ in places.values()}
        tensors = {}
        for key, saved in metadata.state_dict_metadata.items():
            assert isinstance(saved, TensorStorageMetadata), key
            chunks = [
                Chunk(tuple(c.offsets), tuple(c.sizes), *places[MetadataIndex(key, c.offsets)])
                for c in saved.chunks
            ]
            tensors[key] = Saved(saved.properties.dtype, tuple(saved.size), tuple(chunks))
        sizes = {name: (self.folder / name).stat().st_size for name in sorted(files)}
        with open(self.folder / INDEX, "x", encoding="utf-8") as file:
            file.write(to_json(Index(tensors, metadata.planner_data, sizes)))
            file.flush()
            os.fsync(file.fileno())
        self._finish(self.folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never picked by DCP itself."""
        return False


class Reader(StorageReader):
    """Reads the chunks of one checkpoint that this rank needs, each once, one at a time."""

    def __init__(self, checkpoint: Path, index: Index, metadata: Metadata) -> None:
        self.checkpoint = checkpoint
        self.index = index
        self._metadata = metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to reset: a reader reads once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is stored, read before."""
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keeps the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Keeps the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies what the plan asks for. Errors: AutoparError for a file that was changed."""
        wanted: dict[str, dict[tuple[str, Chunk], list[ReadItem]]] = {}
        chunks = {
            (key, chunk.offsets): chunk
            for key, saved in self.index.tensors.items()
            for chunk in saved.chunks
        }
        for item in plan.items:
            assert item.storage_index.offset is not None
            key = item.storage_index.fqn
            chunk = chunks[key, tuple(item.storage_index.offset)]
            wanted.setdefault(chunk.file, {}).setdefault((key, chunk), []).append(item)
        for file, chunks_of_file in wanted.items():
            try:
                with safe_open(self.checkpoint / file, "pt") as opened:
                    for (key, chunk), items in chunks_of_file.items():
                        tensor = opened.get_tensor(chunk_name(key, chunk.offsets))
                        self._check(key, chunk, tensor)
                        for item in items:
                            _copy(tensor, item, planner)
            except SafetensorError as error:
                raise corrupt(self.checkpoint, f"{file} can't be read ({error})") from error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _check(self, key: str, chunk: Chunk, tensor: Tensor) -> None:
        dtype = self.index.tensors[key].dtype
        if tensor.dtype != dtype or tuple(tensor.shape) != chunk.sizes:
            found = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise corrupt(
                self.checkpoint,
                f"{key} in {chunk.file} is {found}, not {chunk.sizes} {dtype}",
            )
        if zlib.crc32(_bytes(tensor)) != chunk.crc32:
            raise corrupt(
                self.checkpoint,
                f"{key} in {chunk.file} has other bytes than were written (CRC-32 differs)",
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never picked by DCP itself."""
        return False


def _copy(chunk: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        chunk = chunk.narrow(dim, start, length)
    target = planner.resolve_tensor(item)
    target.copy_(chunk)
    planner.commit_tensor(item, target)


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _header(items: list[WriteItem]) -> bytes:
    """The header of a safetensors file with these tensors one after another: its length in eight
    bytes, then JSON (https://github.com/huggingface/safetensors#format).
    """
    entries, start = {}, 0
    for item in items:
        assert item.tensor_data is not None and item.index.offset is not None
        sizes = item.tensor_data.chunk.sizes
        end = start + sizes.numel() * _dtype(item).itemsize
        entries[chunk_name(item.index.fqn, tuple(item.index.offset))] = {
            "dtype": DTYPES[_dtype(item)],
            "shape": list(sizes),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Any) -> memoryview:
    """A tensor's bytes, on the host."""
    assert isinstance(tensor, Tensor)
    flat = tensor.detach().cpu().contiguous().flatten()
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)

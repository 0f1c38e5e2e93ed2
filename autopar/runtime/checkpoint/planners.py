"""DCP's planners for tensors whose local part is several boxes of the whole."""

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autopar.errors import AutoparError
from autopar.runtime.checkpoint.index import Facts, Index
from autopar.runtime.pieces import Parts, cut

CHUNK_BYTES = 16 * 2**20
"""The most that is read, and checked, to get one element."""


class SaveParts(SavePlanner):
    """Plans the parts that `collect` gives on each rank, and its facts; what several ranks hold is
    written by one of them.
    """

    def __init__(self, collect: Callable[[], tuple[Mapping[str, Parts], Facts]]) -> None:
        self._collect = collect
        self._views: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(
        self,
        state_dict: Any,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing to set up: `collect` gives the state."""

    def create_local_plan(self) -> SavePlan:
        """A chunk for each piece, in pieces of at most CHUNK_BYTES."""
        parts, facts = self._collect()
        items = []
        for key, part in parts.items():
            for piece in part.pieces:
                for small in cut(piece, CHUNK_BYTES):
                    item = _write_item(key, part, small.offsets, tuple(small.view.shape))
                    items.append(item)
                    self._views[item.index] = small.view
        return SavePlan(items, planner_data=facts)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Who writes what. Errors: AutoparError where ranks state different facts."""
        facts = merged([plan.planner_data for plan in all_plans])
        plans, metadata = _planned(all_plans)
        return plans, replace(metadata, planner_data=facts)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Keeps the plan."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The view that a chunk is read from."""
        return self._views[write_item.index]


class LoadParts(LoadPlanner):
    """Plans to fill `parts` from the chunks that overlap them, and fills them."""

    def __init__(self, parts: Mapping[str, Parts], metadata: Metadata) -> None:
        self._parts = parts
        self._metadata = metadata

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing to set up: the parts and the metadata are known."""

    def create_local_plan(self) -> LoadPlan:
        """What to copy from where."""
        items = []
        for key, part in self._parts.items():
            saved = self._metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata), key
            assert tuple(saved.size) == part.shape and saved.properties.dtype == part.dtype, key
            boxes = [_box(piece.offsets, tuple(piece.view.shape)) for piece in part.pieces]
            items += create_read_items_for_chunk_list(key, saved, boxes)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Keeps the plans."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Keeps the plan."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: what isn't a tensor is in the index."""
        raise AssertionError(f"{read_item} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where in this rank's part a copy goes."""
        place = read_item.dest_index
        assert place.index is not None
        view = self._parts[place.fqn].pieces[place.index].view
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: the copy went to its place."""


def metadata_of(index: Index) -> Metadata:
    """The index in DCP's terms. Errors: ValueError where the chunks of a tensor overlap or leave a
    hole: each tensor is planned once more, in which DCP checks that.
    """
    items = []
    for key, saved in index.tensors.items():
        part = Parts(saved.shape, saved.dtype, ())
        items += [_write_item(key, part, c.offsets, c.sizes) for c in saved.chunks]
    # DCP checks that nothing is missing where there is more than one plan.
    _, metadata = _planned([SavePlan(items), SavePlan([])])
    return metadata


def merged(facts: list[Facts]) -> Facts:
    """The facts of all ranks. Errors: AutoparError where two ranks state different ones."""
    found: dict[str, Any] = {}
    for rank, stated in enumerate(facts):
        for name, value in stated.items():
            if found.setdefault(name, value) != value:
                raise AutoparError(
                    f"rank {rank} has {name} = {value!r} where an earlier rank has "
                    f"{found[name]!r}: a checkpoint needs the same on every rank."
                )
    return found


def _planned(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    return planner.create_global_plan(plans)


def _write_item(
    key: str, part: Parts, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> WriteItem:
    data = TensorWriteData(
        _box(offsets, sizes), TensorProperties(dtype=part.dtype), torch.Size(part.shape)
    )
    return WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

"""Which boxes of a whole tensor this rank holds, as views of its local part."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.layout import local_indices
from autopar.runtime.leaves import Leaf
from autopar.runtime.process_mesh import ProcessMesh


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a whole tensor: where it starts there, and a view of the local part with it."""

    offsets: tuple[int, ...]
    view: Tensor


@dataclass(frozen=True, eq=False)
class Parts:
    """What this rank holds of one whole tensor: boxes that don't overlap, none where it holds
    nothing.
    """

    shape: tuple[int, ...]
    """The whole tensor's."""
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


def whole(tensor: Tensor) -> Parts:
    """A tensor that this rank holds whole."""
    shape = tuple(tensor.shape)
    return Parts(shape, tensor.dtype, (Piece((0,) * len(shape), tensor.detach()),))


def parts_of(leaf: Leaf, mesh: ProcessMesh, tensor: Tensor) -> Parts:
    """`tensor` lies as `leaf.value` does, which it may be: as boxes of the leaf's whole shape.

    The indices that a rank holds of a dim need not follow one another (q|k|v over tp is three
    runs of them), so a part is as many boxes as there are combinations of runs.
    """
    assert tensor.shape == leaf.value.shape, f"{leaf.name}: {tensor.shape}, {leaf.value.shape}"
    shape = leaf.declaration.shape
    if not math.prod(shape):
        return Parts(shape, tensor.dtype, (Piece((0,) * len(shape), tensor.detach()),))
    pieces = []
    for box in itertools.product(*(_runs(index) for index in _held(leaf, mesh))):
        view = tensor.detach()
        for dim, (_, start, length) in enumerate(box):
            view = view.narrow(dim, start, length)
        pieces.append(Piece(tuple(offset for offset, _, _ in box), view))
    return Parts(shape, tensor.dtype, tuple(pieces))


def cut(piece: Piece, limit_bytes: int) -> Iterator[Piece]:
    """`piece` in pieces of at most `limit_bytes` (or of one element), the same on every rank that
    holds it.
    """
    view = piece.view
    dim = next((dim for dim, size in enumerate(view.shape) if size > 1), None)
    if view.nbytes <= limit_bytes or dim is None:
        yield piece
        return
    rows = view.shape[dim]
    step = max(1, limit_bytes * rows // view.nbytes)
    for start in range(0, rows, step):
        offsets = list(piece.offsets)
        offsets[dim] += start
        part = view.narrow(dim, start, min(step, rows - start))
        yield from cut(Piece(tuple(offsets), part), limit_bytes)


def _held(leaf: Leaf, mesh: ProcessMesh) -> list[Tensor]:
    """For each dim the indices into the whole that `leaf.value` holds, in local order, -1 for
    padding."""
    dims = leaf.declaration.dims
    indices = [local_indices(dim, mesh.layout, mesh.coordinate) for dim in dims]
    if leaf.shard is not None:
        chunks = indices[0].chunk(leaf.shard.size)
        rank = leaf.shard.rank
        indices[0] = chunks[rank] if rank < len(chunks) else indices[0][:0]
    return indices


def _runs(index: Tensor) -> Sequence[tuple[int, int, int]]:
    """Consecutive indices together, without padding: (first index, where it lies locally,
    length)."""
    places = torch.nonzero(index >= 0).flatten()
    if not len(places):
        return ()
    real = index[places]
    apart = (real.diff() != 1) | (places.diff() != 1)
    breaks = (torch.nonzero(apart).flatten() + 1).tolist()
    bounds = itertools.pairwise([0, *breaks, len(real)])
    return [(int(real[start]), int(places[start]), end - start) for start, end in bounds]

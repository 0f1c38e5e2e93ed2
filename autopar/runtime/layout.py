"""How a whole tensor's dims lie on the ranks, and which of its indices one rank holds.

A dim is a whole size (an int), a `Split` over axes, a product of dims (a tuple, major first), or a
`Cat` of segments. Nesting covers fused weights: q|k|v over tp is
`cat((split(heads, "tp"), head_dim), …)`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Union

import torch
from torch import Tensor

from autopar.mesh import Mesh


@dataclass(frozen=True)
class SplitDim:
    """`size` elements in equal pieces over `axes`, outermost (largest pieces) first. `padded`: the
    last pieces have fewer elements, or none, and padding behind them."""

    size: int
    axes: tuple[str, ...]
    padded: bool = False


@dataclass(frozen=True)
class CatDim:
    """Segments that lie after one another, each cut by itself."""

    segments: tuple["Dim", ...]


Dim = Union[int, SplitDim, CatDim, tuple["Dim", ...]]  # noqa: UP007 (it names itself)


def split(size: int, *axes: str) -> SplitDim:
    """A dim of `size` elements cut over `axes`: the outermost piece is chosen by the first axis."""
    assert axes and len(set(axes)) == len(axes), f"split({size}) over the axes {axes}"
    return SplitDim(size, axes)


def split_padded(size: int, *axes: str) -> SplitDim:
    """`split` of a size that doesn't divide: the last pieces are padded with zeros to the length of
    the first."""
    return replace(split(size, *axes), padded=True)


def cat(*segments: Dim) -> CatDim:
    """A dim made of segments after one another, each cut by itself."""
    return CatDim(segments)


def whole_size(dim: Dim) -> int:
    """The dim's size in the whole tensor."""
    match dim:
        case int():
            return dim
        case SplitDim(size):
            return size
        case CatDim(segments):
            return sum(whole_size(segment) for segment in segments)
        case _:
            return math.prod(whole_size(factor) for factor in dim)


def axes_of(dim: Dim) -> frozenset[str]:
    """The axes that the dim is cut over."""
    match dim:
        case int():
            return frozenset()
        case SplitDim(axes=axes):
            return frozenset(axes)
        case CatDim(parts):
            return frozenset().union(*(axes_of(part) for part in parts))
        case _:
            return frozenset().union(*(axes_of(part) for part in dim))


def local_indices(dim: Dim, mesh: Mesh, coordinate: Mapping[str, int]) -> Tensor:
    """The indices into the whole dim that the rank at `coordinate` holds: int64, in local order, -1
    for padding."""
    match dim:
        case int():
            return torch.arange(dim, device="cpu")
        case SplitDim(size, axes, padded):
            pieces, piece = 1, 0
            for axis in axes:
                pieces, piece = pieces * mesh.size(axis), piece * mesh.size(axis) + coordinate[axis]
            fits = padded or size % pieces == 0
            assert fits, f"{size} elements don't fall into {pieces} pieces ({axes})"
            length = -(-size // pieces)
            index = torch.arange(piece * length, (piece + 1) * length, device="cpu")
            return torch.where(index < size, index, -1)
        case CatDim(segments):
            start, indices = 0, []
            for segment in segments:
                index = local_indices(segment, mesh, coordinate)
                indices.append(torch.where(index < 0, -1, index + start))
                start += whole_size(segment)
            return torch.cat(indices)
        case _:
            index = torch.zeros(1, dtype=torch.int64, device="cpu")
            for factor in dim:
                minor = local_indices(factor, mesh, coordinate)
                both = index[:, None] * whole_size(factor) + minor
                padding = (index[:, None] < 0) | (minor < 0)
                index = torch.where(padding, -1, both).flatten()
            return index


def local_shape(dims: tuple[Dim, ...], mesh: Mesh) -> tuple[int, ...]:
    """The shape of each rank's part, padding included: the same on every rank."""
    origin = {name: 0 for name, _ in mesh.axes}
    return tuple(len(local_indices(dim, mesh, origin)) for dim in dims)


def take(whole: Tensor, dims: tuple[Dim, ...], mesh: Mesh, coordinate: Mapping[str, int]) -> Tensor:
    """The part of `whole` that the rank at `coordinate` holds; its padding is zero."""
    part = whole
    for position, dim in enumerate(dims):
        if axes_of(dim):
            index = local_indices(dim, mesh, coordinate).to(whole.device)
            padding = (index < 0).nonzero().flatten()
            part = part.index_select(position, index.clamp(min=0))
            part = part.index_fill(position, padding, 0) if len(padding) else part
    return part


def put(
    whole: Tensor, part: Tensor, dims: tuple[Dim, ...], mesh: Mesh, coordinate: Mapping[str, int]
) -> None:
    """Writes the part of the rank at `coordinate`, without padding, to its places in `whole`."""
    indices = []
    for position, dim in enumerate(dims):
        index = local_indices(dim, mesh, coordinate).to(whole.device)
        real = (index >= 0).nonzero().flatten()
        part = part.index_select(position, real) if len(real) < len(index) else part
        indices.append(index[real])
    whole[tuple(torch.meshgrid(*indices, indexing="ij"))] = part

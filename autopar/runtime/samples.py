"""Comparing what a batch gives with what its parts give."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def same(whole: Tensor, parts: Sequence[Tensor], dim: int) -> bool:
    """Whether a tensor is these one after the other, up to rounding."""
    if [p.dim() for p in parts] != [whole.dim()] * len(parts):
        return False
    lengths = [tuple(n for i, n in enumerate(p.shape) if i != dim) for p in (whole, *parts)]
    if len(set(lengths)) != 1 or sum(p.shape[dim] for p in parts) != whole.shape[dim]:
        return False
    joined = torch.cat(list(parts), dim)
    if not (whole.is_floating_point() or whole.is_complex()):
        return torch.equal(joined, whole)
    if not whole.numel():
        return True
    wide = whole.to(torch.complex128 if whole.is_complex() else torch.float64)
    error = (joined.to(wide.dtype) - wide).abs().max().item()
    return error <= math.sqrt(torch.finfo(whole.dtype).eps) * max(wide.abs().max().item(), 1e-30)

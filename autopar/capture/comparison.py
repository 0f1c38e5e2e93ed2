"""The patterns of attention masks, and proving one without building the mask.

A mask over 128 Ki positions has 2^34 elements. But it is a conjunction of comparisons of a vector
over queries r with a vector over keys c, and each can be judged in linear time:
`c[j] <= r[i]` for sorted c is the lower triangle iff `c[i] <= r[i] < c[i+1]`.
"""

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor
from torch.fx import Node

from autopar.capture.evaluate import Evaluator
from autopar.capture.functional import packet

_ATEN = torch.ops.aten
_AND = {_ATEN.__and__, _ATEN.bitwise_and, _ATEN.logical_and, _ATEN.mul}
_SAME = {_ATEN.expand, _ATEN.to, _ATEN.contiguous, _ATEN.clone}
_COMPARE: dict[object, Callable[[Tensor, Tensor], Tensor]] = {
    _ATEN.le: torch.le,
    _ATEN.lt: torch.lt,
    _ATEN.ge: torch.ge,
    _ATEN.gt: torch.gt,
    _ATEN.eq: torch.eq,
}
_FLIPPED = {torch.le: torch.ge, torch.lt: torch.gt, torch.ge: torch.le, torch.gt: torch.lt}


class Pattern(Enum):
    """Which keys a query may look at."""

    ALL = "visible everywhere"
    TRIANGLE = "visible exactly where key ≤ query"
    UNKNOWN = "neither, or not known"


def judge(node: Node, evaluator: Evaluator) -> Pattern:
    """What is shown of a boolean mask [..., queries, keys] that depends on constants only."""
    kind = packet(node)
    inputs = node.all_input_nodes
    if node.meta["val"].dtype is not torch.bool:
        return Pattern.UNKNOWN
    if kind in _AND and len(inputs) == 2:
        both = {judge(n, evaluator) for n in inputs}
        if Pattern.UNKNOWN in both:
            return Pattern.UNKNOWN
        return Pattern.TRIANGLE if Pattern.TRIANGLE in both else Pattern.ALL
    if kind in _SAME:
        return judge(inputs[0], evaluator)
    if kind in _COMPARE and len(inputs) == 2:
        sides = [evaluator.value(n) for n in inputs]
        return _compare(_COMPARE[kind], sides[0], sides[1])
    value = evaluator.value(node)
    return Pattern.ALL if value is not None and bool(value.all()) else Pattern.UNKNOWN


def _compare(
    op: Callable[[Tensor, Tensor], Tensor], left: Tensor | None, right: Tensor | None
) -> Pattern:
    """The comparison of a column [..., queries, 1] with a row [..., 1, keys], in either order."""
    if left is None or right is None or left.is_floating_point() or right.is_floating_point():
        return Pattern.UNKNOWN
    if op is torch.eq:
        first = left.flatten()[0]
        same = bool((left == first).all()) and bool((right == first).all())
        return Pattern.ALL if same else Pattern.UNKNOWN
    if op in (torch.ge, torch.gt):  # a ≥ b is b ≤ a
        op, left, right = _FLIPPED[op], right, left
    strict = int(op is torch.lt)
    if bool(left.max() + strict <= right.min()):
        return Pattern.ALL
    keys, queries = _vector(left, -1), _vector(right, -2)
    if keys is None or queries is None or keys.numel() != queries.numel():
        return Pattern.UNKNOWN
    # keys[j] + strict ≤ queries[i] must hold for j ≤ i and for no other.
    keys = keys + strict
    ordered = bool((keys[1:] >= keys[:-1]).all())
    holds = bool((keys <= queries).all()) and bool((queries[:-1] < keys[1:]).all())
    return Pattern.TRIANGLE if ordered and holds else Pattern.UNKNOWN


def _vector(value: Tensor, dim: int) -> Tensor | None:
    """The vector along `dim` (−1: keys, −2: queries) where no other dim changes anything."""
    if value.dim() < 2 and dim == -2:
        return None
    along = value.movedim(dim, -1).reshape(-1, value.shape[dim])
    same = bool((along == along[0]).all())
    return along[0] if same else None

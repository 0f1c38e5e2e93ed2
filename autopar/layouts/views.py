"""Which tensors of one rank are views of others, and which are copies.

A view of the unsplit model is one on every rank. The reverse doesn't hold: ops that copy only where
no view will do (reshape, contiguous, products that take batched operands as one batch) may copy the
unsplit tensor and not the local one. Where one kv head is left, say, repeating it for its queries
by expand and reshape moves nothing; where one sample is left, nor does swapping it with a dim.
"""

import math
from collections.abc import Sequence

from autopar.graph.model_graph import Block, SavedTensor
from autopar.graph.ops import op_name
from autopar.layouts.layout import Layout, Setting
from autopar.layouts.sizes import whole as whole_length
from autopar.layouts.typing import OpTyping

IF_NEEDED = frozenset({"reshape", "flatten", "contiguous"})
"""Ops that copy only where no view will do."""


def viewed(block: Block, name: str, typing: OpTyping, setting: Setting) -> str | None:
    """The input that an op's result is a view of on one rank; None where it is a tensor of its own
    (or several)."""
    if name in block.views:
        return block.views[name]
    op = block.ops[name]
    if op.opaque or name not in block.values or op_name(op.node) not in IF_NEEDED:
        return None
    (source,) = (node.name for node in op.node.all_input_nodes)
    layout, dims = typing.needs[source], block.values[name].dims
    out = setting.local_shape(dims, typing.makes)
    return source if _fits(block, source, layout, out, setting) else None


def folded(block: Block, one: SavedTensor) -> str | None:
    """The input that an op keeps a copy of, with the leading dims as one, in the unsplit model; a
    rank needs none where `folds`."""
    if one.value is not None or block.ops[one.op].kind != "contraction":
        return None
    for node in block.ops[one.op].node.all_input_nodes:
        shape, stride = tuple(node.meta["val"].shape), block.strides[node.name]
        if _fold(shape, len(one.shape)) == one.shape and not is_view(shape, stride, one.shape):
            return node.name
    return None


def folds(block: Block, one: SavedTensor, source: str, layout: Layout, setting: Setting) -> bool:
    """Whether a rank keeps a view of that input instead of a copy."""
    shape = setting.local_shape(block.values[source].dims, layout)
    return _fits(block, source, layout, _fold(shape, len(one.shape)), setting)


def _fold(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    lead = len(shape) - rank + 1
    return (math.prod(shape[:lead]), *shape[lead:]) if lead > 1 else shape


def _fits(
    block: Block, source: str, layout: Layout, out: tuple[int, ...], setting: Setting
) -> bool:
    """Whether a rank's part of a value can be seen in another shape."""
    dims = block.values[source].dims
    whole = [whole_length(expr) for expr in dims]
    local = setting.local_shape(dims, layout)
    return is_view(local, _local_strides(whole, block.strides[source], local), out)


def _local_strides(
    whole: Sequence[int], strides: Sequence[int], local: Sequence[int]
) -> tuple[int, ...]:
    """The strides that a tensor has on a rank that holds `local` of each dim: smaller by as much as
    the dims inside are."""
    out = []
    for mine in strides:
        inside = [i for i, stride in enumerate(strides) if 0 < stride < mine and whole[i] > 1]
        more, less = (math.prod(shape[i] for i in inside) for shape in (whole, local))
        out.append(mine * less // more)
    return tuple(out)


def is_view(shape: Sequence[int], strides: Sequence[int], out: Sequence[int]) -> bool:
    """Whether a tensor of this shape and strides can be seen in another shape without a copy: each
    run of dims that lie next to each other falls into dims of the result."""
    if math.prod(out) == 0:
        return True
    runs: list[list[int]] = []  # (length, stride of its last dim)
    for length, stride in zip(shape, strides, strict=True):
        if length == 1:
            continue
        if runs and runs[-1][1] == length * stride:
            runs[-1] = [runs[-1][0] * length, stride]
        else:
            runs.append([length, stride])
    left = 1
    todo = iter(runs)
    for length in out:
        if left == 1 and length > 1:
            left = next(todo)[0]
        if left % length:
            return False
        left //= length
    return left == 1

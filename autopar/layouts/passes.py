"""What an op adds that works in several passes: what each of them gives is merged."""

from collections.abc import Iterator

from autopar.graph.model_graph import Block, Op
from autopar.graph.ops import arguments
from autopar.layouts.layout import Setting
from autopar.layouts.typing import OpTyping
from autopar.layouts.work import layout_in
from autopar.plugin import Compute, Phase

WIDE_BYTES = 4
"""Of an element of the sums, which are in float32 at least."""


def merging(
    block: Block, op: Op, typing: OpTyping | None, setting: Setting, phase: Phase
) -> Iterator[Compute]:
    """One kernel's worth of bytes for each pass of attention in a ring (`runtime/context.py`).

    Forward: the result so far is scaled (read, written), the pass's scaled (read in the op's dtype,
    written) and added (two read, one written). Backward: the gradients of queries, keys and values
    are added to their sums (two read, one written).
    """
    if typing is None or typing.form is None or typing.form.passes == 1:
        return
    value = block.values[op.node.name]
    item = value.item_bytes
    wide = max(item, WIDE_BYTES)
    if phase == "forward":
        moved = setting.local_numel(value.dims, typing.makes) * (6 * wide + item)
    else:
        moved = 0
        for name in ("query", "key", "value"):
            source = arguments(op.node)[name].name
            layout = layout_in(block, typing, source, setting)
            numel = setting.local_numel(block.values[source].dims, layout)
            moved += numel * (2 * wide + item)
    for _ in range(typing.form.passes):
        yield Compute("pointwise", 0, moved, "float32", phase)

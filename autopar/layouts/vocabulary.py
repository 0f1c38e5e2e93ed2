"""What a look-up in a split vocabulary, or a loss over one, keeps (`runtime/vocabulary`)."""

from autopar.graph.factors import expr_leaves
from autopar.graph.model_graph import Block, Op
from autopar.graph.ops import arguments
from autopar.layouts.layout import Setting
from autopar.layouts.typing import OpTyping


def kept_instead(
    block: Block, op: Op, typing: OpTyping, setting: Setting
) -> tuple[str, int] | None:
    """The indices that the op keeps where nothing is split, and how many bytes it keeps instead of
    them where rows (classes) are: indices into this rank's part, a byte for each that says whether
    it lies there, and, of a loss, one that says whether it counts. None for other ops."""
    if op.kind not in ("embedding", "loss"):
        return None
    args = arguments(op.node)
    loss = op.kind == "loss"
    over, dim, indices = ("self", -1, "target") if loss else ("weight", 0, "indices")
    if indices not in args or (loss and not op.closed):
        return None
    names = [leaf.name for leaf in expr_leaves(block.values[args[over].name].dims[dim])]
    if not any(typing.needs[args[over].name].split(name) for name in names):
        return None
    name = args[indices].name
    value = block.values[name]
    count = setting.local_numel(value.dims, typing.needs[name])
    return name, count * (value.item_bytes + 1 + loss)

"""Ops on inputs that mix the samples of the batch.

An op without a gradient runs on each rank's share of the samples. A sum over the batch of values
that depend on inputs alone (a mask's sum, say) is therefore computed before the forward, over all
ranks and microbatches, like the counts that losses divide by. Counts of which a rank takes its own
part (tokens for each expert) belong to the region that uses them. Whatever else mixes samples there
(an offset by the batch's mean) can't run on a share of them.
"""

import torch.fx

from autopar.graph.dims import BlockDims
from autopar.graph.factors import Factor, leaves
from autopar.graph.flags import Flags
from autopar.graph.ops import class_of, is_tensor, op_name, shape_of


def batch_sums(
    graph: torch.fx.Graph,
    known: BlockDims,
    flags: Flags,
    counts: tuple[torch.fx.Node, ...],
    returns_loss: bool,
) -> tuple[tuple[torch.fx.Node, ...], dict[str, str]]:
    """All count nodes in graph order, and the ops that mix samples otherwise, with the reason.

    `counts` are those already found; only the skeleton (`returns_loss`) can have more.
    """
    # A count of constants (labels made by arange) is the whole batch's on every rank already.
    found, mixing = {n for n in counts if n.name in flags.from_batch}, {}
    shares = share_makers(known)
    for node in graph.nodes:
        if node.op != "call_function" or node in found or not _mixes(node, known, flags):
            continue
        if node in shares:
            continue
        before = _ancestors(node)
        pure = not any(n.name in flags.needs_grad for n in before) and not before & found
        if returns_loss and op_name(node) == "sum" and pure and not shape_of(node):
            found.add(node)
        else:
            mixing[node.name] = f"{op_name(node)} ({node.name}) mixes the samples of its inputs"
    return tuple(n for n in graph.nodes if n in found), mixing


def share_makers(known: BlockDims) -> dict[torch.fx.Node, torch.fx.Node]:
    """The ops that make a sum of which another op takes each rank's own part, from where something
    is summed, with that other op."""
    makers = {}
    for user, info in known.ops.items():
        todo = list(info.shares)
        while todo:
            node = todo.pop()
            makers[node] = user
            if not known.ops[node].contract:
                todo += node.all_input_nodes
    return makers


def _mixes(node: torch.fx.Node, known: BlockDims, flags: Flags) -> bool:
    if not is_tensor(node) or node.name in flags.needs_grad or node.name not in flags.from_batch:
        return False
    if class_of(op_name(node)) in ("layer", "getitem"):
        return False
    if any(has_pairs(known, n) for n in node.all_input_nodes):
        return False  # it runs on the whole batch, with what made the pairs
    info = known.ops[node]
    closed = [*info.contract, *(dim for dim, _ in info.blocked)]
    return any(_is_batch(leaf) for dim in closed for leaf in leaves(dim))


def _is_batch(leaf: Factor) -> bool:
    return leaf.hint == "batch"


def _ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    seen: set[torch.fx.Node] = set()
    todo = list(node.all_input_nodes)
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo += current.all_input_nodes
    return seen


def has_pairs(known: BlockDims, node: torch.fx.Node) -> bool:
    """Whether a tensor has the batch twice: something of each pair of samples."""
    tensors = known.dims.get(node, ())
    return any(sum(f.hint == "batch" for dim in dims for f in leaves(dim)) > 1 for dims in tensors)

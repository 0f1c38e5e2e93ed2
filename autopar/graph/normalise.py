"""Rewrites on a copy of a captured graph, so that every later stage sees few forms.

1. `x.view(-1, h)` → addmm/mm → `.view(b, s, n)` becomes one matmul on the 3-d tensor: the flattened
   dim would hide the sequence dim behind the batch dim.
2. A contraction's bias becomes an add of its own: a partial sum must be reduced before it.
   (The emitter prints the two as one call again where nothing came between.)
3. A mean of everything becomes a sum over the number of elements; operands that a loss broadcasts
   are expanded where they need it.
4. Keys and values that are repeated for the queries that share them are so no more.
5. A mean loss becomes its sum over a count. Counts depend on inputs alone; `forward` gets them from
   outside, computed over the global batch and all microbatches.
"""

import math
from typing import Any

import torch
import torch.fx

from autopar.capture.schema import namespace_of
from autopar.errors import AutoparError
from autopar.graph.ops import OPS_BY_CLASS, arguments, is_tensor, op_name, shape_of
from autopar.graph.plain_forms import plain_form
from autopar.graph.rewrite import insert, named

aten = torch.ops.aten
LOSSES = (
    "cross_entropy_loss",
    "nll_loss",
    "nll_loss_nd",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy_with_logits",
)
CONVOLUTIONS = OPS_BY_CLASS["convolution"].split()
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def normalise(graph: torch.fx.Graph) -> tuple[torch.fx.Graph, tuple[torch.fx.Node, ...]]:
    """The rewritten copy, and its count nodes: 0-d tensors that the losses divide by."""
    copy = torch.fx.Graph()
    result = copy.graph_copy(graph, {})
    copy.output(result)
    for node in list(copy.nodes):
        if node.op == "call_function":
            plain_form(copy, node)
    for node in list(copy.nodes):
        if node.op == "call_function" and named(node, "addmm", "mm"):
            _unflatten(copy, node)
    for node in list(copy.nodes):
        if node.op == "call_function" and named(node, "addmm", "linear"):
            _split_bias(copy, node)
        elif node.op == "call_function" and named(node, *CONVOLUTIONS):
            _split_channel_bias(copy, node)
    counts = []
    for node in list(copy.nodes):
        if node.op == "call_function" and _is_loss(node):
            counts += _sum_over_count(copy, node)
    copy.eliminate_dead_code()
    copy.lint()
    return copy, tuple(counts)


def _is_loss(node: torch.fx.Node) -> bool:
    return namespace_of(node) == "aten" and op_name(node) in LOSSES


def _unflatten(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    args = arguments(node)
    x, weight, bias = (
        (args["mat1"], args["mat2"], args["self"])
        if op_name(node) == "addmm"
        else (args["self"], args["mat2"], None)
    )
    if op_name(node) == "addmm" and (args["beta"] != 1 or args["alpha"] != 1):
        return
    source = x
    if named(x, "view", "reshape") and x.op == "call_function":
        source = arguments(x)["self"]
    lead = shape_of(source)[:-1]
    views = [u for u in node.users if u.op == "call_function" and named(u, "view", "reshape")]
    flat = source is not x and shape_of(source)[-1] == shape_of(x)[-1]
    if not flat or len(views) != len(node.users):
        return
    if any(shape_of(u)[:-1] != lead or shape_of(u)[-1] != shape_of(node)[-1] for u in views):
        return
    out = insert(graph, node, aten.matmul.default, (source, weight), node)
    if bias is not None:
        out = insert(graph, node, aten.add.Tensor, (out, bias), node)
    for user in views:
        user.replace_all_uses_with(out)
        graph.erase_node(user)
    graph.erase_node(node)


def _split_bias(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    args = arguments(node)
    if op_name(node) == "linear":
        bias = args["bias"]
        product_target, operands = aten.linear.default, (args["input"], args["weight"])
    else:
        if args["beta"] != 1 or args["alpha"] != 1:
            return
        bias = args["self"]
        product_target, operands = aten.mm.default, (args["mat1"], args["mat2"])
    if bias is None:
        return
    product = insert(graph, node, product_target, operands, node)
    total = insert(graph, node, aten.add.Tensor, (product, bias), node)
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _split_channel_bias(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """A convolution's bias as an add of [channels, 1, …]."""
    args = arguments(node)
    bias = args["bias"]
    if bias is None:
        return
    values = tuple(None if name == "bias" else value for name, value in args.items())
    product = insert(graph, node, node.target, values, node)  # type: ignore[arg-type]
    column = [-1] + [1] * (len(shape_of(node)) - 2)
    shaped = insert(graph, node, aten.view.default, (bias, column), node)
    node.replace_all_uses_with(insert(graph, node, aten.add.Tensor, (product, shaped), node))
    graph.erase_node(node)


def _sum_over_count(graph: torch.fx.Graph, node: torch.fx.Node) -> list[torch.fx.Node]:
    """Replace a mean loss by sum / count; returns the count node (none for a constant count)."""
    args = arguments(node)
    reduction = args["reduction"]
    if reduction == REDUCTIONS["none"]:
        raise AutoparError(
            f"the loss op {op_name(node)} ({node.name}) is called with reduction='none', which has "
            "no rule yet; use reduction='mean' or 'sum'"
        )
    if reduction == REDUCTIONS["sum"]:
        return []
    target = args["target"]
    classes = op_name(node) in ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
    count: Any
    if classes and target.meta["val"].dtype == torch.int64:
        count = _valid_targets(graph, node, target, args)
    else:
        shape = shape_of(args["self"])
        count = shape[0] if classes else math.prod(shape)
    values = tuple(REDUCTIONS["sum"] if k == "reduction" else v for k, v in args.items())
    total = insert(graph, node, node.target, values, node)  # type: ignore[arg-type]
    mean = insert(graph, node, aten.div.Tensor, (total, count), node)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)
    return [count] if isinstance(count, torch.fx.Node) else []


def _valid_targets(
    graph: torch.fx.Graph, node: torch.fx.Node, target: torch.fx.Node, args: dict[str, Any]
) -> torch.fx.Node:
    """Σ weight[target] · (target ≠ ignore_index), as torch's mean divides."""
    valid = insert(graph, node, aten.ne.Scalar, (target, args["ignore_index"]), node, "valid")
    if not is_tensor(args["weight"]):
        return insert(graph, node, aten.sum.default, (valid,), node, "count")
    weight = args["weight"]
    if weight.op == "placeholder" and weight.meta["val"].requires_grad:
        raise AutoparError(
            f"the loss op {op_name(node)} has class weights that are trained, which has no rule"
        )
    index = insert(graph, node, aten.mul.Tensor, (target, valid), node, "valid_target")
    column = insert(graph, node, aten.unsqueeze.default, (weight, 1), node)
    weights = insert(graph, node, aten.embedding.default, (column, index), node)
    flat = insert(graph, node, aten.squeeze.dim, (weights, -1), node)
    each = insert(graph, node, aten.mul.Tensor, (flat, valid), node)
    return insert(graph, node, aten.sum.default, (each,), node, "count")


def serving_counts(
    graph: torch.fx.Graph, counts: tuple[torch.fx.Node, ...]
) -> frozenset[torch.fx.Node]:
    """The nodes that serve the counts alone (forward gets those from outside), and the counts."""
    found = set(counts)
    for node in reversed(graph.nodes):
        # What has no users writes into a buffer.
        if node.op != "output" and node.users and all(user in found for user in node.users):
            found.add(node)
    return frozenset(found)

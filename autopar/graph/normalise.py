"""Rewrites on a copy of a captured graph, so that every later stage sees few forms.

1. `x.view(-1, h)` → addmm/mm → `.view(b, s, n)` becomes one matmul on the 3-d tensor: the flattened
   dim would hide the sequence dim behind the batch dim.
2. A contraction's bias becomes an add of its own: a partial sum must be reduced before it.
   (The emitter prints the two as one call again where nothing came between.)
3. A mean of everything becomes a sum over the number of elements; operands that a loss broadcasts
   are expanded where they need it.
4. A mean loss becomes its sum over a count. Counts depend on inputs alone; `forward` gets them from
   outside, computed over the global batch and all microbatches.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from autopar.capture.schema import namespace_of, schema_of
from autopar.errors import AutoparError
from autopar.graph.ops import arguments, is_tensor, op_name, shape_of

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
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def normalise(graph: torch.fx.Graph) -> tuple[torch.fx.Graph, tuple[torch.fx.Node, ...]]:
    """The rewritten copy, and its count nodes: 0-d tensors that the losses divide by."""
    copy = torch.fx.Graph()
    result = copy.graph_copy(graph, {})
    copy.output(result)
    for node in list(copy.nodes):
        if node.op == "call_function":
            _plain_form(copy, node)
    for node in list(copy.nodes):
        if node.op == "call_function" and _named(node, "addmm", "mm"):
            _unflatten(copy, node)
    for node in list(copy.nodes):
        if node.op == "call_function" and _named(node, "addmm", "linear"):
            _split_bias(copy, node)
    counts = []
    for node in list(copy.nodes):
        if node.op == "call_function" and _is_loss(node):
            counts += _sum_over_count(copy, node)
    copy.eliminate_dead_code()
    copy.lint()
    return copy, tuple(counts)


def _named(node: torch.fx.Node, *names: str) -> bool:
    return schema_of(node) is not None and op_name(node) in names


def _is_loss(node: torch.fx.Node) -> bool:
    return namespace_of(node) == "aten" and op_name(node) in LOSSES


def insert(
    graph: torch.fx.Graph,
    before: torch.fx.Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    like: torch.fx.Node,
    name: str | None = None,
    **kwargs: Any,
) -> torch.fx.Node:
    """A new call before a node, with its value's metadata, and `like`'s place in the modules."""
    with graph.inserting_before(before):
        node = graph.create_node("call_function", target, args, kwargs, name=name)
    values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    fake: Any = next(
        n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)
    )
    with fake.fake_mode, torch.no_grad():
        node.meta["val"] = target(*values, **kwargs)
    node.meta["nn_module_stack"] = like.meta.get("nn_module_stack", {})
    node.meta["stack_trace"] = like.meta.get("stack_trace")
    return node


def _plain_form(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    if _named(node, "broadcast_tensors"):
        _without_broadcast(graph, node)
    elif node.target is aten.mean.default:
        _mean_by_sum(graph, node)
    elif _named(node, "expand_as", "numpy_T"):
        _plain_view(graph, node)
    elif node.target in (aten.min.other, aten.max.other):
        node.target = aten.minimum.default if op_name(node) == "min" else aten.maximum.default
    elif _named(node, "new_zeros", "new_ones", "new_full", "new_empty"):
        _plain_constant(graph, node)


def _without_broadcast(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Operands of one shape stay as they are, others are expanded (losses call this)."""
    operands = arguments(node)["tensors"]
    for user in list(node.users):
        operand = operands[user.args[1]]
        if shape_of(operand) != shape_of(user):
            shape = list(shape_of(user))
            operand = insert(graph, user, aten.expand.default, (operand, shape), user)
        user.replace_all_uses_with(operand)
        graph.erase_node(user)
    graph.erase_node(node)


def _plain_constant(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """new_zeros and the like depend on no values."""
    value = {"new_zeros": 0, "new_ones": 1, "new_empty": 0}.get(op_name(node))
    fill = arguments(node)["fill_value"] if value is None else value
    shape, made = list(shape_of(node)), node.meta["val"]
    with graph.inserting_before(node):
        other = graph.call_function(aten.full.default, (shape, fill), {"dtype": made.dtype})
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def _plain_view(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """expand_as and .T under the names that have rules."""
    source = arguments(node)["self"]
    if op_name(node) == "expand_as":
        other = insert(graph, node, aten.expand.default, (source, list(shape_of(node))), node)
    elif len(shape_of(node)) == 2:
        other = insert(graph, node, aten.t.default, (source,), node)
    else:
        return
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def _mean_by_sum(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """A mean of everything is a sum over the whole number of elements: sums can be split."""
    args = arguments(node)
    if args["dtype"] is not None:
        return
    total = insert(graph, node, aten.sum.default, (args["self"],), node)
    count = math.prod(shape_of(args["self"]))
    node.replace_all_uses_with(insert(graph, node, aten.div.Tensor, (total, count), node))
    graph.erase_node(node)


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
    if _named(x, "view", "reshape") and x.op == "call_function":
        source = arguments(x)["self"]
    lead = shape_of(source)[:-1]
    views = [u for u in node.users if u.op == "call_function" and _named(u, "view", "reshape")]
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


def is_prologue_only(node: torch.fx.Node, counts: tuple[torch.fx.Node, ...]) -> bool:
    """Whether a node serves the counts alone (forward gets those from outside)."""
    seen: set[torch.fx.Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current in counts or current in seen:
            continue
        seen.add(current)
        if current.op == "output":
            return False
        todo += current.users
    return True

"""Recognising attention masks that a model builds from position indices.

Hugging Face hands every layer a [batch, 1, sequence, sequence] mask made from `arange`s. Where it
is exactly the lower triangle, attention can be told `is_causal=True` instead, and where it hides
nothing it can go: flash kernels take that, the mask is never stored, and attention can be split.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from autopar.capture.captured import CapturedGraph
from autopar.capture.clean import drop_dead
from autopar.capture.comparison import Pattern, judge
from autopar.capture.evaluate import Evaluator
from autopar.capture.functional import packet

_SDPA = torch.ops.aten.scaled_dot_product_attention
Judge = Callable[[Node], Pattern]


def simplify_skeleton(skeleton: CapturedGraph) -> tuple[Judge, tuple[str, ...]]:
    """Rewrite the attention of the skeleton itself. Returns the judge of its masks, and notes."""
    masks = _judge_of(skeleton, {})
    return masks, _rewrite(skeleton, masks)


def simplify_block(
    block: CapturedGraph, sites: Sequence[Sequence[Node]], skeleton: Judge
) -> tuple[str, ...]:
    """Rewrite a block's attention where its mask is of one pattern at all call `sites`: lists of
    skeleton nodes, aligned with the block's inputs. Returns notes."""
    columns = zip(*sites, strict=True)
    given = {i.node: list(nodes) for i, nodes in zip(block.inputs, columns, strict=True)}
    return _rewrite(block, _judge_of(block, given, skeleton))


def sites_of(layer: Node) -> list[Node]:
    """The skeleton nodes that a layer call passes."""
    tensors = layer.args[0]
    assert isinstance(tensors, (list, tuple))
    return list(tensors)


def _judge_of(
    captured: CapturedGraph, given: Mapping[str, list[Node]], outer: Judge | None = None
) -> Judge:
    """The judge of the masks of one graph. What a placeholder is `given` by each caller is left to
    the `outer` judge."""
    evaluator = Evaluator(dict(captured.constants))
    known: dict[Node, Pattern] = {}

    def fresh(node: Node) -> Pattern:
        if node.op == "placeholder" and node.name in given and outer is not None:
            patterns = {outer(site) for site in given[node.name]}
            return patterns.pop() if len(patterns) == 1 else Pattern.UNKNOWN
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dim() < 2 or not evaluator.is_constant(node):
            return Pattern.UNKNOWN
        found = _pattern(evaluator.value(node))
        return judge(node, evaluator) if found is Pattern.UNKNOWN else found

    def cached(node: Node) -> Pattern:
        if node not in known:
            known[node] = fresh(node)
        return known[node]

    return cached


def _pattern(value: Tensor | None) -> Pattern:
    """The pattern of a mask's values, the same for all leading indices.

    A boolean mask is True where a query may look; a float mask is added: 0 there, −inf elsewhere.
    """
    if value is None:
        return Pattern.UNKNOWN
    rows = value[:1] if value.dim() > 2 and value.stride(0) == 0 else value
    visible = rows if rows.dtype is torch.bool else rows == 0
    if rows.dtype is not torch.bool and not _only_infinite(rows, visible):
        return Pattern.UNKNOWN
    if bool(visible.all()):
        return Pattern.ALL
    triangle = torch.ones(value.shape[-2:], dtype=torch.bool).tril()
    matrices = visible.reshape(-1, *value.shape[-2:])
    causal = triangle.shape[0] == triangle.shape[1] and all(
        torch.equal(matrix, triangle) for matrix in matrices
    )
    return Pattern.TRIANGLE if causal else Pattern.UNKNOWN


def _only_infinite(rows: Tensor, visible: Tensor) -> bool:
    """Whether an additive mask is −inf wherever it is not 0."""
    return rows.is_floating_point() and bool((visible | (rows == float("-inf"))).all())


def _rewrite(captured: CapturedGraph, masks: Judge) -> tuple[str, ...]:
    counts = {Pattern.TRIANGLE: 0, Pattern.ALL: 0}
    for node in captured.graph.nodes:
        if packet(node) is _SDPA:
            pattern = _rewrite_attention(node, masks)
            if pattern is not Pattern.UNKNOWN:
                counts[pattern] += 1
    drop_dead(captured.graph)
    what = {
        Pattern.TRIANGLE: "causal attention mask became is_causal=True",
        Pattern.ALL: "attention mask that hides nothing was dropped",
    }
    return tuple(f"{captured.name}: {n} × {what[pattern]}" for pattern, n in counts.items() if n)


def _rewrite_attention(node: Node, masks: Judge) -> Pattern:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    mask, query, key = given.get("attn_mask"), given["query"], given["key"]
    assert isinstance(query, Node) and isinstance(key, Node)
    if not isinstance(mask, Node) or given.get("is_causal"):
        return Pattern.UNKNOWN
    pattern = masks(mask)
    square = query.meta["val"].shape[-2] == key.meta["val"].shape[-2]
    if pattern is Pattern.UNKNOWN or (pattern is Pattern.TRIANGLE and not square):
        return Pattern.UNKNOWN
    causal = pattern is Pattern.TRIANGLE
    node.args = (query, key, given["value"], None, given.get("dropout_p", 0.0), causal)
    node.kwargs = {k: v for k, v in given.items() if k in ("scale", "enable_gqa")}
    return pattern

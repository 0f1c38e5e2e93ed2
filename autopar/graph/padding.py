"""Which dims may be split into pieces that aren't equal: the last ranks' are padded with zeros.

A vocabulary of 50,257 words and 25 heads are split so over 2. Padding changes no number where
nothing that an op makes of it reaches a real element, forward or backward. Weights are zero there.
They stay zero, and so does every gradient of padding, if padding only ever

- is left out: rows of a table that nobody looks up, words that a cross-entropy doesn't count;
- is summed over in a product of two operands that are both zero there: each is the factor of the
  other's gradient.

So what ops make of padding is followed through the graph: a number, or None where it is only known
to be finite (a finite number times a gradient of zero is zero).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor

from autopar.graph.factors import Factor, Product, leaves
from autopar.graph.ops import VIEW_CLASSES, arguments, class_of, op_name
from autopar.graph.regions import BlockRegions

Padding = Mapping[torch.fx.Node, Tensor | None]
FINITE = frozenset({"add", "sub", "rsub", "mul", "neg", "tanh", "sigmoid", "relu", "gelu", "silu"})
FINITE |= {"clamp", "to", "clone", "contiguous", "detach", "alias", "where", "masked_fill"}
FINITE |= {"dropout"}
"""Pointwise ops that make finite numbers of any, with finite derivatives."""
SUMS = frozenset({"sum", "mean", "amax", "amin"})


class _ReachesError(Exception):
    """Padding reaches real elements, or nobody knows what becomes of it."""


def mark_padded(blocks: Sequence[BlockRegions]) -> None:
    """Sets `pads` on the dims of all blocks' regions that may be padded."""
    carried = Counter(leaf for block in blocks for leaf in _carried(block))
    for block in blocks:
        for internal in block.internal:
            for leaf in internal.leaves:
                alone = carried[leaf] == 1
                leaf.pads = alone and _stays_apart(block, leaf, internal.name)


def _carried(block: BlockRegions) -> set[Factor]:
    return {leaf for node in block.known.dims for leaf in block.tensor_leaves(node)}


def _stays_apart(block: BlockRegions, leaf: Factor, region: str) -> bool:
    """Whether padding of a dim of a region changes no number. All that touches it is of the region:
    padded pieces can't be cut or put together on the way."""
    made: dict[torch.fx.Node, Tensor | None] = {}
    for node in block.graph.nodes:
        if node.op == "placeholder" and leaf in block.tensor_leaves(node):
            if not block.weight(node) or node.name in block.captured.constants:
                return False
            made[node] = torch.zeros((), dtype=node.meta["val"].dtype)
        elif node.op == "call_function" and leaf in block.carried(node):
            if block.owner.get(node.name) != region:
                return False
            try:
                made[node] = _made_of(block, node, leaf, made)
            except _ReachesError:
                return False
    return True


def _made_of(
    block: BlockRegions, node: torch.fx.Node, leaf: Factor, made: Padding
) -> Tensor | None:
    """What an op makes of padding. Errors: _ReachesError."""
    info, kind = block.known.ops[node], class_of(op_name(node))
    given = [made[n] for n in node.all_input_nodes if n in made]
    whole = leaf in block.blocked(node) or _has(info.unlowered, leaf)
    if node.name in block.known.opaque or whole or not given:  # or born in the op, made whole
        raise _ReachesError
    if not any(leaf in leaves(dim) for dim in info.contract):
        return _made_apart(node, made, given)
    closed = any(leaf in leaves(dim) for dim in info.closed)
    product = kind == "contraction" and len(given) == 2 and all(map(_is_zero, given))
    if kind == "embedding" or (kind == "loss" and closed):
        return None
    if not product:
        raise _ReachesError
    return _zero(node)


def _has(reasons: Iterable[tuple[Product, str]], leaf: Factor) -> bool:
    return any(leaf in leaves(dim) for dim, _ in reasons)


def _made_apart(
    node: torch.fx.Node, made: Padding, given: Sequence[Tensor | None]
) -> Tensor | None:
    """What an op that sums nothing up along the dim makes of padding."""
    args, kind = arguments(node), class_of(op_name(node))
    if kind == "pointwise":
        return _pointwise(node, args, made)
    if kind == "normalisation" and args.get("eps", 1.0) != 0:
        return None
    if kind == "contraction":
        zero = any(map(_is_zero, given))
    elif kind == "attention":
        zero = _is_zero(made.get(args["value"]))
    elif kind in VIEW_CLASSES or kind == "embedding" or op_name(node) in SUMS:
        zero = all(map(_is_zero, given))
    else:
        raise _ReachesError
    return _zero(node) if zero else None


def _pointwise(node: torch.fx.Node, args: Mapping[str, Any], made: Padding) -> Tensor | None:
    name, operands = op_name(node), list(node.all_input_nodes)
    given = [made.get(n) for n in operands]
    if name in ("mul", "dropout") and any(map(_is_zero, given)):
        return _zero(node)
    if name == "div" and args["other"] not in made and _is_zero(made.get(args["self"])):
        return _zero(node)
    if all(value is not None for value in given):
        return _evaluated(node, made)
    if name not in FINITE:
        raise _ReachesError
    return None


def _evaluated(node: torch.fx.Node, made: Padding) -> Tensor:
    """An op on known numbers, if that and its derivatives are finite."""
    inputs: dict[torch.fx.Node, Tensor] = {}
    for n in node.all_input_nodes:
        value = made[n]
        assert value is not None
        inputs[n] = value.clone().requires_grad_(value.is_floating_point())
    try:
        with torch.enable_grad():
            args = torch.fx.map_arg(node.args, inputs.__getitem__)
            kwargs = torch.fx.map_arg(node.kwargs, inputs.__getitem__)
            result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError, IndexError) as error:  # not for tensors without dims
        raise _ReachesError from error
    if result.requires_grad:
        result.backward()
    _check_finite([result, *(i.grad for i in inputs.values() if i.grad is not None)])
    return result.detach()


def _check_finite(tensors: Iterable[Tensor]) -> None:
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise _ReachesError


def _is_zero(value: Tensor | None) -> bool:
    return value is not None and not value.count_nonzero()


def _zero(node: torch.fx.Node) -> Tensor:
    """Zero as an op makes it, in each of its outputs."""
    made = node.meta["val"]
    return torch.zeros((), dtype=(made[0] if isinstance(made, (list, tuple)) else made).dtype)

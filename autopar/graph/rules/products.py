"""Contractions, attention and look-ups in tables."""

from typing import Any

import torch.fx

from autopar.graph.factors import (
    FactorError,
    Product,
    resolve,
    set_hint,
    size,
    split_minor,
    unify,
)
from autopar.graph.ops import arguments, is_tensor, op_name
from autopar.graph.rules.base import Known, OpDims, broadcast, dims_of
from autopar.op_forms import Attention


def contraction(node: torch.fx.Node, known: Known) -> OpDims:
    """linear (bias split off before), matmul, mm, bmm, mv, dot, einsum."""
    args = arguments(node)
    if op_name(node) == "einsum":
        return _einsum(node, known)
    if op_name(node) == "linear":
        assert args["bias"] is None, "biases are separate adds by now"
        x, weight = dims_of(known, args["input"]), dims_of(known, args["weight"])
        unify(x[-1], weight[1])
        return OpDims([[*x[:-1], weight[0]]], contract=[weight[1]])
    x = dims_of(known, args["self"])
    y = dims_of(known, right_operand(args))
    inner = y[-2] if len(y) > 1 else y[0]
    unify(x[-1], inner)
    lead = broadcast([x[:-2], y[:-2]]) if len(x) > 2 or len(y) > 2 else []
    rows = [x[-2]] if len(x) > 1 else []
    columns = [y[-1]] if len(y) > 1 else []
    return OpDims([[*lead, *rows, *columns]], contract=[inner])


def right_operand(args: dict[str, Any]) -> torch.fx.Node:
    """The second operand of a product that isn't linear."""
    names = ("other", "mat2", "vec", "tensor")
    found: torch.fx.Node = next(args[name] for name in names if name in args)
    return found


def _einsum(node: torch.fx.Node, known: Known) -> OpDims:
    """Equal letters are equal dims; letters that the result doesn't have are contracted."""
    args = arguments(node)
    terms, result = einsum_terms(args["equation"])
    letters: dict[str, Product] = {}
    for term, operand in zip(terms, args["tensors"], strict=True):
        dims = dims_of(known, operand)
        if len(set(term)) != len(term) or len(term) != len(dims):
            raise FactorError(f"an einsum with a diagonal or dots ({args['equation']})")
        for letter, dim in zip(term, dims, strict=True):
            if size(letters.get(letter, [])) == 1:
                letters[letter] = dim
            elif size(dim) != 1:
                unify(letters[letter], dim)
    contracted = [dim for letter, dim in letters.items() if letter not in result]
    return OpDims([[letters[letter] for letter in result]], contract=contracted)


def einsum_terms(equation: str) -> tuple[list[str], str]:
    """The operands' letters and the result's; left out, those that stand once, in order."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        result = "".join(sorted(c for c in set(left) - {",", "."} if left.count(c) == 1))
    return left.split(","), result


def attention(node: torch.fx.Node, known: Known) -> OpDims:
    """Scaled dot-product attention: heads and batch are free, the sequence must be whole."""
    args = arguments(node)
    q, k, v = (dims_of(known, args[name]) for name in ("query", "key", "value"))
    for mine, theirs in zip(q[:-3], k[:-3], strict=True):
        unify(mine, theirs)
    if size(q[-3]) != size(k[-3]):
        groups, rest = split_minor(q[-3], size(q[-3]) // size(k[-3]))
        unify(groups, k[-3])
        set_hint(rest, "query_group")
        set_hint(k[-3], "kv_heads")
    else:
        unify(q[-3], k[-3])
        _name_heads(q[-3])
    for mine, theirs in zip(k[:-1], v[:-1], strict=True):
        unify(mine, theirs)
    unify(q[-1], k[-1])
    set_hint(q[-1], "head_dim")
    if size(q[-1]) == size(v[-1]):
        unify(q[-1], v[-1])  # one name for both; each must stay whole anyway
    set_hint(v[-1], "head_dim")
    set_hint(q[-2], "sequence")
    set_hint(k[-2], "sequence")
    mask = args["attn_mask"]
    if is_tensor(mask):
        for mine, theirs in zip(dims_of(known, mask)[::-1], [*q[:-1], k[-2]][::-1], strict=False):
            if size(mine) != 1:
                unify(mine, theirs)
    whole = "attention needs the whole sequence"
    inner = "attention scores sum over it"
    return OpDims(
        [[*q[:-1], v[-1]]],
        blocked=[(q[-2], whole), (k[-2], whole), (q[-1], inner), (v[-1], inner)],
    )


def is_attention(node: torch.fx.Node) -> bool:
    """Whether a node is an attention op."""
    return node.op == "call_function" and op_name(node) == "scaled_dot_product_attention"


def seen(known: Known, node: torch.fx.Node) -> Attention:
    """An attention op as strategies see it. Dims must be named."""
    args = arguments(node)
    q, k = dims_of(known, args["query"]), dims_of(known, args["key"])

    def names(dim: Product) -> tuple[str, ...]:
        plain = all(f.segments is None and f.order_of is None for f in resolve(dim))
        return tuple(f.name for f in resolve(dim)) if plain else ()

    def single(dim: Product) -> str:
        found = names(dim)
        return found[0] if len(found) == 1 else ""

    return Attention(
        node.name,
        single(q[-2]) if len(q) > 2 else "",
        single(k[-2]) if len(k) > 2 else "",
        names(q[-3]) if len(q) > 3 else (),
        names(k[-3]) if len(k) > 3 else (),
        bool(args["is_causal"]),
        args["attn_mask"] is not None,
        args["dropout_p"] > 0,
    )


def _name_heads(dim: Product) -> None:
    """Heads, or kv heads times the queries that share one (keys repeated by an expand)."""
    factors = resolve(dim)
    set_hint(factors[:1], "heads" if len(factors) == 1 else "kv_heads")
    if len(factors) == 2:
        set_hint(factors[1:], "query_group")


def embedding(node: torch.fx.Node, known: Known) -> OpDims:
    """Rows of a table: the table's first dim is contracted."""
    args = arguments(node)
    weight, indices = dims_of(known, args["weight"]), dims_of(known, args["indices"])
    set_hint(weight[0], "vocab")
    set_hint(weight[1], "hidden")
    return OpDims([[*indices, weight[1]]], contract=[weight[0]])

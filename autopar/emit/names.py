"""Names in an emitted module: unique, readable, and never a name that Python or the mesh uses."""

import builtins
import keyword
import math
import re
from collections.abc import Iterable

import torch.fx

from autopar.graph.factors import Cat, DimExpr, Leaf, expr_leaves, unsorted
from autopar.graph.model_graph import Block
from autopar.graph.ops import arguments, biased_product, class_of, op_name
from autopar.layouts.layout import Layout, Setting


def _attention_letter(node: torch.fx.Node) -> str:
    """q, k or v for a value that only attention uses, as that."""
    users = [u for u in node.users if u.op == "call_function"]
    if len(users) != 1 or op_name(users[0]) != "scaled_dot_product_attention":
        return ""
    args = arguments(users[0])
    return next((word[0] for word in ("query", "key", "value") if args[word] is node), "")


SHORT = {
    "scaled_dot_product_attention": "attention",
    "cross_entropy_loss": "loss_sum",
    "grouped_mm_fallback": "grouped",
    "_grouped_mm": "grouped",
    "histc": "counted",
    "cumsum": "running_sum",
    "argsort": "order",
    "repeat_interleave": "repeated",
    "index": "picked",
}
OUTPUTS = {"topk": ("largest", "chosen"), "sort": ("sorted_values", "order")}


class Names:
    """Hands out identifiers; `reserved` ones are never given."""

    def __init__(self, reserved: Iterable[str]) -> None:
        self.taken = {*keyword.kwlist, *dir(builtins), "self", "torch", "F", *reserved}

    def fresh(self, wish: str) -> str:
        """The wish as an identifier, numbered if it is taken."""
        stem = re.sub(r"\W", "_", wish) or "value"
        stem = f"m{stem}" if stem[0].isdigit() else stem
        name, number = stem, 2
        while name in self.taken:
            name, number = f"{stem}_{number}", number + 1
        self.taken.add(name)
        return name


def module_path(node: torch.fx.Node) -> str:
    """The innermost module that a node was traced in ("" for the root)."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    return paths[-1] if paths else ""


def wish(node: torch.fx.Node) -> str:
    """A good variable name for an op's result."""
    if node.op == "placeholder":
        return node.name
    letter = _attention_letter(node)
    if letter:
        return letter
    kind, leaf = class_of(op_name(node)), module_path(node).rpartition(".")[2]
    if op_name(node) == "add" and (product := biased_product(node)) is not None:
        return wish(product)
    if kind in ("contraction", "normalisation", "embedding") and leaf and not leaf.isdigit():
        return leaf
    if kind in ("view", "permute", "concat_split", "getitem") and node.args:
        source = node.args[0]
        if isinstance(source, torch.fx.Node) and source.op == "call_function":
            if kind == "getitem" and op_name(source) in OUTPUTS:
                return OUTPUTS[op_name(source)][int(str(node.args[1]))]
            return wish(source)
    if leaf and leaf.isidentifier() and _leaves_module(node):
        return leaf
    return SHORT.get(op_name(node), op_name(node))


def _leaves_module(node: torch.fx.Node) -> bool:
    """Whether a value is what its module returns: all its users are outside."""
    path = module_path(node)
    users = [u for u in node.users if u.op == "call_function"]
    return bool(users) and all(not f"{module_path(user)}.".startswith(f"{path}.") for user in users)


class Lengths:
    """Writes local sizes with the names of dims and axes; remembers which it used."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.used: dict[str, Leaf] = {}

    def text(self, expr: DimExpr, layout: Layout) -> str:
        """A tensor dim's local size: "batch // dp", "(heads // tp) * head_dim"."""
        words = [self._factor(factor, layout) for factor in unsorted(expr)]
        numbers = [int(word) for word in words if word.isdigit()]
        if len(numbers) > 1:
            words = [*(word for word in words if not word.isdigit()), str(math.prod(numbers))]
        if not words:
            return "1"
        if len(words) == 1:
            return words[0]
        return " * ".join(f"({w})" if "//" in w else w for w in words)

    def _factor(self, factor: Leaf | Cat, layout: Layout) -> str:
        if isinstance(factor, Cat):
            segments = [self.text(s, layout) for s in factor.segments]
            if len(set(segments)) == 1 and not segments[0].isdigit():
                inner = segments[0]
                return (
                    f"{len(segments)} * ({inner})"
                    if "//" in inner
                    else (f"{len(segments)} * {inner}")
                )
            return str(self.setting.local_length((factor,), layout))
        split = layout.split(factor.name)
        if factor.name.startswith("dim_"):
            return str(self.setting.local_length((factor,), layout))
        self.used[factor.name] = factor
        if factor.padded(split):
            pieces = " * ".join(part.axis for part in split)
            return f"-(-{factor.name} // {pieces if len(split) == 1 else f'({pieces})'})"
        return factor.name + "".join(f" // {part.axis}" for part in split)


def reserved_names(block: Block, setting: Setting, runtime: Iterable[str]) -> set[str]:
    """What variables of a block's methods must not be called."""
    dims = {
        leaf.name
        for value in block.values.values()
        for expr in value.dims
        for leaf in expr_leaves(expr)
    }
    return dims | {axis for axis, _ in setting.mesh.axes} | set(runtime)

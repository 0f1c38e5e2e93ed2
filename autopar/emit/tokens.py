"""How ops that choose, sort, pick and count tokens read in Python."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.fx

from autopar.graph.ops import arguments, op_name

Text = Callable[[Any], str]
"""The text of one argument: an operand as the op needs it, or a literal."""
Form = Callable[[torch.fx.Node, Text], str]


def _call(function: str, *words: str, **options: Any) -> str:
    """A call; options that are None or False, torch's defaults, are left out."""
    given = [f"{k}={value}" for k, value in options.items() if value is not None]
    given = [word for word in given if not word.endswith("=False")]
    return f"{function}({', '.join([*words, *given])})"


def _topk(node: torch.fx.Node, text: Text) -> str:
    args = arguments(node)
    call = _call("torch.topk", text(args["self"]), str(args["k"]), dim=args["dim"])
    for option in ("largest", "sorted"):
        if not args[option]:
            call = f"{call[:-1]}, {option}=False)"
    return call


def _scatter(node: torch.fx.Node, text: Text) -> str:
    args = arguments(node)
    written = args["src"] if "src" in args else args["value"]
    words = [text(args["self"]), str(args["dim"]), text(args["index"]), text(written)]
    return _call(f"torch.{op_name(node)}", *words)


def _index_add(node: torch.fx.Node, text: Text) -> str:
    args = arguments(node)
    words = [text(args["self"]), str(args["dim"]), text(args["index"]), text(args["source"])]
    alpha = None if args["alpha"] == 1 else args["alpha"]
    return _call("torch.index_add", *words, alpha=alpha)


def _index_put(node: torch.fx.Node, text: Text) -> str:
    args = arguments(node)
    places = ", ".join("None" if given is None else text(given) for given in args["indices"])
    words = [text(args["self"]), f"[{places}]", text(args["values"])]
    # torch.index_put itself takes no None.
    return _call("torch.ops.aten.index_put", *words, accumulate=args["accumulate"])


def _repeat_interleave(node: torch.fx.Node, text: Text) -> str:
    args = arguments(node)
    return _call(
        "torch.repeat_interleave", text(args["self"]), str(args["repeats"]), dim=args["dim"]
    )


def _histc(node: torch.fx.Node, text: Text) -> str:
    args = arguments(node)
    words = [f"{name}={args[name]}" for name in ("bins", "min", "max")]
    return _call("torch.histc", text(args["self"]), *words)


def _searchsorted(node: torch.fx.Node, text: Text) -> str:
    args = arguments(node)
    right = args["right"] or args["side"] == "right"
    words = [text(args["sorted_sequence"]), text(args["self"])]
    return _call("torch.searchsorted", *words, out_int32=args["out_int32"], right=right)


def _grouped_mm(node: torch.fx.Node, text: Text) -> str:
    args = arguments(node)
    rows, weights = args.get("input", args.get("self")), args.get("weight", args.get("mat2"))
    # torch's own takes no float64.
    wide = node.meta["val"].dtype == torch.float64
    function = "grouped_mm" if wide else "F.grouped_mm"
    return _call(function, text(rows), text(weights), offs=text(args["offs"]))


_FORMS: Mapping[str, Form] = {
    "topk": _topk,
    "scatter": _scatter,
    "scatter_add": _scatter,
    "index_add": _index_add,
    "index_put": _index_put,
    "repeat_interleave": _repeat_interleave,
    "histc": _histc,
    "searchsorted": _searchsorted,
    "_grouped_mm": _grouped_mm,
    "grouped_mm_fallback": _grouped_mm,
}


class _Printer(Protocol):
    def arg(self, node: torch.fx.Node, value: Any) -> str: ...


def _by_printer(form: Form) -> Callable[[_Printer, torch.fx.Node], str]:
    return lambda printer, node: form(node, lambda value: printer.arg(node, value))


FORMS = {name: _by_printer(form) for name, form in _FORMS.items()}

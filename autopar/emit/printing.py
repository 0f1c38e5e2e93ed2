"""How each op reads in Python: one small function per form, keyed by the op's name."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.fx

from autopar.emit import channels, functions, tokens
from autopar.emit.functions import CALLS, call_text
from autopar.emit.text import atom, receiver
from autopar.graph.factors import Cat, Leaf
from autopar.graph.ops import arguments, op_name, shape_of


class Scope(Protocol):
    """What a printer may ask for."""

    def operand(self, node: torch.fx.Node, source: torch.fx.Node) -> str:
        """The text of an input in the layout that the op needs."""

    def out_shape(self, node: torch.fx.Node) -> list[str]:
        """The local size of each dim of the op's result, as text."""

    def pieces(self, node: torch.fx.Node) -> list[str]:
        """For an op with several outputs: the local size of each along the op's dim."""

    def split_axes(self, node: torch.fx.Node, source: torch.fx.Node, dim: int) -> tuple[str, ...]:
        """The axes over which an input's dim is split as the op takes it."""

    def padded(self, node: torch.fx.Node, source: torch.fx.Node, dim: int) -> str:
        """The whole size of an input's dim as text where ranks' pieces are padded, or ""."""

    def bounds(self, node: torch.fx.Node) -> tuple[int, int | None]:
        """For a slice: local start and stop."""

    def is_opaque(self, node: torch.fx.Node) -> bool:
        """Whether the op runs as it was captured."""

    def local_shape(self, node: torch.fx.Node, source: torch.fx.Node) -> tuple[int, ...]:
        """The local shape of an input as the op takes it."""

    def local_out(self, node: torch.fx.Node) -> tuple[int, ...]:
        """The local shape of the op's result."""

    def form(self, node: torch.fx.Node) -> tuple[str, tuple[str, ...]] | None:
        """The function that runs the op in its strategy's way, and the axes that it takes."""


BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floor_divide": "//", "lt": "<",
          "gt": ">", "le": "<=", "ge": ">=", "eq": "==", "ne": "!=", "matmul": "@", "mm": "@",
          "bmm": "@", "bitwise_and": "&", "bitwise_or": "|"}  # fmt: skip
TORCH_UNARY = "tanh rsqrt sqrt exp log sigmoid abs cos sin erf logical_not zeros_like ones_like"
LOSSES = {"cross_entropy_loss": "cross_entropy", "nll_loss": "nll_loss", "mse_loss": "mse_loss",
          "l1_loss": "l1_loss",
    "smooth_l1_loss": "smooth_l1_loss",
    "huber_loss": "huber_loss",
          "binary_cross_entropy_with_logits": "binary_cross_entropy_with_logits"}  # fmt: skip


FORMS = {**channels.FORMS, **functions.FORMS, **tokens.FORMS}


class Printer:
    """Prints one op as an expression."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def text(self, node: torch.fx.Node) -> str:
        """The op as a Python expression over its operands' texts."""
        name = op_name(node)
        if self.scope.is_opaque(node):
            return self._generic(node)
        if name in BINARY:
            return self._binary(node, BINARY[name])
        if name in TORCH_UNARY.split():
            return f"torch.{name}({self._self(node)})"
        if name in LOSSES:
            return self._loss(node, LOSSES[name])
        method: Callable[[torch.fx.Node], str] | None = getattr(self, f"_op_{name}", None)
        if method is not None:
            return method(node)
        form = FORMS.get(name) or (call_text if name in CALLS else None)
        return form(self, node) if form is not None else self._generic(node)

    # ---- helpers

    def arg(self, node: torch.fx.Node, value: Any) -> str:
        """An argument's text: a tensor as the op takes it, a list of such, a number."""
        if isinstance(value, torch.fx.Node):
            return self.scope.operand(node, value)
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self.arg(node, v) for v in value) + "]"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        return repr(value)

    def _self(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        return self.arg(node, args.get("self", args.get("input")))

    def _on(self, node: torch.fx.Node) -> str:
        return receiver(self._self(node))

    def _binary(self, node: torch.fx.Node, sign: str) -> str:
        args = arguments(node)
        other = args["other"] if "other" in args else args["mat2"]
        alpha = args.get("alpha", 1)
        right = atom(self.arg(node, other))
        if alpha != 1:
            right = f"{alpha} * {right}"
        if args.get("rounding_mode"):
            return (
                f"torch.div({self._self(node)}, {self.arg(node, other)}, "
                f"rounding_mode={args['rounding_mode']!r})"
            )
        return f"{atom(self._self(node))} {sign} {right}"

    def _generic(self, node: torch.fx.Node) -> str:
        args = [self.arg(node, a) for a in node.args]
        args += [f"{k}={self.arg(node, v)}" for k, v in node.kwargs.items() if k != "device"]
        return f"torch.ops.{node.target}({', '.join(args)})"

    def _loss(self, node: torch.fx.Node, function: str) -> str:
        args = arguments(node)
        words = [self._self(node), self.arg(node, args["target"])]
        axes = (
            self.scope.split_axes(node, args["self"], -1) if args["self"].meta["val"].dim() else ()
        )
        if function == "cross_entropy" and axes:
            words.append(self.axis(axes))
            if classes := self.scope.padded(node, args["self"], -1):
                words.append(f"classes={classes}")
            if args["ignore_index"] != -100:
                words.append(f"ignore_index={args['ignore_index']}")
            return f"vocab_cross_entropy({', '.join(words)})"
        if args.get("weight") is not None:
            words.append(f"weight={self.arg(node, args['weight'])}")
        if args.get("pos_weight") is not None:
            words.append(f"pos_weight={self.arg(node, args['pos_weight'])}")
        for option in ("beta", "delta"):
            if args.get(option, 1.0) != 1.0:
                words.append(f"{option}={args[option]}")
        if args.get("ignore_index", -100) != -100:
            words.append(f"ignore_index={args['ignore_index']}")
        if args.get("label_smoothing"):
            words.append(f"label_smoothing={args['label_smoothing']}")
        assert args["reduction"] == 2, node
        return f'F.{function}({", ".join(words)}, reduction="sum")'

    @staticmethod
    def axis(axes: tuple[str, ...]) -> str:
        """The keyword that passes a group of the mesh."""
        names = ", ".join(f'"{axis}"' for axis in axes)
        return f"axis=self.mesh[{names}]"

    # ---- pointwise

    def _op_neg(self, node: torch.fx.Node) -> str:
        return f"-{atom(self._self(node))}"

    def _op_bitwise_not(self, node: torch.fx.Node) -> str:
        return f"~{atom(self._self(node))}"

    def _op_pow(self, node: torch.fx.Node) -> str:
        return f"{self._on(node)}.pow({self.arg(node, arguments(node)['exponent'])})"

    def _op_gelu(self, node: torch.fx.Node) -> str:
        approximate = arguments(node)["approximate"]
        extra = "" if approximate == "none" else f", approximate={approximate!r}"
        return f"F.gelu({self._self(node)}{extra})"

    def _op_to(self, node: torch.fx.Node) -> str:
        dtype = node.meta["val"].dtype
        source = node.all_input_nodes[0]
        if source.meta["val"].dtype == dtype:
            return self._self(node)
        return f"{self._on(node)}.to({dtype})"

    def _op_contiguous(self, node: torch.fx.Node) -> str:
        return f"{self._on(node)}.contiguous()"

    def _op_clone(self, node: torch.fx.Node) -> str:
        return f"{self._on(node)}.clone()"

    def _op_detach(self, node: torch.fx.Node) -> str:
        return f"{self._on(node)}.detach()"

    def _op_dropout(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        return f"F.dropout({self._self(node)}, {args['p']}, self.training)"

    def _op_alpha_dropout(self, node: torch.fx.Node) -> str:
        return f"F.alpha_dropout({self._self(node)}, {arguments(node)['p']}, self.training)"

    def _op_feature_dropout(self, node: torch.fx.Node) -> str:
        return f"torch.feature_dropout({self._self(node)}, {arguments(node)['p']}, self.training)"

    def _op_feature_alpha_dropout(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        return f"F.feature_alpha_dropout({self._self(node)}, {args['p']}, self.training)"

    def _op_where(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        words = [self.arg(node, args[k]) for k in ("condition", "self", "other")]
        return f"torch.where({', '.join(words)})"

    def _op_masked_fill(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        mask, value = self.arg(node, args["mask"]), self.arg(node, args["value"])
        return f"{self._on(node)}.masked_fill({mask}, {value})"

    def _op_rsub(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        return f"{atom(self.arg(node, args['other']))} - {atom(self._self(node))}"

    # ---- contraction, normalisation, attention

    def _op_linear(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        return f"F.linear({self._self(node)}, {self.arg(node, args['weight'])})"

    def _op_layer_norm(self, node: torch.fx.Node) -> str:
        return self._norm(node, "layer_norm", ("weight", "bias"))

    def _op_rms_norm(self, node: torch.fx.Node) -> str:
        return self._norm(node, "rms_norm", ("weight",))

    def _norm(self, node: torch.fx.Node, function: str, parameters: tuple[str, ...]) -> str:
        args = arguments(node)
        sizes = self.scope.out_shape(node)[-len(args["normalized_shape"]) :]
        shape = f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
        words = [self._self(node), shape, *(self.arg(node, args[p]) for p in parameters)]
        if args["eps"] is not None:
            words.append(f"eps={args['eps']}")
        return f"F.{function}({', '.join(words)})"

    def _op_softmax(self, node: torch.fx.Node) -> str:
        return f"{self._on(node)}.softmax({self._dim_dtype(node)})"

    def _op_log_softmax(self, node: torch.fx.Node) -> str:
        return f"{self._on(node)}.log_softmax({self._dim_dtype(node)})"

    def _dim_dtype(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        return f"dim={args['dim']}" + (f", dtype={args['dtype']}" if args["dtype"] else "")

    def _op_scaled_dot_product_attention(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        words = [self.arg(node, args[k]) for k in ("query", "key", "value")]
        if args["attn_mask"] is not None:
            words.append(f"attn_mask={self.arg(node, args['attn_mask'])}")
        if args["dropout_p"]:
            words.append(f"dropout_p={args['dropout_p']} if self.training else 0.0")
        if args["is_causal"]:
            words.append("is_causal=True")
        if args["scale"] is not None:
            words.append(f"scale={args['scale']}")
        if args["enable_gqa"]:
            words.append("enable_gqa=True")
        form = self.scope.form(node)
        if form is not None:
            function, axes = form
            return f"{function}({', '.join([*words, self.axis(axes)])})"
        return f"F.scaled_dot_product_attention({', '.join(words)})"

    def _op_embedding(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        words = [self.arg(node, args["indices"]), self.arg(node, args["weight"])]
        padded = args["padding_idx"] not in (None, -1)
        padding = [f"padding_idx={args['padding_idx']}"] if padded else []
        axes = self.scope.split_axes(node, args["weight"], 0)
        if axes:
            return f"vocab_embedding({', '.join([*words, self.axis(axes), *padding])})"
        return f"F.embedding({', '.join([*words, *padding])})"

    # ---- reductions and views

    def _op_sum(self, node: torch.fx.Node) -> str:
        return self._reduce(node, "sum")

    def _op_mean(self, node: torch.fx.Node) -> str:
        return self._reduce(node, "mean")

    def _reduce(self, node: torch.fx.Node, method: str) -> str:
        args = arguments(node)
        words = []
        dims = args.get("dim")
        if dims is not None:
            words.append(str(dims[0] if len(dims) == 1 else tuple(dims)))
        if args.get("keepdim"):
            words.append("keepdim=True")
        if args.get("dtype"):
            words.append(f"dtype={args['dtype']}")
        return f"{self._on(node)}.{method}({', '.join(words)})"

    def _op_view(self, node: torch.fx.Node) -> str:
        if shape_of(node) == shape_of(arguments(node)["self"]):
            return self._self(node)
        method = "view" if op_name(node) == "view" else "reshape"
        return f"{self._on(node)}.{method}({', '.join(self.scope.out_shape(node))})"

    _op_reshape = _op_unflatten = _op_flatten = _op_view

    def _op_expand(self, node: torch.fx.Node) -> str:
        return f"{self._on(node)}.expand({', '.join(self.scope.out_shape(node))})"

    def _op_transpose(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        return f"{self._on(node)}.transpose({args['dim0']}, {args['dim1']})"

    def _op_t(self, node: torch.fx.Node) -> str:
        return f"{self._on(node)}.t()"

    def _op_permute(self, node: torch.fx.Node) -> str:
        return f"{self._on(node)}.permute({', '.join(map(str, arguments(node)['dims']))})"

    def _op_unsqueeze(self, node: torch.fx.Node) -> str:
        return f"{self._on(node)}.unsqueeze({arguments(node)['dim']})"

    def _op_squeeze(self, node: torch.fx.Node) -> str:
        dim = arguments(node).get("dim")
        inner = "" if dim is None else str(dim if isinstance(dim, int) else tuple(dim))
        return f"{self._on(node)}.squeeze({inner})"

    def _op_split(self, node: torch.fx.Node) -> str:
        sizes = self.scope.pieces(node)
        dim = arguments(node)["dim"]
        if len(set(sizes)) == 1:
            return f"{self._on(node)}.split({sizes[0]}, dim={dim})"
        return f"{self._on(node)}.split([{', '.join(sizes)}], dim={dim})"

    _op_split_with_sizes = _op_chunk = _op_split

    def _op_cat(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        return f"torch.cat({self.arg(node, args['tensors'])}, dim={args['dim']})"

    def _op_select(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        return f"{self._on(node)}.select({args['dim']}, {args['index']})"

    def _op_slice(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        rank = len(shape_of(node))
        dim = args["dim"] % rank
        start, stop = self.scope.bounds(node)
        step = "" if args["step"] == 1 else f":{args['step']}"
        inner = f"{start or ''}:{'' if stop is None else stop}{step}"
        if inner == ":":
            return self._self(node)
        before = [":"] * dim
        return f"{self._on(node)}[{', '.join([*before, inner])}]"

    def _op_pad(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        value = args["value"]
        if value is not None and not node.meta["val"].is_floating_point():
            value = int(value)
        extra = f", value={value}" if args["mode"] == "constant" else f", mode={args['mode']!r}"
        return f"F.pad({self._self(node)}, {tuple(args['pad'])}{extra})"

    # ---- constants

    def _op_arange(self, node: torch.fx.Node) -> str:
        args = arguments(node)
        words = [repr(args[k]) for k in ("start", "end", "step") if args.get(k) is not None]
        dtype = node.meta["val"].dtype
        extra = "" if dtype == torch.int64 else f", dtype={dtype}"
        return f"torch.arange({', '.join(words)}{extra}, device=self.mesh.device)"

    def _filled(self, node: torch.fx.Node, function: str, value: str = "") -> str:
        shape = ", ".join(self.scope.out_shape(node))
        dtype = node.meta["val"].dtype
        comma = "," if shape else ""
        return f"torch.{function}(({shape}{comma}){value}, dtype={dtype}, device=self.mesh.device)"

    def _op_zeros(self, node: torch.fx.Node) -> str:
        return self._filled(node, "zeros")

    def _op_ones(self, node: torch.fx.Node) -> str:
        return self._filled(node, "ones")

    def _op_full(self, node: torch.fx.Node) -> str:
        return self._filled(node, "full", f", {arguments(node)['fill_value']!r}")


def segment_bounds(
    expr: tuple[Leaf | Cat, ...],
    local: Callable[[Any], int],
    whole: Callable[[Any], int],
    start: int,
    stop: int,
) -> tuple[int, int]:
    """Where a whole dim's slice lies locally: the local sizes of the segments before and in it."""
    if len(expr) == 1 and isinstance(expr[0], Cat):
        position = low = high = 0
        for segment in _flat(expr[0]):
            if position < start:
                low += local(segment)
            if position < stop:
                high += local(segment)
            position += whole(segment)
        return low, high
    assert local(expr) == whole(expr), "a slice of a split dim"
    return start, stop


def _flat(cat: Cat) -> list[Any]:
    out: list[Any] = []
    for segment in cat.segments:
        if len(segment) == 1 and isinstance(segment[0], Cat):
            out += _flat(segment[0])
        else:
            out.append(segment)
    return out

"""Ops that read as one call of a torch function with the op's own argument names."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch.fx

from autopar.capture.schema import schema_of
from autopar.emit.text import receiver
from autopar.graph.ops import arguments, op_name

_TORCH = (
    "acos addcdiv addcmul amax amin any all argmax argmin argsort asin atan atan2 ceil clamp "
    "clamp_max clamp_min cosh cumprod cumsum diff dot einsum erfc exp2 expm1 fmod flip floor frac "
    "gather hypot index_select isfinite isinf isnan lerp log10 log1p log2 logcumsumexp logical_and "
    "logical_or logical_xor logsumexp max maximum min minimum moveaxis movedim mv nan_to_num norm "
    "prod reciprocal remainder roll round sgn sign sinh sort square stack std swapaxes swapdims "
    "take_along_dim tan tril triu trunc unbind var xlogy"
)
_FUNCTIONAL = (
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "celu cosine_similarity elu hardshrink hardsigmoid hardswish hardtanh leaky_relu max_pool1d "
    "max_pool2d max_pool3d mish one_hot prelu relu relu6 selu silu softplus softshrink "
    "threshold"
)
CALLS: Mapping[str, str] = {
    **{name: f"torch.{name}" for name in _TORCH.split()},
    **{name: f"F.{name}" for name in _FUNCTIONAL.split()},
    "bitwise_xor": "torch.bitwise_xor",
    "linalg_vector_norm": "torch.linalg.vector_norm",
    "log_sigmoid": "F.logsigmoid",
}
"""Op name → the function that takes the same arguments under the same names."""


class _Printer(Protocol):
    def arg(self, node: torch.fx.Node, value: Any) -> str: ...


def call_text(printer: _Printer, node: torch.fx.Node) -> str:
    """The call: tensors by position, all else by name, defaults left out."""
    schema = schema_of(node)
    assert schema is not None
    values = arguments(node)
    words: list[str] = []
    named = False
    for argument in schema.arguments:
        name, value = argument.name, values[argument.name]
        if argument.has_default_value() and value == argument.default_value:
            named = True
            continue
        tensors = isinstance(value, torch.fx.Node) or (
            isinstance(value, (list, tuple)) and any(isinstance(v, torch.fx.Node) for v in value)
        )
        positional = not named and (tensors or name == "equation")
        named |= not positional
        text = printer.arg(node, value)
        words.append(text if positional else f"{name}={text}")
    return f"{CALLS[op_name(node)]}({', '.join(words)})"


def index_text(printer: _Printer, node: torch.fx.Node) -> str:
    """x[i, :, j]."""
    args = arguments(node)
    words = [":" if i is None else printer.arg(node, i) for i in args["indices"]]
    return f"{receiver(printer.arg(node, args['self']))}[{', '.join(words)}]"


FORMS: Mapping[str, Callable[[Any, torch.fx.Node], str]] = {"index": index_text}

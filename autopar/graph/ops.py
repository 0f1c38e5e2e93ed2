"""Ops by class, and their arguments by name.

Everything that the compiler knows about an op hangs on its class: the factor rule, how partial
sums flow through it, what it costs. Adding an op of a known class is one word here.
"""

import functools
import operator
from typing import Any

import torch
import torch.fx

from autopar.capture.schema import schema_of

OPS_BY_CLASS: dict[str, str] = {
    "pointwise": "add sub mul div pow tanh silu relu gelu neg rsqrt sqrt exp log sigmoid to clone "
    "contiguous dropout abs where masked_fill lt gt le ge eq ne logical_and logical_or "
    "logical_not logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not rsub minimum maximum "
    "cos sin tan acos asin atan atan2 cosh sinh softplus erf erfc leaky_relu elu celu selu relu6 "
    "hardswish hardsigmoid hardtanh mish log_sigmoid hardshrink softshrink "
    "threshold zeros_like ones_like full_like detach floor_divide remainder fmod clamp clamp_min "
    "clamp_max square reciprocal log1p log2 log10 expm1 exp2 sign sgn floor ceil round trunc frac "
    "alpha_dropout lerp addcmul addcdiv isnan isinf isfinite nan_to_num hypot xlogy alias",
    "channelwise": "prelu",
    "feature_dropout": "feature_dropout feature_alpha_dropout",
    "scan": "cumsum cumprod logcumsumexp flip roll tril triu",
    "difference": "diff",
    "contraction": "linear matmul mm bmm mv dot einsum",
    "normalisation": "layer_norm rms_norm softmax log_softmax",
    "batch_norm": "batch_norm",
    "channel_norm": "group_norm instance_norm",
    "convolution": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    "window": "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
    "adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices upsample_nearest1d "
    "upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
    "upsample_bicubic2d upsample_trilinear3d",
    "reduction": "mean sum amax amin max min argmax argmin prod any all std var norm "
    "linalg_vector_norm logsumexp cosine_similarity",
    "index": "index index_select gather take_along_dim one_hot",
    "view": "view reshape unflatten flatten",
    "permute": "transpose permute t unsqueeze squeeze expand swapaxes swapdims movedim moveaxis",
    "concat_split": "split split_with_sizes chunk cat slice select unbind stack",
    "repeat": "repeat tile",
    "repeat_interleave": "repeat_interleave",
    "top_k": "topk",
    "sort": "sort argsort",
    "search": "searchsorted",
    "scatter": "scatter scatter_add",
    "index_add": "index_add",
    "index_put": "index_put",
    "count": "histc",
    "grouped": "_grouped_mm grouped_mm_fallback",
    "pad": "pad",
    "attention": "scaled_dot_product_attention",
    "embedding": "embedding",
    "loss": "cross_entropy_loss nll_loss mse_loss l1_loss smooth_l1_loss huber_loss "
    "binary_cross_entropy_with_logits",
    "buffer_update": "add_ sub_ mul_ div_ pow_ copy_ fill_ zero_ lerp_ addcmul_ addcdiv_ clamp_ "
    "masked_fill_ logical_or_ logical_and_ bitwise_or_ bitwise_and_",
    "constant": "arange zeros ones full scalar_tensor eye linspace",
    "getitem": "getitem",
    "layer": "layer",
}

VIEW_CLASSES = frozenset({"view", "permute", "concat_split", "getitem"})
"""Classes that move no data of their own and through which partial sums pass."""


def op_name(node: torch.fx.Node) -> str:
    """The op's name without namespace and overload: "add", "linear", "getitem"."""
    if node.target is operator.getitem:
        return "getitem"
    schema = schema_of(node)
    assert schema is not None, node.target
    return str(schema.name.split("::")[1])


@functools.cache
def class_of(name: str) -> str | None:
    """The class of an op by name, or None for an op that has no rule."""
    return next((c for c, names in OPS_BY_CLASS.items() if name in names.split()), None)


def arguments(node: torch.fx.Node) -> dict[str, Any]:
    """All arguments by the schema's names, defaults filled in (the export drops them)."""
    if node.target is operator.getitem:
        return {"self": node.args[0], "index": node.args[1]}
    schema = schema_of(node)
    assert schema is not None, node.target
    given = dict(node.kwargs)
    out: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            out[argument.name] = node.args[position]
        elif argument.name in given:
            out[argument.name] = given[argument.name]
        else:
            out[argument.name] = argument.default_value if argument.has_default_value() else None
    return out


def is_tensor(value: Any) -> bool:
    """Whether this is a node that holds one tensor."""
    return isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def shape_of(node: torch.fx.Node) -> tuple[int, ...]:
    """The whole tensor's shape, as captured."""
    return tuple(int(length) for length in node.meta["val"].shape)


def drops(node: torch.fx.Node) -> bool:
    """Whether an op (not a layer's own code) drops at random in training."""
    name = op_name(node)
    if name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"):
        return bool(arguments(node)["p"] > 0)
    return name == "scaled_dot_product_attention" and bool(arguments(node)["dropout_p"] > 0)


def biased_product(node: torch.fx.Node) -> torch.fx.Node | None:
    """The contraction that an add gives its bias to, or None for another add."""
    args = arguments(node)
    product, bias = args["self"], args["other"]
    if not (isinstance(product, torch.fx.Node) and isinstance(bias, torch.fx.Node)):
        return None
    if product.op != "call_function" or class_of(op_name(product)) != "contraction":
        return None
    is_bias = bias.op == "placeholder" and bias.meta["val"].dim() == 1
    return product if is_bias else None

"""Convolutions, pooling and resampling: what works on windows of space."""

import torch.fx

from autopar.graph.factors import FactorError, Product, new_dim, set_hint, size, split_minor, unify
from autopar.graph.ops import arguments, is_tensor, op_name, shape_of
from autopar.graph.rules.base import Dims, Known, OpDims, dims_of


def convolution(node: torch.fx.Node, known: Known) -> OpDims:
    """conv1d, conv2d, conv3d and their transposes (bias split off before): input channels are
    contracted group by group, groups are free, space must be whole."""
    args, name = arguments(node), op_name(node)
    assert args["bias"] is None, "biases are separate adds by now"
    x, weight = dims_of(known, args["input"]), dims_of(known, args["weight"])
    groups, space = args["groups"], int(name[-2])
    if len(x) != space + 2:
        raise FactorError("a convolution without a batch dim")
    out_groups, outer = _grouped(x[1], groups)
    if name.startswith("conv_transpose"):  # weight: [groups · in, out, …]
        unify(x[1], weight[0])
        channels, contracted = [*out_groups, *weight[1]], outer
    else:  # weight: [groups · out, in, …]
        unify(outer, weight[1])
        unify(_grouped(weight[0], groups)[0], out_groups)
        channels, contracted = weight[0], weight[1]
    set_hint(channels, "channels")
    moved, blocked = _space(node, x[2:], name)
    kernel = [(dim, "a convolution's kernel") for dim in weight[2:]]
    return OpDims([[x[0], channels, *moved]], contract=[contracted], blocked=[*blocked, *kernel])


def _grouped(channels: Product, groups: int) -> tuple[Product, Product]:
    """Channels as groups · channels of a group."""
    return split_minor(channels, size(channels) // groups) if groups > 1 else ([], channels)


def window(node: torch.fx.Node, known: Known) -> OpDims:
    """max_pool2d, avg_pool2d, adaptive pooling, upsampling: batch and channels are free."""
    args, name = arguments(node), op_name(node)
    x = dims_of(known, args.get("self", args.get("input")))
    space = int(name[name.index("d") - 1] if "pool" not in name else name.split("pool")[1][0])
    moved, blocked = _space(node, x[len(x) - space :], name)
    out = [*x[: len(x) - space], *moved]
    values = node.meta["val"]
    return OpDims(
        [out] * (len(values) if isinstance(values, (list, tuple)) else 1), blocked=blocked
    )


def _space(node: torch.fx.Node, before: Dims, name: str) -> tuple[Dims, list[tuple[Product, str]]]:
    """The dims of space after an op on windows, and both sides' as blocked."""
    shape = shape_of(node) if is_tensor(node) else tuple(map(int, node.meta["val"][0].shape))
    after = [new_dim(length) for length in shape[len(shape) - len(before) :]]
    return after, [(dim, f"{name} runs along it") for dim in [*before, *after]]

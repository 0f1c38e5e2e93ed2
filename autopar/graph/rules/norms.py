"""Normalisations."""

import torch.fx

from autopar.graph.factors import FactorError, Product, set_hint, size, split_minor, unify
from autopar.graph.ops import arguments, is_tensor, op_name
from autopar.graph.rules.base import Known, OpDims, dims_of


def normalisation(node: torch.fx.Node, known: Known) -> OpDims:
    """layer_norm, rms_norm, softmax: whole along the normalised dims."""
    args = arguments(node)
    x = dims_of(known, args.get("input") or args["self"])
    if op_name(node) in ("softmax", "log_softmax"):
        return OpDims([x], blocked=[(x[args["dim"]], "softmax runs along it")])
    count = len(args["normalized_shape"])
    for parameter in (args["weight"], args.get("bias")):
        if is_tensor(parameter):
            for mine, theirs in zip(dims_of(known, parameter), x[-count:], strict=True):
                unify(mine, theirs)
    set_hint(x[-1], "hidden")
    return OpDims([x], blocked=[(dim, f"{op_name(node)} runs along it") for dim in x[-count:]])


def batch_norm(node: torch.fx.Node, known: Known) -> OpDims:
    """Statistics of each channel over the batch and space: where the batch is split, the op adds
    them up over its axes itself (synchronised batch norm)."""
    args = arguments(node)
    x = dims_of(known, args["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        if is_tensor(args[name]):
            unify(dims_of(known, args[name])[0], x[1])
    set_hint(x[1], "channels")
    if not args["training"]:
        return OpDims([x])
    space = [(dim, "batch norm runs along it") for dim in x[2:]]
    return OpDims([x], closed=[x[0]], blocked=space)


def channel_norm(node: torch.fx.Node, known: Known) -> OpDims:
    """group_norm and instance_norm: statistics over space and within a group of channels."""
    args, name = arguments(node), op_name(node)
    x = dims_of(known, args["input"])
    for parameter in ("weight", "bias"):
        if is_tensor(args[parameter]):
            unify(dims_of(known, args[parameter])[0], x[1])
    within: list[Product] = list(x[2:])
    if name == "group_norm":
        groups, minor = split_minor(x[1], size(x[1]) // args["num_groups"])
        set_hint(groups, "channels")
        within.append(minor)
    elif is_tensor(args["running_mean"]):
        raise FactorError("instance norm with running statistics")
    else:
        set_hint(x[1], "channels")
    return OpDims([x], blocked=[(dim, f"{name} runs along it") for dim in within])

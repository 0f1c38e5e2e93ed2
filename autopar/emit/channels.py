"""How convolutions, norms over channels, resampling and repeats read: with local counts."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch.fx

from autopar.emit.text import receiver
from autopar.graph.ops import arguments, is_tensor, op_name


class _Scope(Protocol):
    def local_shape(self, node: torch.fx.Node, source: torch.fx.Node) -> tuple[int, ...]: ...

    def local_out(self, node: torch.fx.Node) -> tuple[int, ...]: ...

    def split_axes(
        self, node: torch.fx.Node, source: torch.fx.Node, dim: int
    ) -> tuple[str, ...]: ...


class _Printer(Protocol):
    scope: _Scope

    def arg(self, node: torch.fx.Node, value: Any) -> str: ...

    def axis(self, axes: tuple[str, ...]) -> str: ...


def _convolution(printer: _Printer, node: torch.fx.Node) -> str:
    args, name = arguments(node), op_name(node)
    words = [printer.arg(node, args[k]) for k in ("input", "weight")]
    plain = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
    for option, default in plain.items():
        value = args.get(option, ())
        if isinstance(value, str) or any(n != default for n in value):
            words.append(f"{option}={_short(value)}")
    if args["groups"] != 1:
        channels = printer.scope.local_shape(node, args["input"])[1]
        weight = printer.scope.local_shape(node, args["weight"])
        # Forward convolutions have a group's input channels in the weight, transposed ones the
        # outputs'.
        groups = channels // weight[1]
        if name.startswith("conv_transpose"):
            groups = printer.scope.local_out(node)[1] // weight[1]
        words.append(f"groups={groups}")
    return f"F.{name}({', '.join(words)})"


def _short(value: Any) -> str:
    """One number where all are the same."""
    if isinstance(value, str):
        return repr(value)
    values = list(value)
    return str(values[0]) if len(set(values)) == 1 else str(tuple(values))


def _batch_norm(printer: _Printer, node: torch.fx.Node) -> str:
    args = arguments(node)
    keys = ("input", "running_mean", "running_var", "weight", "bias")
    words = [printer.arg(node, args[k]) for k in keys]
    if args["training"]:
        # Without running statistics the batch's own are used in evaluations too.
        words.append("True" if args["running_mean"] is None else "self.training")
    words += [f"momentum={args['momentum']}", f"eps={args['eps']}"]
    axes = printer.scope.split_axes(node, args["input"], 0)
    if axes and args["training"]:
        return f"sync_batch_norm({', '.join([*words, printer.axis(axes)])})"
    return f"F.batch_norm({', '.join(words)})"


def _group_norm(printer: _Printer, node: torch.fx.Node) -> str:
    args = arguments(node)
    whole = int(args["input"].meta["val"].shape[1])
    groups = printer.scope.local_out(node)[1] * args["num_groups"] // whole
    words = [printer.arg(node, args["input"]), str(groups)]
    words += [printer.arg(node, args[k]) for k in ("weight", "bias")]
    words.append(f"eps={args['eps']}")
    return f"F.group_norm({', '.join(words)})"


def _instance_norm(printer: _Printer, node: torch.fx.Node) -> str:
    args = arguments(node)
    words = [printer.arg(node, args["input"])]
    words += [f"{k}={printer.arg(node, args[k])}" for k in ("weight", "bias") if is_tensor(args[k])]
    words.append(f"eps={args['eps']}")
    return f"F.instance_norm({', '.join(words)})"


def _interpolate(printer: _Printer, node: torch.fx.Node) -> str:
    args, name = arguments(node), op_name(node)
    mode = name.removeprefix("upsample_").rstrip("123d")
    words = [printer.arg(node, args.get("input", args.get("self")))]
    if args.get("output_size") is not None:
        words.append(f"size={_short_tuple(args['output_size'])}")
    else:
        words.append(f"scale_factor={_short_tuple(args['scale_factors'])}")
    if mode != "nearest":
        words += [f'mode="{mode}"', f"align_corners={args['align_corners']}"]
    return f"F.interpolate({', '.join(words)})"


def _short_tuple(values: Any) -> str:
    return f"({', '.join(map(str, values))}{',' if len(values) == 1 else ''})"


def _repeat(printer: _Printer, node: torch.fx.Node) -> str:
    source = arguments(node)["self"]
    before, after = printer.scope.local_shape(node, source), printer.scope.local_out(node)
    before = (1,) * (len(after) - len(before)) + before
    times = [n // m for n, m in zip(after, before, strict=True)]
    return f"{receiver(printer.arg(node, source))}.repeat({', '.join(map(str, times))})"


def _adaptive_max_pool(printer: _Printer, node: torch.fx.Node) -> str:
    args = arguments(node)
    size = _short_tuple(args["output_size"])
    return f"F.{op_name(node)}({printer.arg(node, args['self'])}, {size}, return_indices=True)"


FORMS: Mapping[str, Callable[[Any, torch.fx.Node], str]] = {
    **{f"conv{d}d": _convolution for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _convolution for d in (1, 2, 3)},
    **{f"adaptive_max_pool{d}d": _adaptive_max_pool for d in (1, 2, 3)},
    **{
        f"upsample_{mode}": _interpolate
        for mode in (
            "nearest1d",
            "nearest2d",
            "nearest3d",
            "linear1d",
            "bilinear2d",
            "bicubic2d",
            "trilinear3d",
        )
    },
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "repeat": _repeat,
    "tile": _repeat,
}

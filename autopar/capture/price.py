"""What an op without a rule costs, as far as torch knows."""

from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from autopar.capture.opaque_code import OpaqueWork, code_of
from autopar.capture.schema import namespace_of


def op_work(node: torch.fx.Node) -> OpaqueWork | None:
    """The flops that torch.utils.flop_counter's registry gives for an op, twice that for its
    backward, and the bytes of its inputs and outputs. None where nobody knows: for an op that isn't
    torch's own and has no formula there, what it moves says nothing."""
    code = code_of(node)
    if code is not None:
        return code.work
    flops = _flops(node)
    if not flops and namespace_of(node) != "aten":
        return None
    moved = sum(_bytes(n.meta["val"]) for n in [node, *node.all_input_nodes])
    return OpaqueWork(flops, 2 * flops, moved, 2 * moved)


def _flops(node: torch.fx.Node) -> int:
    args: Any = torch.fx.map_arg(node.args, lambda n: n.meta["val"])
    kwargs: Any = torch.fx.map_arg(node.kwargs, lambda n: n.meta["val"])
    fakes = [v for n in node.all_input_nodes for v in _tensors(n.meta["val"])]
    mode = next((getattr(v, "fake_mode", None) for v in fakes), None)
    if mode is None:
        return 0
    counter = FlopCounterMode(display=False)
    with mode, torch.no_grad(), counter:
        node.target(*args, **kwargs)  # type: ignore[operator]
    return int(counter.get_total_flops())


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, Tensor)]


def _bytes(value: Any) -> int:
    return sum(v.numel() * v.element_size() for v in _tensors(value))

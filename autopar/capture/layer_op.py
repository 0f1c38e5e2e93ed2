"""The op that stands for a layer in the skeleton's graph: `autopar::layer`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorMeta:
    """What is known of a tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorMeta":
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def empty(self) -> Tensor:
        """A tensor on cpu (a fake one under a FakeTensorMode)."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")


def layer_op() -> Any:
    """`torch.ops.autopar.layer.default`, registered the first time that it is asked for.

    `(Tensor[] inputs, str path, str outputs="")`: `outputs` describes the results while the model
    is traced, so that no registry is needed; it is dropped from the finished graph.
    """
    if not hasattr(torch.ops.autopar, "layer"):
        torch.library.define(
            "autopar::layer", '(Tensor[] inputs, str path, str outputs="") -> Tensor[]'
        )
        torch.library.register_fake("autopar::layer", _fake_layer)
    return torch.ops.autopar.layer.default


def opaque_op() -> Any:
    """`torch.ops.autopar.opaque.default`, which stands for the own code of a layer in its block's
    graph: `(Tensor[] inputs, Tensor[] weights, str what)`. It is never called."""
    if not hasattr(torch.ops.autopar, "opaque"):
        torch.library.define(
            "autopar::opaque", "(Tensor[] inputs, Tensor[] weights, str what) -> Tensor[]"
        )
    return torch.ops.autopar.opaque.default


def encode(outputs: Sequence[TensorMeta]) -> str:
    """The text from which the op's fake implementation makes its outputs."""
    return json.dumps([(str(o.dtype).split(".")[-1], o.shape, o.stride) for o in outputs])


def _fake_layer(inputs: list[Tensor], path: str, outputs: str = "") -> list[Tensor]:
    if not outputs:
        raise RuntimeError(f"the layer {path} of a finished graph must be interpreted, not called")
    return [
        TensorMeta(getattr(torch, dtype), tuple(shape), tuple(stride)).empty()
        for dtype, shape, stride in json.loads(outputs)
    ]

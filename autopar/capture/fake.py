"""Weights without memory: a model whose tensors are fake for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = frozenset(
    {
        torch.ops.aten.addmm.default,
        torch.ops.aten.gelu.default,
        torch.ops.aten.silu.default,
        torch.ops.aten._softmax.default,
    }
)
"""Ops whose shape rules torch has in C++ too, where they take a hundredth of the time that their
decompositions do."""


class QuickFakeMode(FakeTensorMode):
    """A fake tensor mode that asks C++ for shapes where it may: no size here is a symbol."""

    def cpp_meta_supports_symint(self, func: Any) -> bool:
        return func in _PLAIN or super().cpp_meta_supports_symint(func)


def fake_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor on cpu with the same shape, strides, dtype and requires_grad.

    On cpu, because cross entropy on meta silently has no backward and fake cuda tensors abort the
    process where torch was built without CUDA.
    """
    # Made directly: through the mode's dispatch a thousand weights would take seconds.
    shape = torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta"
    )
    fake = FakeTensor(mode, shape, torch.device("cpu"))
    if isinstance(tensor, nn.Parameter):
        fake._is_param = True  # what nn.Parameter sets on a tensor of another class
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def faked(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Parameters and buffers are fake inside and the very same objects as before afterwards."""
    saved: list[tuple[dict[str, Any], str, Any]] = []
    memo: dict[int, Tensor] = {}  # by identity: tied tensors stay tied
    try:
        for module in model.modules():
            stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for store in stores:
                for name, tensor in store.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in memo:
                        memo[id(tensor)] = fake_like(tensor, mode)
                    saved.append((store, name, tensor))
        for store, name, tensor in saved:
            store[name] = memo[id(tensor)]
        _follow_flat_weights(model, saved)
        yield
    finally:
        for store, name, tensor in saved:
            store[name] = tensor


def _follow_flat_weights(model: nn.Module, saved: list[tuple[dict[str, Any], str, Any]]) -> None:
    """RNNs keep a second list of their weights, which has to be fake too."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            names = module._flat_weights_names
            saved.append((module.__dict__, "_flat_weights", module._flat_weights))
            module.__dict__["_flat_weights"] = [getattr(module, name) for name in names]


_CHECKPOINTING = "the model's own gradient checkpointing is off: the plan recomputes"


@contextmanager
def training_mode(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Train mode, no key-value cache and no checkpointing of the model's own; all restored.

    Yields notes on what was switched off.
    """
    saved: list[tuple[Any, str, Any]] = []
    notes: list[str] = []

    def switch(owner: Any, name: str) -> None:
        if getattr(owner, name, False) is True:
            saved.append((owner, name, True))
            setattr(owner, name, False)

    modes = [(module, module.training) for module in model.modules()]
    off = [name or "the model" for name, module in model.named_modules() if not module.training]
    if off:
        more = f" and {len(off) - 1} more modules" if len(off) > 1 else ""
        notes.append(f"training mode is compiled, though {off[0]}{more} came in eval mode")
    try:
        model.train()
        for module in model.modules():
            switch(getattr(module, "config", None), "use_cache")
            before = len(saved)
            switch(module, "gradient_checkpointing")
            if len(saved) > before and _CHECKPOINTING not in notes:
                notes.append(_CHECKPOINTING)
        yield tuple(notes)
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)
        for module, mode in modes:
            if module.training != mode:
                module.training = mode

"""Running a module's code on tensors that aren't its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def lent(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """The module with these parameters and buffers, by name, inside; its own are back afterwards.

    A buffer that the module replaces, rather than writes to, is copied into the tensor lent.
    """
    saved: list[tuple[dict[str, Any], str, Any]] = []
    lends: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            parameters: dict[str, Any] = owner._parameters
            buffers: dict[str, Any] = owner._buffers
            store = parameters if leaf in parameters else buffers
            saved.append((store, leaf, store[leaf]))
            lends.append((store, leaf, tensor))
            store[leaf] = tensor
        for owner in module.modules():
            if isinstance(owner, nn.RNNBase):  # they keep a second list of their weights
                saved.append((owner.__dict__, "_flat_weights", owner._flat_weights))
                flat = [getattr(owner, name) for name in owner._flat_weights_names]
                owner.__dict__["_flat_weights"] = flat
        yield
    finally:
        for store, leaf, tensor in lends:
            if store[leaf] is not tensor and isinstance(store[leaf], Tensor):
                tensor.copy_(store[leaf])
        for store, leaf, value in reversed(saved):
            store[leaf] = value

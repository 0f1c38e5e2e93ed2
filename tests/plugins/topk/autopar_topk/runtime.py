"""The runtime half: called by the emitted module's sync_gradients()."""

import math
from collections.abc import Sequence

import torch

from autopar.runtime import Container, Group, all_gather, gradient, state


def topk_sum(root: Container, names: Sequence[str], axis: Group, fraction: float) -> None:
    """Replaces each gradient by the sum over the axis of every rank's largest elements."""
    for name in names:
        grad = gradient(root, name)
        if grad is None:
            continue
        error = state(root, name, "error")
        error += grad
        flat = error.view(-1)
        count = math.ceil(fraction * flat.numel())
        index = flat.abs().topk(count).indices
        values = all_gather(flat[index], dim=0, axis=axis)
        places = all_gather(index, dim=0, axis=axis)
        flat[index] = 0
        total = torch.zeros_like(flat).index_add_(0, places, values)
        grad.copy_(total.view(grad.shape))

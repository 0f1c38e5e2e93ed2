"""What the tests of checkpoints share: whole tensors of a running program, read by other code than
that which saves them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime import TrainingModule


@dataclass(frozen=True)
class Whole:
    """Everything that a checkpoint must bring back, whole, on every rank."""

    steps: int
    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    """Optimizer state by "KEY of PARAMETER"."""
    values: dict[str, object]
    """State that isn't a tensor, and the hyperparameters."""


def whole(parallel: TrainingModule) -> Whole:
    """All ranks call."""
    weights = {n: tensor.clone() for n, tensor in parallel.full_state_dict().items()}
    state: dict[str, Tensor] = {}
    values: dict[str, object] = {}
    for leaf in parallel.leaves:
        for key, value in parallel.optimizer.state.get(leaf.value, {}).items():
            name = f"{key} of {leaf.name}"
            if not isinstance(value, Tensor):
                values[name] = value
            elif value.ndim:
                state[name] = leaf.whole(parallel.mesh, value)
            else:
                state[name] = value.clone()
    for number, group in enumerate(parallel.optimizer.param_groups):
        values.update({f"{number} {k}": v for k, v in group.items() if k != "params"})
    return Whole(parallel.steps, weights, state, values)


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes: 0.0 and -0.0 differ."""
    return tensor.contiguous().flatten().view(torch.uint8)


def differences(found: Whole, expected: Whole) -> list[str]:
    """What isn't equal bit for bit."""
    out = [] if found.steps == expected.steps else [f"steps {found.steps}, {expected.steps}"]
    for kind in ("weights", "state"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        out += [f"only one has {name}" for name in ours.keys() ^ theirs.keys()]
        for name in ours.keys() & theirs.keys():
            a, b = ours[name], theirs[name]
            if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
                out.append(f"{name} is {a.shape} {a.dtype} {a.device}, {b.shape} {b.dtype}")
            elif not torch.equal(bits(a), bits(b)):
                out.append(f"{name} differs by {(a - b).abs().max()}")
    if repr(found.values) != repr(expected.values) and found.values != expected.values:
        out.append(f"values {found.values}, {expected.values}")
    return out

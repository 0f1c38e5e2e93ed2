"""What the runtime half of a strategy with a gradient sync of its own works with.

The emitted module calls the function as `function(root, names=(…), axis=group, **options)`
in its `sync_gradients()`, once a step, on accumulated gradients. The function replaces each named
gradient, in place, by its sum over the group (or what it makes of that).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from autopar.runtime.parameters import Container


@dataclass(frozen=True, eq=False)
class KeptState:
    """A tensor kept beside a parameter: `kind` "I" the same on every rank of `axes`, "P" each
    rank's own share of a sum over them."""

    parameter: str
    name: str
    kind: Literal["I", "P"]
    axes: tuple[str, ...]
    value: Tensor


def keep_state(
    root: Container, name: str, kind: Literal["I", "P"], axes: tuple[str, ...], of: tuple[str, ...]
) -> None:
    """Declares a state `name` for each parameter in `of`: zeros like its local part."""
    for parameter in of:
        value = torch.zeros_like(root.get_parameter(parameter).detach())
        root.kept_state[parameter, name] = KeptState(parameter, name, kind, axes, value)


def state(root: Container, parameter: str, name: str) -> Tensor:
    """A kept state's tensor, to be updated in place."""
    kept: KeptState = root.kept_state[parameter, name]
    return kept.value


def gradient(root: Container, parameter: str) -> Tensor | None:
    """A parameter's local accumulated gradient, to be replaced in place; None where it has none."""
    return root.get_parameter(parameter).grad

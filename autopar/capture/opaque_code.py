"""What is known of a part of a model that can't be analysed."""

from dataclasses import dataclass
from typing import Any

import torch.fx

Place = tuple[int, int]
"""A tensor's dim whose major factor is the batch, and the product of its other factors."""


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a call's arguments."""

    index: int


@dataclass(frozen=True)
class OpaqueWork:
    """What an opaque op or layer does for the whole batch, forward and backward, in proportion to
    the samples. `saved_bytes`: beside what autograd is seen to keep in graphs."""

    flops: int
    backward_flops: int
    bytes: int
    backward_bytes: int
    saved_bytes: int = 0


@dataclass(frozen=True)
class OpaqueCode:
    """A layer that torch.export can't trace and whose own code runs instead: why and where, how it
    is called ((args, kwargs) with a Slot for each tensor), where the batch lies in the tensors that
    it takes and returns, why its samples depend on each other ("" where they don't), whether it
    drops at random, and what it does."""

    why: str
    where: str
    call: Any
    inputs: tuple[Place | None, ...]
    outputs: tuple[Place, ...]
    mixing: str
    random: bool
    work: OpaqueWork


def code_of(node: torch.fx.Node) -> OpaqueCode | None:
    """What is known of the layer that a node runs as it is, or None for another node."""
    found: OpaqueCode | None = node.meta.get("opaque_code")
    return found

"""What must be whole where elements along a dim are picked by index."""

from collections.abc import Sequence

import torch
import torch.fx

from autopar.graph.factors import FactorError, Product, leaves, new_dim, set_hint, size, unify
from autopar.graph.positions import points_into
from autopar.graph.rules.base import Dims, Known, dims_of

Blocked = list[tuple[Product, str]]
PICKED = "elements along it are picked by index"


def picked(dim: Product, index: torch.fx.Node, known: Known) -> Blocked:
    """What of a dim must be whole where elements along it are picked by index: all that isn't known
    to lie on the rank whose index picks it."""
    found = points_into(index, known)
    if found is None or size(found.into) != size(dim):
        return [(dim, PICKED)]
    try:
        unify(found.into, dim)
    except FactorError:
        return [(dim, PICKED)]
    own = {leaf for part in dims_of(known, index) for leaf in leaves(part)}
    far: Blocked = [([leaf], PICKED) for leaf in leaves(dim) if leaf not in own]
    return far + [(part, "positions are divided by its size") for part in found.whole]


def no_masks(indices: Sequence[torch.fx.Node]) -> None:
    """Errors: FactorError where a mask picks elements."""
    if any(i.meta["val"].dtype == torch.bool for i in indices):
        raise FactorError("how many elements a mask picks is known only when it runs")


def same_but(x: Dims, other: Dims, dim: int) -> None:
    """Say that two tensors have the same dims, but for one."""
    for place, (mine, theirs) in enumerate(zip(x, other, strict=True)):
        if place != dim:
            unify(mine, theirs)


def pointed(node: torch.fx.Node, length: int, known: Known) -> Product:
    """The dim of this length that a tensor's values point into, or a new one."""
    found = points_into(node, known)
    return found.into if found and size(found.into) == length else new_dim(length)


def name_experts(dim: Product) -> None:
    """Experts, in groups where the router chooses groups first."""
    parts = leaves(dim)
    set_hint(parts[-1:], "experts")
    set_hint(parts[:-1], "expert_groups")

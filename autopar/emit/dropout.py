"""Dropout of a tensor that is split: ranks that hold different parts of it draw different masks."""

import torch.fx

from autopar.graph.ops import drops
from autopar.layouts.layout import Layout
from autopar.mesh import Split


def masks_line(node: torch.fx.Node, made: Layout, data: Split) -> str | None:
    """The `with` statement that an op needs around it, or None. `made`: the layout of its result.

    Along the data axes the ranks' streams differ anyway; along others they are equal.
    """
    if not drops(node):
        return None
    parts = made.split_parts()
    assert set(data) <= parts, f"{node.name} would drop differently on data ranks that share it"
    axes = ", ".join(f'"{part.axis}"' for part in sorted(parts - set(data)))
    return f"with masks_apart(self.mesh, {axes}, training=self.training):" if axes else None

"""The outer candidates: every mesh that fills the cluster, with every number of microbatches."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autopar.layouts.layout import Setting
from autopar.mesh import Mesh
from autopar.plugin import AxisSpec, Strategy


def axes_in_order(strategies: Iterable[Strategy]) -> tuple[AxisSpec, ...]:
    """All axes, outermost (least local) first."""
    found = [axis for strategy in strategies for axis in strategy.axes()]
    return tuple(sorted(found, key=lambda axis: (axis.locality, axis.name)))


def meshes(
    axes: Sequence[AxisSpec], world: int, pinned: Mapping[str, int], layers: int
) -> Iterator[Mesh]:
    """Every factorisation of the world over the axes that agrees with the pinned sizes; an axis
    that splits layers is no larger than their number."""
    if not axes:
        if world == 1:
            yield Mesh(())
        return
    first, rest = axes[0], axes[1:]
    most = min(world, max(layers, 1)) if first.splits_layers else world
    sizes = [pinned[first.name]] if first.name in pinned else range(1, most + 1)
    for size in sizes:
        if world % size == 0:
            for mesh in meshes(rest, world // size, pinned, layers):
                yield Mesh(((first.name, size), *mesh.axes))


def settings(
    axes: Sequence[AxisSpec],
    world: int,
    pinned: Mapping[str, int],
    microbatches: int | None,
    batch_size: int,
    layers: int,
) -> Iterator[Setting]:
    """Meshes with microbatch counts: the pinned one, else one and every other that leaves each rank
    as many whole samples."""
    for mesh in meshes(axes, world, pinned, layers):
        data = tuple(
            mesh.part(axis.name) for axis in axes if axis.splits_batch and mesh.size(axis.name) > 1
        )
        pieces = 1
        for part in data:
            pieces *= part.size
        if microbatches is not None:
            yield Setting(mesh, data, microbatches)
            continue
        for count in range(1, max(batch_size // pieces, 1) + 1):
            if count == 1 or batch_size % (pieces * count) == 0:
                yield Setting(mesh, data, count)

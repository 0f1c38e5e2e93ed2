"""What any candidate must satisfy, whether a strategy makes it or a plan names it."""

from dataclasses import replace

from autopar.layouts.layout import Setting
from autopar.mesh import AxisPart, overlap, split_size
from autopar.plugin import Candidate, Region


def in_microbatch(region: Region, setting: Setting) -> Region:
    """The region with the batch dim of one microbatch."""
    dims = tuple(
        replace(dim, size=dim.size // setting.microbatches) if dim.role == "batch" else dim
        for dim in region.dims
    )
    return replace(region, dims=dims)


def candidate_faults(candidate: Candidate, region: Region, setting: Setting) -> list[str]:
    """Each fault, as what "it" does. A candidate may split dims that exist, aren't blocked and are
    divisible, over axes that exist, each once. `region` is that of one microbatch."""
    dims = {dim.name: dim for dim in region.dims}
    params = {param.name for param in region.params}
    faults = []
    used: list[AxisPart] = []
    for name, split in candidate.splits:
        if name not in dims:
            faults.append(
                f"splits {name!r}, which the region doesn't have (it has {', '.join(dims)})"
            )
        elif dims[name].blocked:
            faults.append(f"splits {name!r}: {dims[name].blocked}")
        elif dims[name].size % split_size(split):
            faults.append(f"splits {name!r} = {dims[name].size} into {split_size(split)} pieces")
        used += split
    known = {axis for axis, _ in setting.mesh.axes}
    unknown = sorted({part.axis for part in used} - known)
    faults += [f"uses the axis {axis!r}, which the mesh doesn't have" for axis in unknown]
    faults += [
        f"uses the axis {one.axis!r} twice"
        for i, one in enumerate(used)
        for other in used[:i]
        if overlap(one, other)
    ]
    return faults + [
        f"plans the parameter {name!r}, which isn't the region's"
        for name, _ in candidate.params
        if name not in params
    ]

"""What any candidate must satisfy, whether a strategy makes it or a plan names it."""

from dataclasses import replace

from autopar.layouts.layout import Setting
from autopar.mesh import AxisPart, divides, overlap, split_size
from autopar.plugin import Candidate, Dim, OpForm, ParamInfo, ParamPlan, Region


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
    params = {param.name: param for param in region.params}
    faults = []
    used: list[AxisPart] = []
    for name, split in candidate.splits:
        if name not in dims:
            faults.append(
                f"splits {name!r}, which the region doesn't have (it has {', '.join(dims)})"
            )
        elif candidate.blocks(dims[name]) and not dims[name].rows:
            faults.append(f"splits {name!r}: {dims[name].blocked}")
        elif not dims[name].fits(split):
            faults.append(f"splits {name!r} = {dims[name].size} into {split_size(split)} pieces")
        if name not in dims or not dims[name].rows:
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
    faults += _experts_faults(candidate, [dim for dim in region.dims if dim.rows], setting)
    faults += _form_faults(candidate, region, known)
    for name, plan in candidate.params:
        if name in params:
            faults += _param_faults(params[name], plan)
        else:
            faults.append(f"plans the parameter {name!r}, which isn't the region's")
    return faults


def _form_faults(candidate: Candidate, region: Region, known: set[str]) -> list[str]:
    """Forms are of the region's attention ops, over axes of the mesh, and split what divides."""
    faults = []
    ops = {seen.op for seen in region.attention}
    for form in candidate.forms:
        if form.op not in ops:
            faults.append(f"runs {form.op!r} in a form of its own, which is no attention op here")
            continue
        if form.passes < 1 or form.copies < 0:
            faults.append(f"runs {form.op} {form.passes} times, with {form.copies} copies")
        if form.function and not all(form.function.partition(":")):
            faults.append(f"runs {form.op} as {form.function!r}: not package.module:name")
        parts = [*form.axes, *(part for _, _, axes in form.moves for part in axes)]
        unknown = sorted({part.axis for part in parts} - known)
        faults += [f"uses the axis {axis!r}, which the mesh doesn't have" for axis in unknown]
        faults += _split_faults(candidate, form, region)
    return faults


def _split_faults(candidate: Candidate, form: OpForm, region: Region) -> list[str]:
    """In the op of a form."""
    faults = []
    dims = {dim.name: dim for dim in region.dims}
    for name, _ in form.splits(candidate.splits):
        if name not in dims:
            faults.append(f"splits {name!r} in {form.op}, which the region doesn't have")
        elif form.op in dims[name].blocking and not form.leaves_whole(name, candidate.splits):
            faults.append(f"splits {name!r} in {form.op}, whose form needs it whole")
    return faults


def form_conflict(candidate: Candidate, region: Region) -> str | None:
    """Why ops in forms of their own can't be split as the region's dims and the forms together say,
    or None: different strategies may have said the one and the other."""
    sizes = {dim.name: dim.size for dim in region.dims}
    for form in candidate.forms:
        for name, split in form.splits(candidate.splits):
            if not divides(split, sizes[name]):
                axes = " · ".join(f"{part.axis} {part.size}" for part in split)
                return (
                    f"region {region.name}: {name} = {sizes[name]} isn't divisible by {axes} in "
                    f"{form.op}"
                )
    return None


def dropout_fault(candidate: Candidate, region: Region, setting: Setting) -> str:
    """What is wrong, as what "it" does, where data ranks would drop differently in a tensor that
    they all hold whole, or ""."""
    missing = [part.axis for part in setting.data if not candidate.uses(part.axis)]
    if not missing or not region.has_dropout:
        return ""
    return (
        f"({region.name} of {region.layer_class}) has dropout and runs on the whole batch on every "
        f"rank along {' · '.join(missing)}, where masks differ: drop before or after it, or keep "
        f"{missing[0]} at 1"
    )


def _experts_faults(candidate: Candidate, dims: list[Dim], setting: Setting) -> list[str]:
    """Tokens are sent between ranks that have different ones, and each rank holds neighbouring
    experts, in the order of ranks. `dims`: groups of experts, then those of a group."""
    faults = []
    parts: list[AxisPart] = []
    whole = ""
    for dim in dims:
        split = candidate.split(dim.name)
        apart = {part.axis for name in dim.rows for part in candidate.split(name)}
        faults += [
            f"splits {dim.name!r} over {axis!r}, which splits none of {', '.join(dim.rows)}: the "
            "ranks along it have the same tokens"
            for axis in sorted({part.axis for part in split} - apart)
        ]
        if split and whole:
            faults.append(f"splits {dim.name!r}, though ranks hold several {whole!r}")
        whole = whole or (dim.name if split_size(split) < dim.size else "")
        parts += split
    order = [axis for axis, _ in setting.mesh.axes]
    places = [(order.index(p.axis), -p.stride) for p in parts if p.axis in order]
    if places != sorted(set(places)):
        faults.append("splits experts over axes in another order than the mesh's")
    return faults


def _param_faults(param: ParamInfo, plan: ParamPlan) -> list[str]:
    """ZeRO has three stages: optimizer state, that and gradients, all; over one set of axes."""
    faults = []
    shards = (plan.param, plan.grad, plan.state)
    if any(split and split != plan.state for split in shards) or (plan.param and not plan.grad):
        value, grad, state = (" · ".join(part.axis for part in split) or "none" for split in shards)
        faults.append(
            f"shards {param.name} over {value} (value), {grad} (gradient) and {state} (state): "
            "they are sharded over the same axes or whole, the gradient where the value is, the "
            "state where the gradient is"
        )
    if plan.state and plan.sync is not None:
        faults.append(f"shards {param.name}, whose gradient has a sync of its own")
    if any(shards) and not param.shape:
        faults.append(f"shards {param.name}, which has no dim")
    if any(shards) and not (param.trainable or plan.param):
        faults.append(f"shards the gradient or state of {param.name}, which is frozen")
    return faults

"""Whether a loss is a sum over microbatches.

Microbatches are an axis in time: nothing can be exchanged over it before the loss. So the batch is
split over a trial axis, and no activation with a gradient may change its type on it.
"""

from collections.abc import Iterable

from autopar.graph.model_graph import ModelGraph, Value
from autopar.layouts.convert import ImpossibleError
from autopar.layouts.flow import Flow
from autopar.layouts.layout import Setting, names
from autopar.layouts.program import Program
from autopar.mesh import AxisPart, Mesh
from autopar.plugin import Candidate


def why_inseparable(model: ModelGraph) -> str | None:
    """None where the loss can be summed over microbatches, else the reason."""
    if model.batch_size == 1:
        return None
    trial = AxisPart("mb", model.batch_size)
    setting = Setting(Mesh((("mb", model.batch_size),)), (trial,), 1)
    choices = {}
    for path, block in model.instances():
        chosen = {}
        for region in block.regions:
            batch = region.dim("batch")
            if batch is not None and batch.blocked:
                return f"{region.name} of {block.name} needs the whole batch: {batch.blocked}"
            splits = ((batch.name, (trial,)),) if batch is not None else ()
            chosen[region.name] = Candidate(region.name, splits)
        choices[path] = chosen
    norm = _batch_statistics(model)
    if norm is not None:
        return norm
    program = Program(model, setting, choices)
    try:
        flows = program.flows
    except ImpossibleError as error:
        return f"the batch can't be split: {error}"
    exchanged = _exchanged(flows.values())
    if exchanged is not None:
        return exchanged
    skeleton = flows[""]
    (loss,) = skeleton.block.outputs()
    if trial not in skeleton.made[loss.name].partial:
        return "the loss isn't a sum over samples"
    return None


def _batch_statistics(model: ModelGraph) -> str | None:
    """An op that takes the whole batch in within itself, or makes numbers for all of it."""
    found: list[tuple[int, str]] = []
    for block in model.blocks:
        for name, op in block.ops.items():
            where = f"{name} of {block.name}"
            value = block.values.get(name)
            if op.kind == "batch_norm" and "batch" in op.closed:
                found.append((0, f"{where} takes its statistics over the whole batch"))
            elif op.kind == "buffer_update":
                found.append((1, f"{where} changes a buffer, once a batch"))
            elif op.kind == "constant" and value is not None and _numbers_samples(value):
                found.append((2, f"{where} numbers the samples of the whole batch"))
    if found:
        return min(found, key=lambda one: one[0])[1]
    return None


def _numbers_samples(value: Value) -> bool:
    return not value.from_batch and "batch" in names(value.dims)


def _exchanged(flows: Iterable[Flow]) -> str | None:
    """An activation with a gradient that changes its type on the batch's axis."""
    for flow in flows:
        for name, _ in flow.conversions:
            value = flow.block.values[name]
            if value.needs_grad and not flow.block.is_weight(name):
                return f"{name} of {flow.block.name} mixes the samples of the whole batch"
    return None

"""The practitioner's recipe: a plan by rule of thumb, which every plan can be compared with.

Tensor parallelism (of models with experts: expert parallelism) inside the node until the model
fits, then layers in about even stages or ZeRO 3 (of a single node: ZeRO 3 without tensor
parallelism), data parallelism over what is left, recompute where nothing else helps. It is written
as a user would write it, as pins, and goes through the planner's own candidates and prices. What it
doesn't name is the planner's choice: the number of microbatches, and where the sequence is split.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError, InfeasibleError, OutOfTimeError
from autopar.graph.model_graph import ModelGraph
from autopar.plan import Plan
from autopar.planning.deadline import NEVER, Deadline
from autopar.planning.meshes import axes_in_order
from autopar.planning.pins import read_pins
from autopar.planning.request import Request, find, make_plan
from autopar.planning.unproven import without_proof
from autopar.planning.watch import Watch, unwatched
from autopar.text import short_mesh, size

DATA, TENSOR, EXPERT, STAGES = "dp", "tp", "ep", "pp"
ZERO, RECOMPUTE, SCHEDULE = "zero", "recompute", "1f1b"
SPARE_LAYERS = 1
"""So many layers more than an even share a stage may have, beside one with embedding or logits."""
Step = Mapping[str, Any]
"""Pins as a user writes them."""
Lane = tuple[Step, ...]
"""Steps of which the first that fits is taken."""


def plan_by_recipe(
    request: Request,
    forbid: Iterable[str] = (),
    watch: Watch = unwatched,
    deadline: Deadline = NEVER,
) -> Plan:
    """The plan of the first level of the recipe on which something fits: of its lanes, the fastest.
    The request's own pins are left aside; no step has what `forbid` names.

    Errors: InfeasibleError where no step fits (short by how much), AutoparError where none can run
    (with each reason), OutOfTimeError where the deadline came before a step that fits.
    """
    barred = tuple(forbid)
    short: list[tuple[int, str]] = []
    refused: list[str] = []
    for level in levels(request):
        fit: list[Plan] = []
        for lane in level:
            for step in lane:
                if deadline.is_over and not fit:
                    raise OutOfTimeError("the recipe ran out of time before a step that fits")
                outcome = _tried(request, step, barred, watch)
                if isinstance(outcome, Plan):
                    fit.append(outcome)
                    break
                if isinstance(outcome, InfeasibleError):
                    short.append((outcome.short_bytes, step_text(step)))
                else:
                    refused.append(f"{step_text(step)}: {outcome}")
        if fit:
            return min(fit, key=lambda plan: plan.predicted.step_s)
    if not short:
        reasons = "\n  ".join(refused[:8])
        raise AutoparError(f"no step of the recipe can run on this cluster:\n  {reasons}")
    least, what = min(short)
    raise InfeasibleError(
        f"no step of the recipe fits: the smallest, {what}, is short by {least:,} bytes "
        f"({size(least)})",
        least,
    )


def levels(request: Request) -> Iterator[tuple[Lane, ...]]:
    """The recipe for a model and a cluster, in order."""
    strategies = {strategy.name for strategy in request.strategies}
    axes = [axis.name for axis in axes_in_order(request.strategies)]
    world, layers = request.cluster.devices, len(request.model.layers)
    inside = EXPERT if _has_experts(request.model) else TENSOR
    node = request.cluster.links[0].devices if inside in axes else 1
    sizes = [length for length in _powers(node) if world % length == 0]
    off = {name: False for name in (ZERO, RECOMPUTE) if name in strategies}

    def step(stages: int, length: int, more: Step) -> Step:
        sizes = {STAGES: stages, DATA: world // (stages * length), inside: length}
        return {**{axis: sizes.get(axis, 1) for axis in axes}, **off, **more}

    again: list[Step] = [{}, {RECOMPUTE: "full"}] if RECOMPUTE in strategies else [{}]
    for more in again:
        yield (tuple(step(1, length, more) for length in sizes),)
        most = sizes[-1]
        sharded = {**more, ZERO: 1} if ZERO in strategies else more
        deep = [n for n in _powers(min(layers, world // most)) if n > 1 and world % (n * most) == 0]
        staged = tuple(
            step(n, most, {**(sharded if world > n * most else more), "schedule": SCHEDULE})
            for n in deep
            if STAGES in axes
        )
        spread = step(1, most if world > most else 1, {**more, ZERO: 3})
        yield staged, (spread,) if ZERO in strategies else ()


def step_text(step: Step) -> str:
    """A step for reading: "pp 4 · dp 2 · tp 8 by 1f1b, zero 1"; axes of size 1 are left out."""
    sizes = {name: value for name, value in step.items() if type(value) is int and name != ZERO}
    words = [f"{name} {step[name]}" for name in (ZERO, RECOMPUTE) if step.get(name)]
    by = f" by {step['schedule']}" if "schedule" in step else ""
    return ", ".join([short_mesh(sizes) + by, *words])


def _tried(
    request: Request, step: Step, forbid: tuple[str, ...], watch: Watch
) -> Plan | AutoparError:
    """The plan of a step, or why there is none."""
    # Microbatches of one sample:
    most = request.model.batch_size // (step.get(DATA, 1) * step.get(EXPERT, 1))
    try:
        pins = read_pins(step, forbid, request.strategies)
        if most > 1:
            try:
                find(replace(request, pins=replace(pins, microbatches=most)), watch)
            except InfeasibleError as error:
                return error  # nothing needs less
            except AutoparError:
                pass  # one microbatch may be all that is legal: the next line says why not
        plan = make_plan(replace(request, pins=pins), watch)
    except AutoparError as error:
        return error
    uneven = uneven_stages(plan)
    if uneven:
        return AutoparError(uneven)
    return without_proof(plan, f"made by the recipe, without a search: {step_text(step)}")


def uneven_stages(plan: Plan) -> str:
    """Why nobody would have the plan's stages so, or "": the planner fits a model by giving the
    first stages, which hold most microbatches, few layers."""
    if plan.schedule is None:
        return ""
    lengths = [len(part) for part in plan.schedule.parts]
    most = -(-sum(lengths) // len(lengths)) + SPARE_LAYERS
    if max(lengths) <= most:
        return ""
    return f"it fits only with {min(lengths)} to {max(lengths)} layers a stage"


def _powers(most: int) -> list[int]:
    """1, 2, 4 … up to `most`."""
    return [2**i for i in range(most.bit_length())]


def _has_experts(model: ModelGraph) -> bool:
    """Whether tokens can be sent to the model's experts."""
    return any(
        dim.rows and dim.role == "experts"
        for block in model.blocks
        for region in block.regions
        for dim in region.dims
    )

"""Search result → Plan: the decisions by region, the figures, the certificate."""

import hashlib
import math
from collections.abc import Mapping

from autopar.batch_spec import BatchSpec
from autopar.capture.opaque_code import code_of
from autopar.capture.source_line import source_line
from autopar.cluster import ClusterSpec, describe_cluster
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.convert import EXCHANGES
from autopar.layouts.layout import Setting
from autopar.layouts.program import Program
from autopar.mesh import Split
from autopar.plan import (
    Alternative,
    Certificate,
    ModelId,
    Plan,
    RecomputeChoice,
    RegionChoice,
    ScheduleChoice,
)
from autopar.planning.account import Account, account
from autopar.planning.param_choice import write_form, write_param
from autopar.planning.search import Found, Seen
from autopar.planning.tried import SearchOptions
from autopar.plugin import Candidate


def decide(
    model: ModelGraph,
    found: Found,
    cluster: ClusterSpec,
    options: SearchOptions,
    batch: BatchSpec,
    assumptions: tuple[str, ...],
) -> Plan:
    """The plan of a finished search."""
    tokens = tokens_of(model)
    books = account(found.answer.program, found.prices, options.state_ratio, tokens)
    setting = found.answer.program.setting
    notes = (
        assumptions
        + model.capture.notes
        + opaque_prices(model)
        + routing_notes(found.answer.program)
    )
    if found.inseparable is not None:
        notes += (f"only one microbatch: {found.inseparable}",)
    return Plan(
        format=1,
        model=model_id(model),
        cluster=describe_cluster(cluster),
        memory_limit_bytes=options.limit_bytes,
        axes=dict(found.winner.mesh.axes),
        mesh=dict(setting.mesh.axes),
        data_axes=tuple(part.axis for part in setting.data),
        batch=batch,
        batch_size=model.batch_size,
        tokens=tokens,
        microbatches=setting.microbatches,
        schedule=schedule_choice(found.answer.program),
        regions=region_choices(found.answer.program),
        collectives=books.collectives,
        predicted=books.predicted,
        certificate=_certificate(found, options, books),
        alternatives=_alternatives(found),
        assumptions=notes,
        opaque=opaque_ops(model),
    )


def routing_notes(program: Program) -> tuple[str, ...]:
    """What experts' loads are taken to be: they aren't in the graph."""
    blocks, flows = program.model.blocks, program.flows.values()
    if not any(op.kind == "grouped" for block in blocks for op in block.ops.values()):
        return ()
    notes = ["tokens are spread evenly over the experts"]
    steps = (step for flow in flows for each in flow.conversions.values() for step in each)
    if any(step.function in EXCHANGES for step in steps):
        notes.append(
            "so are those that travel to experts: an all-to-all moves more on a rank whose experts "
            "are chosen more often"
        )
    return tuple(notes)


def schedule_choice(program: Program) -> ScheduleChoice | None:
    """How layers lie in stages, if they do."""
    schedule = program.setting.schedule
    if schedule is None:
        return None
    assert program.cut is not None
    table = schedule.table
    return ScheduleChoice(
        schedule.name,
        schedule.axis,
        dict(schedule.options),
        program.cut.layers,
        table.bubble,
        tuple(
            max(sum(counts) for counts in table.in_flight(stage)) for stage in range(table.stages)
        ),
    )


def opaque_ops(model: ModelGraph) -> tuple[str, ...]:
    """What can't be analysed and is only replicated, and why."""
    paths = {block.name: path for path, block in reversed(list(model.instances()))}
    return tuple(
        f"{block.name} ({paths[block.name]}): {reason}"
        if paths[block.name]
        else f"{block.name}: {reason}"
        for block in model.blocks
        for reason in block.opaque.values()
    )


def opaque_prices(model: ModelGraph) -> tuple[str, ...]:
    """How opaque ops are priced, which nothing measured."""
    found: dict[str, None] = {}
    for block in model.blocks:
        for op in block.ops.values():
            code = code_of(op.node)
            if code is not None:
                found[
                    f"{block.name} runs its own code: its flops, bytes and saved activations were "
                    "counted in runs of 2 and 4 samples on the CPU and scaled with the samples; a "
                    "parameter that it doesn't use in a step gets a gradient of zeros"
                ] = None
            elif op.opaque and op.work is not None:
                how = "torch's flop formula" if op.work.flops else "the bytes it moves alone"
                where = f"{op.node.target} at {source_line(op.node)}"
                found[f"{where} has no rule: it is priced by {how}, its backward twice that"] = None
    return tuple(found)


def tokens_of(model: ModelGraph) -> int:
    """Tokens of the global batch where the model has a sequence, else samples."""
    lengths = [
        dim.size
        for block in model.blocks
        for r in block.regions
        for dim in r.dims
        if dim.role == "sequence"
    ]
    return model.batch_size * max(lengths, default=1)


def model_id(model: ModelGraph) -> ModelId:
    """The model's class, graph hash and size."""
    digest = hashlib.sha256()
    for block in model.blocks:
        digest.update(block.name.encode())
        for node in block.graph.nodes:
            value = node.meta.get("val")
            shape = tuple(value.shape) if hasattr(value, "shape") else ""
            dtype = getattr(value, "dtype", "")
            text = f"{node.name} {node.target} {node.args} {dict(node.kwargs)} {shape} {dtype}\n"
            digest.update(text.encode())
        digest.update(repr(sorted(block.params.items())).encode())
    digest.update(repr([(layer.path, layer.block) for layer in model.layers]).encode())
    parameters = 0
    for param in model.capture.params:
        count = 1
        for length in param.shape:
            count *= length
        parameters += count
    return ModelId(model.capture.model_class, digest.hexdigest(), parameters, len(model.layers))


def region_choices(program: Program) -> tuple[RegionChoice, ...]:
    """Equal choices of one region joined over layers, in model order."""

    def axes(split: Split) -> tuple[str, ...]:
        return tuple(part.axis for part in split)

    joined: dict[tuple[int, str, Candidate], list[str]] = {}
    for path, block in program.model.instances():
        for region, candidate in program.choices[path].items():
            joined.setdefault((id(block), region, candidate), []).append(path)
    return tuple(
        RegionChoice(
            tuple(paths),
            region,
            {name: dict(options) for name, options in candidate.made_by},
            {dim: axes(split) for dim, split in candidate.splits},
            {name: write_param(plan) for name, plan in candidate.params},
            _recompute(candidate),
            _balanced(candidate),
            tuple(write_form(form) for form in candidate.forms),
        )
        for (_, region, candidate), paths in joined.items()
    )


def _balanced(candidate: Candidate) -> dict[str, tuple[str, ...]]:
    found = {
        dim: tuple(part.axis for part in split if part.balanced) for dim, split in candidate.splits
    }
    return {dim: axes for dim, axes in found.items() if axes}


def _recompute(candidate: Candidate) -> RecomputeChoice | None:
    again = candidate.recompute
    return None if again is None else RecomputeChoice(again.scope, again.layers)


def _certificate(found: Found, options: SearchOptions, books: Account) -> Certificate:
    step_s, objective_s = books.predicted.step_s, found.answer.solution.seconds
    bound_s = min(found.bound_s, step_s)
    solved = sum(seen.solved for seen in found.tried)
    every = len(found.tried)
    return Certificate(
        solver=options.solver,
        objective_s=objective_s,
        bound_s=bound_s,
        gap=(step_s - bound_s) / step_s,
        difference_s=step_s - objective_s,
        candidates=every + len(found.dropped),
        solved=solved,
        pruned=every - solved,
        dropped=len(found.dropped),
    )


def _alternatives(found: Found) -> tuple[Alternative, ...]:
    """The best of every other mesh, and of the plan's own every other schedule and number of
    microbatches, fastest first; then what can't run, and why."""
    winner = found.winner

    def place(setting: Setting) -> tuple[object, ...]:
        own = (setting.microbatches, _name(setting)) if setting.mesh == winner.mesh else ()
        return setting.mesh, *own

    best: dict[tuple[object, ...], Alternative] = {}
    for seen in found.tried:
        at, one = place(seen.asked), _alternative(seen)
        if seen.asked != winner and (at not in best or _rank(one) < _rank(best[at])):
            best[at] = one
    out = sorted(best.values(), key=_rank)
    for at, left in {place(d.setting): d for d in reversed(found.dropped)}.items():
        if at not in best and at != place(winner):
            where = (_mesh(left.setting.mesh.axes), left.setting.microbatches, _name(left.setting))
            out.append(Alternative(*where, None, None, left.reason))
    return tuple(out)


def _rank(one: Alternative) -> tuple[bool, float]:
    """Those that were solved, then those that may be fast, then those where nothing fits."""
    bound_s = math.inf if one.bound_s is None else one.bound_s
    return one.step_s is None, bound_s if one.step_s is None else one.step_s


def _mesh(axes: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    return dict(axes)


def _name(setting: Setting) -> str:
    """The schedule with its options beyond what the mesh and microbatches say."""
    schedule = setting.schedule
    if schedule is None:
        return ""
    own = {k: v for k, v in schedule.options if k not in ("stages", "microbatches")}
    return schedule.name + "".join(f" with {value} {name}" for name, value in own.items())


def _alternative(seen: Seen) -> Alternative:
    setting, result = seen.asked, seen.result
    where = (_mesh(setting.mesh.axes), setting.microbatches, _name(setting))
    bound_s = seen.bound_s if math.isfinite(seen.bound_s) else None
    if math.isfinite(seen.step_s):
        return Alternative(*where, seen.step_s, bound_s, "")
    # Of many cuts the best one was looked at.
    of_cut = "" if bound_s is None else "the cut that was looked at: "
    if result is not None and result.impossible:
        why = f"{of_cut}no choice of layouts is possible"
        return Alternative(*where, None, bound_s, why)
    if result is not None and result.short_bytes:
        about = "at least " if result.at_least else ""
        why = f"{of_cut}short by {about}{result.short_bytes:,} bytes of memory"
        return Alternative(*where, None, bound_s, why)
    if bound_s is None:
        return Alternative(*where, None, None, "parameters and activations don't fit into memory")
    return Alternative(*where, None, bound_s, f"at least {bound_s:.6g} s a step")

"""A plan from outside → Program: nothing runs that the strategies at hand wouldn't propose."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.errors import AutoparError
from autopar.graph.model_graph import Block, ModelGraph
from autopar.layouts.convert import ImpossibleError
from autopar.layouts.layout import Setting
from autopar.layouts.program import Program, group_of
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.planning.annotate import Candidates, annotate
from autopar.planning.decide import tokens_of
from autopar.planning.full_shards import one_full_shard
from autopar.planning.legal import candidate_faults, dropout_fault, in_microbatch
from autopar.planning.meshes import axes_in_order
from autopar.planning.outer import misfit
from autopar.planning.pins import strategy_pin
from autopar.planning.realise import check_model, place, read_schedule, realise
from autopar.planning.refine_mesh import Factors, factors_of, refine_candidate, refine_setting
from autopar.planning.separable import why_inseparable
from autopar.planning.together import disagreement
from autopar.plugin import Candidate, Region, Strategy


def verify(
    model: ModelGraph, plan: Plan, cluster: ClusterSpec, strategies: Sequence[Strategy]
) -> Program:
    """The program of a plan that may have been edited.

    Every region's choice must be one that the strategies that it names make of that region.
    Errors: AutoparError that says what the plan has and what it may have.
    """
    check_model(model, plan)
    _check_derived(model, plan)
    asked, factors = _setting(plan, cluster, strategies, len(model.layers))
    why = misfit(model, asked, why_inseparable(model))
    if why is not None:
        raise AutoparError(f"the plan can't run: {why}")
    program = realise(model, plan, strategies)
    _check_regions(program, asked, factors, strategies)
    alike = one_full_shard(
        {
            (path, name): (c,)
            for path, chosen in program.choices.items()
            for name, c in chosen.items()
        }
    )
    if isinstance(alike, str):
        raise AutoparError(f"the plan can't run: {alike}")
    apart = disagreement(program.choices, functools.partial(group_of, model), program.cut)
    if apart is not None:
        raise AutoparError(f"the plan can't run: {apart}")
    try:
        program.flows  # noqa: B018 (made on first use)
    except ImpossibleError as error:
        raise AutoparError(f"the plan's regions don't go together: {error}") from error
    return program


def _check_derived(model: ModelGraph, plan: Plan) -> None:
    """What follows from the batch isn't edited by itself."""
    for name, said, real in (
        ("batch_size", plan.batch_size, model.batch_size),
        ("tokens", plan.tokens, tokens_of(model)),
    ):
        if said != real:
            raise AutoparError(
                f"the plan's {name} is {said:,}; its batch makes {real:,}. For another batch plan "
                "again"
            )


# ---------------------------------------------------------------- the mesh


def _setting(
    plan: Plan, cluster: ClusterSpec, strategies: Sequence[Strategy], layers: int
) -> tuple[Setting, Factors]:
    """The setting as enumerated, and how the plan's mesh cuts its axes."""
    known = axes_in_order(strategies)
    for axis in plan.axes:
        if axis not in {spec.name for spec in known}:
            raise AutoparError(
                f"no strategy at hand owns the plan's axis {axis!r}: they own "
                f"{', '.join(spec.name for spec in known) or 'none'}"
            )
    order = [spec.name for spec in known if spec.name in plan.axes]
    mesh = Mesh(tuple(plan.axes.items()))
    if list(plan.axes) != order:
        raise AutoparError(f"the plan's axes stand in another order than {', '.join(order)}")
    if mesh.world != cluster.devices:
        sizes = " · ".join(f"{axis} {size}" for axis, size in plan.axes.items()) or "none"
        raise AutoparError(
            f"the plan's axes ({sizes}) make {mesh.world} ranks; its cluster has "
            f"{cluster.devices} devices"
        )
    data = tuple(
        mesh.part(s.name) for s in known if s.splits_batch and plan.axes.get(s.name, 1) > 1
    )
    schedule = read_schedule(plan, mesh, strategies, layers)
    if schedule and len(plan.schedule.parts if plan.schedule else ()) != schedule.table.parts:
        raise AutoparError(
            f"the plan's schedule.parts are {len(plan.schedule.parts if plan.schedule else ())}; "
            f"{schedule.name} runs {schedule.table.parts}"
        )
    asked = Setting(mesh, data, plan.microbatches, schedule)
    factors = _factors(plan)
    wanted = tuple(part.axis for part in refine_setting(asked, factors).data)
    if plan.data_axes != wanted:
        raise AutoparError(
            f"the plan's data_axes are {list(plan.data_axes)}; on these axes they are "
            f"{list(wanted)}"
        )
    return asked, factors


def _factors(plan: Plan) -> Factors:
    """The cuts that make the plan's mesh of its axes."""
    left = list(plan.mesh.items())
    factors: dict[str, tuple[tuple[str, int, int], ...]] = {}
    for axis, size in plan.axes.items():
        if left and left[0] == (axis, size):
            left.pop(0)
            continue
        cut: list[tuple[str, int, int]] = []
        while left and left[0][0] == f"{axis}_{len(cut)}" and size % left[0][1] == 0:
            name, length = left.pop(0)
            size //= length
            cut.append((name, length, size))
        if size != 1 or not cut:
            left = [(axis, size)]
            break
        factors[axis] = tuple(cut)
    if left:
        raise AutoparError(
            f"the plan's mesh {dict(plan.mesh)} isn't its axes {dict(plan.axes)}, nor those with "
            "some cut into factors (tp into tp_0 and tp_1)"
        )
    return factors


# ---------------------------------------------------------------- the regions


def _check_regions(
    program: Program, asked: Setting, factors: Factors, strategies: Sequence[Strategy]
) -> None:
    seen: set[tuple[int, str, Candidate]] = set()
    for path, block in program.model.instances():
        for region in block.regions:
            candidate = program.choices[path][region.name]
            key = (id(block), region.name, candidate)
            if key not in seen:
                seen.add(key)
                where = f"the plan's {place(path, region.name)}"
                faults = candidate_faults(
                    candidate, in_microbatch(region, program.setting), program.setting
                )
                fault = dropout_fault(candidate, region, program.setting)
                faults += [fault] if fault else []
                if faults:
                    raise AutoparError(f"{where} can't be run: it {'; it '.join(faults)}")
                _check_made(where, block, region, candidate, asked, factors, strategies)


def _check_made(
    where: str,
    block: Block,
    region: Region,
    candidate: Candidate,
    asked: Setting,
    factors: Factors,
    strategies: Sequence[Strategy],
) -> None:
    """The candidate must be what its strategies make of the region."""
    by_name = {strategy.name: strategy for strategy in strategies}
    pins = {}
    for name, options in candidate.made_by:
        if name not in by_name:
            raise AutoparError(
                f"{where} was made by the strategy {name!r}, which isn't at hand: there are "
                f"{', '.join(by_name)}. Install its package, or pass it in strategies="
            )
        own = {field.name for field in fields(by_name[name])}
        pins[name] = _pin(where, by_name[name], {k: v for k, v in options if k in own})
    named = [by_name[name] for name in pins]
    found = annotate(block, region, named, asked, pins)
    made = [
        refined
        for choice in found.choices
        if choice.made_by == candidate.made_by and _expressible(choice, asked.mesh, factors)
        for refined in [refine_candidate(choice, factors)]
    ]
    if repr(candidate) in map(repr, made):  # equality passes over what is balanced
        return
    who = _makers(candidate)
    if not made:
        raise AutoparError(f"{where} can't be run by {who}: {_why_not(candidate, named, found)}")
    raise AutoparError(
        f"{where} isn't what its strategies make. By {who} it has {_choice_text(made[0])}; in the "
        f"plan it has {_choice_text(candidate)}. Change its strategies, splits, params, forms "
        "and recompute together"
    )


def _why_not(candidate: Candidate, named: Sequence[Strategy], found: Candidates) -> str:
    """Why the strategies make nothing that is marked as the candidate is."""
    for strategy in named:
        own = [field.name for field in fields(strategy)]
        for option in candidate.options(strategy.name) or {}:
            if option not in own:
                known = ", ".join(own) or "none"
                return f"{strategy.name} has no option {option!r}; it has {known}"
    missed = found.missed or found.refusals.keys()
    reasons = [why for name in sorted(missed) for why in found.refusals.get(name, ())]
    return "; ".join(reasons) or "they don't go together there"


def _pin(where: str, strategy: Strategy, options: Mapping[str, Any]) -> Any:
    try:
        return strategy_pin(strategy, options)
    except AutoparError as error:
        raise AutoparError(f"{where}: {error}") from error


def _expressible(candidate: Candidate, mesh: Mesh, factors: Factors) -> bool:
    """Whether the plan's cuts of the axes can say the candidate's splits."""
    for axis, cut in factors_of(mesh, [candidate]).items():
        edges = {stride for _, _, stride in factors.get(axis, ())}
        if not {stride for _, _, stride in cut} <= edges:
            return False
    return True


def _makers(candidate: Candidate) -> str:
    names = [
        name + "".join(f" {value}" for _, value in options) for name, options in candidate.made_by
    ]
    return ", ".join(names) or "no strategy"


def _choice_text(candidate: Candidate) -> str:
    splits = [
        f"{dim} over {' · '.join(part.axis for part in split)}" for dim, split in candidate.splits
    ]
    sharded = [name for name, _ in candidate.params]
    params = f"{len(sharded)} parameters sharded" if sharded else "no parameter sharded"
    again = candidate.recompute
    kept = f", {again.scope} recomputed" if again else ""
    forms = "".join(f", {form.op} as {form.function or 'moved'}" for form in candidate.forms)
    return f"{', '.join(splits) or 'no splits'} and {params}{kept}{forms}"

"""Candidates → PlanningProblem where every rank has all layers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.planning.columns import BRIEF, EACH_S, HELD, ONCE_S, RESIDENT, TRANSIENT
from autopar.planning.joined import Late, unit_edges
from autopar.planning.kinds import (
    Kind,
    crossing_edges,
    inside_seconds,
    taken_in,
)
from autopar.planning.layered import Layered
from autopar.planning.price import SlotKey
from autopar.planning.problem import Choice, Edge, PlanningProblem, Share, Shared, Slot
from autopar.planning.shared_inputs import shared_inputs


def whole_problem(layered: Layered, limit_bytes: int) -> PlanningProblem:
    """The problem of a setting without stages."""
    pricer, times = layered.pricer, layered.pricer.setting.microbatches
    known: dict[int, tuple[Choice, ...]] = {}
    inside_s = inside_seconds(pricer, "")
    late_s = layered.skeleton_late()
    slots = [
        _skeleton_slot(layered, key, inside_s[key], late_s[key[1]]) for key in layered.skeleton
    ]
    for path, kind in layered.kinds.items():
        if id(kind) not in known:
            known[id(kind)] = tuple(_choices(kind, times))
        slots.append(Slot(path, known[id(kind)], path, is_front=True))
    found = crossing_edges(pricer, "", layered.index)
    edges = [_of_step(layered.on_columns(edge), times) for edge in found]
    edges += _units(layered)
    edges += layered.group_edges()
    base, shared = pricer.base(), shared_inputs(layered, layered.kinds)
    return PlanningProblem(
        tuple(slots),
        tuple(edges),
        limit_bytes,
        base.seconds,
        base.resident_bytes + pricer.prices.overhead_bytes() + shared.always_bytes,
        layered.covers(),
        shared=tuple(
            Shared(name, takes, Share(0, resident_bytes=size))
            for name, size, takes in shared.sometimes
        ),
    )


def _choices(kind: Kind, times: int) -> Iterator[Choice]:
    for row in kind.columns.costs:
        seconds = float(times * row[EACH_S] + row[ONCE_S])
        sizes = int(row[RESIDENT] + row[HELD]), int(row[BRIEF])
        yield Choice(seconds, *sizes, again_bytes=int(row[TRANSIENT] - row[BRIEF]))


def _skeleton_slot(
    layered: Layered, key: SlotKey, inside_s: Sequence[Late], late_s: Sequence[Late]
) -> Slot:
    pricer, choices = layered.pricer, []
    for c, candidate in enumerate(pricer.candidates[key]):
        bill, times = pricer.bill("", candidate), pricer.setting.microbatches
        seconds = bill.seconds + sum(
            times * each_s + once_s for each_s, once_s in (inside_s[c], late_s[c])
        )
        sizes = bill.resident_bytes, bill.transient_bytes
        choices.append(Choice(seconds, *sizes, freed_bytes=bill.freed_bytes))
    return Slot(f"/{key[1]}", tuple(choices), "")


def _of_step(edge: Edge, times: int) -> Edge:
    """An edge's seconds of a microbatch as those of a step, with what is paid once a step."""
    seconds = tuple(
        tuple(
            None if s is None else s * times + edge.costs(made, needed)[1]
            for needed, s in enumerate(row)
        )
        for made, row in enumerate(edge.seconds)
    )
    return replace(edge, seconds=seconds, step_seconds=())


def _units(layered: Layered) -> Iterator[Edge]:
    pricer = layered.pricer
    slots = {
        layered.index[key]: taken_in(pricer, "", pricer.candidates[key]) for key in layered.skeleton
    }
    for edge in unit_edges({"": slots}, pricer.prices.seconds):
        yield _of_step(edge, pricer.setting.microbatches)

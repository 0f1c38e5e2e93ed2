"""Why a free plan is faster than a published one: the parts of both, and the words made of them."""

import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch
from plan_cases import Asked, tried
from published_models import Shape, build
from published_plans_why import EXPOSED_ALL, differs, freed, ladder, moved, shares, steps, won
from step_parts import AGAIN, EXPOSED, OPTIMIZER, WAITING, Parts, parts_of

from autopar.capture import capture
from autopar.cluster import resolve_cluster
from autopar.graph.analyse import analyse
from autopar.layouts.state_ratio import StateRatio
from autopar.plan import Plan


@cache
def asked() -> Asked:
    """Four layers of a GPT on a node of eight."""
    width, heads = 1024, 8
    shape = Shape(
        *(4, width, heads, heads, width // heads, 4 * width, 8192, 256),
        *(False, True, True, True, 0.0, torch.bfloat16),
    )
    model, given = build(shape, 64)
    graph = analyse(capture(model, given, None))
    return Asked(graph, resolve_cluster("a100:8"), StateRatio(2.0, 4, 4, 2))


@cache
def case(**pin: Any) -> tuple[dict[str, Any], Plan, Parts]:
    """A pinned plan's line, the plan, its parts."""
    line, plan = tried(asked(), pin)
    assert plan is not None, line
    parts = parts_of(asked(), plan)
    return {**line, "parts": parts, "id": "one/case/row"}, plan, parts


MESHES: tuple[dict[str, Any], ...] = (
    {"dp": 8, "recompute": "full", "zero": 3},
    {"dp": 2, "tp": 4, "recompute": False},
    {"pp": 4, "dp": 2, "microbatches": 8, "recompute": "full", "zero": 1},
)


@pytest.mark.parametrize("pin", MESHES, ids=str)
def test_parts_are_the_whole_step(pin: dict[str, Any]) -> None:
    """By kind they are the plan's own figures, and its axes are those that communicate."""
    _, plan, parts = case(**pin)
    own = plan.predicted
    assert all(value >= -1e-12 for value in parts.values()), parts
    assert math.isclose(sum(parts.values()), own.step_s, rel_tol=1e-9)
    exposed = sum(value for name, value in parts.items() if name.startswith(EXPOSED))
    assert math.isclose(exposed, own.communication_s, rel_tol=1e-9)
    assert math.isclose(parts[OPTIMIZER], own.optimizer_s, rel_tol=1e-9)
    assert math.isclose(parts.get(WAITING, 0.0), own.waiting_s, rel_tol=1e-9, abs_tol=1e-12)
    for axis, size in plan.axes.items():
        named = [name for name in parts if name.removeprefix(EXPOSED) == axis]
        assert bool(named) == (size > 1), (axis, parts)


def test_what_runs_again_is_the_forward_of_layers() -> None:
    """A plan that recomputes takes as much longer, in compute, as its part says."""
    again, kept = (case(dp=8, zero=1, recompute=how, microbatches=1) for how in ("full", False))
    assert kept[2][AGAIN] == 0.0 < again[2][AGAIN]
    more_s = again[1].predicted.compute_s - kept[1].predicted.compute_s
    assert math.isclose(again[2][AGAIN], more_s, rel_tol=1e-6)


def test_each_pin_is_lifted_once() -> None:
    pins = {"dp": 4, "tp": 2, "zero": False, "recompute": False, "layers": {}, "microbatches": 2}
    found = list(freed(pins))
    assert [name for name, _ in found] == ["recompute", "ZeRO", "microbatches and schedule"]
    assert found[-1][1] == {"dp": 4, "tp": 2}


def test_a_pin_costs_what_its_lifting_wins() -> None:
    """Each plan of the ladder is free to be the one before it, and the last to be the free plan."""
    pins: dict[str, Any] = {"dp": 2, "tp": 4, "recompute": "full", "zero": False, "microbatches": 8}
    row, free = case(**pins)[0], case()[0]
    rungs = ladder(asked(), pins, 60.0)
    times = [row["step_s"], *(one["step_s"] for one in rungs), free["step_s"]]
    assert all(b <= a * 1.002 for a, b in itertools.pairwise(times)), times
    assert times[1] < 0.95 * times[0]  # nothing needs to run again here
    text = steps(row, free, rungs)
    assert text.count("→") == len(rungs) + 1 and "recompute" in text and "mesh" in text


def test_words_are_the_figures() -> None:
    row, free = (_line(step, **more) for step, more in ((3.0, {"axes": {"tp": 8}}), (2.0, {})))
    row |= {"parts": {"a": 2.0, "b": 1.0}, "used": {"recompute full": 4, "data": 2}}
    free |= {"parts": {"a": 0.5, "b": 1.001, "c": 0.499}, "used": {"zero 1": 2, "zero 2": 1}}
    assert differs(row, free) == (
        "mesh tp 8 → dp 8; recompute full ×4 → none; zero none → 1 ×2, 2 ×1"
    )
    assert differs(free, free) == "the same decisions"
    assert [name for name, _, _ in moved(row["parts"], free["parts"])] == ["a", "b", "c"]
    assert won(row, free) == "Of 1.00 s it wins a 1.50 s (150%); it pays c 499.00 ms."


def test_a_case_counts_as_much_as_another() -> None:
    """Shares of seconds won add up to one, whatever the steps' lengths."""
    long = {"step_s": 30.0, "parts": {AGAIN: 20.0, EXPOSED + "tp": 10.0}}
    after = {"step_s": 10.0, "parts": {AGAIN: 0.0, EXPOSED + "tp": 5.0, EXPOSED + "dp": 5.0}}
    brief = {"step_s": 3.0, "parts": {WAITING: 3.0}}, {"step_s": 2.0, "parts": {WAITING: 2.0}}
    found = shares([(long, after), brief])
    assert found == {AGAIN: 0.5, EXPOSED_ALL: 0.0, WAITING: 0.5}
    assert sum(found.values()) == 1.0


def _line(step_s: float, **more: Any) -> dict[str, Any]:
    return {"step_s": step_s, "axes": {"dp": 8}, "schedule": "", "microbatches": 1, **more}

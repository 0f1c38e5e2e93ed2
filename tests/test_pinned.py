"""Pins that leave nothing open make a program without a search, and its account is the search's."""

from typing import Any

import pytest
from models import Job, gpt2

import autopar
from autopar.capture import capture
from autopar.cluster import resolve_cluster
from autopar.graph.analyse import analyse
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.layout import Setting
from autopar.layouts.program import Program
from autopar.layouts.state_ratio import StateRatio
from autopar.planning.account import account
from autopar.planning.decide import tokens_of
from autopar.planning.meshes import axes_in_order
from autopar.planning.outer import region_candidates
from autopar.planning.pinned import pinned_program
from autopar.planning.pins import read_pins
from autopar.planning.prices import Prices
from autopar.plugin import Mesh, Option
from autopar.registry import select_cost_models, select_strategies

PINS: dict[str, Any] = {"pp": 1, "dp": 2, "ep": 1, "tp": 2, "microbatches": 2}
OFF: dict[str, Any] = {"zero": False, "sequence": False, "recompute": False}


def job() -> Job:
    return gpt2()


def pinned(graph: ModelGraph, pins: dict[str, Any]) -> Program:
    chosen = select_strategies()
    return pinned_program(graph, resolve_cluster("cpu:4"), chosen, read_pins(pins, (), chosen))


def test_same_as_a_search() -> None:
    given = job()
    graph = analyse(capture(given.model, given.batch, given.loss))
    for more in ({}, {"zero": 2}, {"pp": 2, "dp": 1, "schedule": "1f1b"}):
        pins = {**PINS, **OFF, **more}
        program = pinned(graph, pins)
        prices = Prices(select_cost_models(), program.setting.mesh, resolve_cluster("cpu:4"))
        ours = account(program, prices, StateRatio(2.0), tokens_of(graph)).predicted
        plan = autopar.compile(given.model, "cpu:4", given.batch, loss=given.loss, pin=pins).plan
        assert ours == plan.predicted


def test_open_pins() -> None:
    given = job()
    graph = analyse(capture(given.model, given.batch, given.loss))
    with pytest.raises(autopar.AutoparError, match=r"the pins leave \d+ choices for .*'zero'"):
        pinned(graph, {**PINS, "sequence": False, "recompute": False})
    with pytest.raises(autopar.AutoparError, match=r"leave .* settings"):
        pinned(graph, {"pp": 1, "ep": 1, "tp": 2, **OFF})
    with pytest.raises(autopar.AutoparError, match="isn't divisible"):
        pinned(graph, {**PINS, **OFF, "microbatches": 3})


@pytest.mark.parametrize(
    ("axis", "name", "options"),
    [
        ("dp", "recompute", {"together": 2}),
        ("dp", "recompute", {"scope": "selective"}),
        ("dp", "zero", {"within": 2}),
        ("dp", "zero", {"stage": 2, "within": 2}),
        ("cp", "context", {"form": "ring"}),
    ],
)
def test_an_option_holds_in_every_candidate(
    axis: str, name: str, options: dict[str, Option]
) -> None:
    """Of a region none says less than was pinned; regions without attention have no form of it."""
    given, chosen = job(), select_strategies()
    graph = analyse(capture(given.model, given.batch, given.loss))
    mesh = Mesh(tuple((a.name, 4 if a.name == axis else 1) for a in axes_in_order(chosen)))
    data = (mesh.part("dp"),) if axis == "dp" else ()
    pins = read_pins({axis: 4, name: options}, (), chosen)
    found = region_candidates(graph, Setting(mesh, data, 1), chosen, pins)
    met = 0
    for (path, region), candidates in found.items():
        said = [own for c in candidates.choices if (own := c.options(name)) is not None]
        if name == "context" and not candidates.region.attention:
            assert said and not any(said)
            continue
        assert all(own.items() >= options.items() for own in said), (path, region)
        met += len(said)
    assert met

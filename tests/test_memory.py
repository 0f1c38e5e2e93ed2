"""Bytes that a rank holds."""

from dataclasses import replace
from typing import Literal

import pytest

from autopar.cluster import resolve_cluster
from autopar.cost_models.memory import MemoryCost
from autopar.planning.books import Stage, memory_of
from autopar.planning.prices import Prices
from autopar.plugin import Mesh, Resident
from autopar.registry import select_cost_models

CPU = resolve_cluster("cpu:4")
MESH = Mesh((("dp", 4),))


@pytest.mark.parametrize("nbytes", [0, 1, 3 * 2**40])
def test_bytes_as_they_are(nbytes: int) -> None:
    assert MemoryCost().cost(Resident("saved", nbytes), MESH, CPU) == nbytes


def test_overhead_is_the_device_s() -> None:
    assert MemoryCost().overhead_bytes(MESH, CPU) == 0
    context, group = 2 * 2**30, 429496730
    assert MemoryCost().overhead_bytes(Mesh(()), resolve_cluster("h100:4")) == context
    assert MemoryCost().overhead_bytes(MESH, resolve_cluster("h100:4")) == context + group
    other = replace(CPU, device=replace(CPU.device, overhead_bytes=7))
    assert MemoryCost().overhead_bytes(MESH, other) == 7


def test_the_allocator_s_fragments() -> None:
    """Of what comes and goes alone."""
    cluster = resolve_cluster("h100:4")
    assert cluster.device.fragmentation == 0.15
    both: tuple[Literal["saved", "transient"], ...] = ("saved", "transient")
    for what in both:
        assert MemoryCost().cost(Resident(what, 1000), MESH, cluster) == pytest.approx(1150)
    assert MemoryCost().cost(Resident("master", 1000), MESH, cluster) == 1000
    assert MemoryCost().cost(Resident("gradient", 1000), MESH, cluster) == 1000


def test_kinds_of_memory() -> None:
    cluster = resolve_cluster("h100:4")
    prices = Prices(select_cost_models(), MESH, cluster)
    held = [
        ("h.0", Resident("master", 70)),
        ("h.0", Resident("saved", 1000)),
        ("h.0", Resident("transient", 200)),
        ("h.1", Resident("transient", 600)),
    ]
    stage = Stage(((3,),), {"h.0": 0, "h.1": 0, "": 0})
    assert memory_of(held, stage, prices) == {
        "master": 70,
        "saved": 3000,
        "transient": 600,
        "fragmentation": 540,
        "overhead": prices.overhead_bytes(),
    }

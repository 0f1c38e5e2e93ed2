"""Bytes that a rank holds."""

from dataclasses import replace

import pytest

from autopar.cluster import resolve_cluster
from autopar.cost_models.memory import MemoryCost
from autopar.plugin import Mesh, Resident

CPU = resolve_cluster("cpu:4")
MESH = Mesh((("dp", 4),))


@pytest.mark.parametrize("nbytes", [0, 1, 3 * 2**40])
def test_bytes_as_they_are(nbytes: int) -> None:
    assert MemoryCost().cost(Resident("saved", nbytes), MESH, CPU) == nbytes


def test_overhead_is_the_device_s() -> None:
    assert MemoryCost().overhead_bytes(MESH, CPU) == 0
    assert MemoryCost().overhead_bytes(MESH, resolve_cluster("h100:4")) == 2 * 2**30
    other = replace(CPU, device=replace(CPU.device, overhead_bytes=7))
    assert MemoryCost().overhead_bytes(MESH, other) == 7

"""The price of ops against closed forms."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec, Device, Link, resolve_cluster
from autopar.cost_models.compute import OVERHEADS, ComputeCost
from autopar.errors import AutoparError
from autopar.plugin import Compute, Mesh

CHIP = Device("chip", "gloo", 2**30, (("bfloat16", 4e9), ("float32", 1e9)), 1e8, 1e-6)
CLUSTER = ClusterSpec(CHIP, 1, (Link("wire", 1, 1e-6, 1e9),), "a test", "2026-01-01")
NUMBERS = st.integers(0, 10**12)


def seconds(op: str, flops: int, nbytes: int, dtype: str = "float32") -> float:
    effect = Compute(op, flops, nbytes, dtype, "forward")
    return ComputeCost().cost(effect, Mesh(()), CLUSTER)


def test_closed_forms() -> None:
    assert seconds("matmul", 8000, 100) == pytest.approx(8e-6 + 1e-6)  # flops bind
    assert seconds("matmul", 8000, 100, "bfloat16") == pytest.approx(2e-6 + 1e-6)
    assert seconds("pointwise", 100, 400) == pytest.approx(4e-6 + 1e-6)  # bytes bind
    assert seconds("copy", 0, 400, "int64") == pytest.approx(4e-6 + 1e-6)
    assert seconds("attention", 0, 400) == pytest.approx(4e-6 + 2e-6)
    assert seconds("loss", 0, 400) == pytest.approx(4e-6 + 1.5e-6)
    assert seconds("optimizer", 0, 400) == pytest.approx(4e-6 + 14e-6)
    assert seconds("view", 10**9, 10**9) == pytest.approx(0.4e-6)


def test_exponentials_take_time_where_the_device_says_so() -> None:
    effect = Compute("pointwise", 0, 400, "float32", "forward", special=50)
    slow = replace(CLUSTER, device=replace(CHIP, special_per_s=1e6))
    plain = ComputeCost().cost(effect, Mesh(()), CLUSTER)
    assert ComputeCost().cost(effect, Mesh(()), slow) == pytest.approx(plain + 50e-6)


@given(op=st.sampled_from(sorted(OVERHEADS)), flops=NUMBERS, nbytes=NUMBERS, more=NUMBERS)
def test_grows_with_flops_and_bytes_and_is_never_free(
    op: str, flops: int, nbytes: int, more: int
) -> None:
    price = seconds(op, flops, nbytes)
    assert price >= CHIP.op_overhead_s * OVERHEADS[op] > 0
    assert seconds(op, flops + more, nbytes) >= price
    assert seconds(op, flops, nbytes + more) >= price


def test_every_preset_prices_the_usual_dtypes() -> None:
    for preset in ("cpu:4", "a100:8", "h100:8"):
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            effect = Compute("matmul", 10**12, 10**9, dtype, "backward")
            assert ComputeCost().cost(effect, Mesh(()), resolve_cluster(preset)) > 1e-4


def test_errors() -> None:
    with pytest.raises(AutoparError, match="no price for op class 'magic': compute prices matmul"):
        seconds("magic", 1, 1)
    with pytest.raises(
        AutoparError, match="'chip' has no rate for float8, only for bfloat16, float32"
    ):
        seconds("matmul", 1, 1, "float8")

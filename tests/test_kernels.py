"""The time of matrix products and attention by shape, against closed forms and for its kinks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec, Device, Kernels, Link, describe_cluster, resolve_cluster
from autopar.cost_models.compute import ComputeCost, device_seconds, host_seconds, together
from autopar.cost_models.matrix_products import attention_seconds, product_seconds
from autopar.errors import AutoparError
from autopar.plugin import Compute, Mesh

RATE, MEMORY = 1e14, 1e15  # memory so fast that split-K's sums cost next to nothing
KERNELS = Kernels(
    units=100,
    sustained=0.8,
    tile_128=0.9,
    tile_64=0.7,
    prologue=128,
    aligned_16=0.6,
    unaligned=0.4,
    attention=0.5,
    attention_backward=0.6,
    attention_half=512,
    host_exponent=3.0,
    backward_ops=2.0,
    optimizer_ops=0.5,
)
UNIT = RATE * 0.8 / 100
CHIP = Device("chip", "nccl", 2**30, (("bfloat16", RATE),), MEMORY, 1e-5, kernels=KERNELS)
CLUSTER = ClusterSpec(CHIP, 1, (Link("wire", 1, 1e-6, 1e9),), "a test", "")
LENGTHS = st.integers(1, 20000)


def seconds(m: int, n: int, k: int, products: int = 1, dtype: str = "bfloat16") -> float:
    return product_seconds(products, m, n, k, dtype, RATE, MEMORY, KERNELS)


def test_whole_waves_of_large_tiles() -> None:
    """2560 x 1280 are 100 tiles of 256 x 128, one a unit."""
    wave = 2 * 256 * 128 * (4096 + 128) / UNIT
    assert seconds(2560, 1280, 4096) == pytest.approx(wave)
    assert seconds(25600, 1280, 4096) == pytest.approx(10 * wave)
    assert seconds(256, 1280, 4096, products=10) == pytest.approx(wave)
    flops = 2 * 25600 * 1280 * 4096
    assert seconds(25600, 1280, 4096) == pytest.approx(flops / (RATE * 0.8) * (1 + 128 / 4096))


def test_one_tile_more_is_one_wave_more() -> None:
    assert seconds(2560 * 4 + 1, 1280, 4096) > 1.1 * seconds(2560 * 4, 1280, 4096)
    assert seconds(2560 * 4 - 1, 1280, 4096) == seconds(2560 * 4, 1280, 4096)


def test_few_tiles_split_k() -> None:
    """25 tiles on 100 units: K in four parts."""
    whole = 2 * 256 * 128 * (8192 + 128) / UNIT
    parts = 2 * 256 * 128 * (2048 + 128) / UNIT
    found = seconds(1280, 640, 8192)
    assert found == pytest.approx(parts + 8 * 4 * 1280 * 640 / MEMORY)
    assert found < whole / 3


@pytest.mark.parametrize(
    ("n", "k", "share"),
    [(1280, 4096, 1.0), (1280 - 8, 4096, 0.6), (1280 - 1, 4096, 0.4), (1280, 4095, 0.4)],
)
def test_alignment(n: int, k: int, share: float) -> None:
    aligned = 2 * 256 * 128 * (k + 128) / UNIT
    assert seconds(2560, n, k) == pytest.approx(aligned / share)
    assert seconds(2560, n, k, dtype="float32") == pytest.approx(aligned)


@given(m=LENGTHS, n=LENGTHS, k=LENGTHS, products=st.integers(1, 64))
def test_never_faster_than_the_rate(m: int, n: int, k: int, products: int) -> None:
    found = seconds(m, n, k, products)
    assert found >= 2 * m * n * k * products / (RATE * 0.8)
    assert found <= seconds(m, n, k, products + 1)
    assert found <= seconds(m + 1, n, k, products)


def test_attention() -> None:
    rate = RATE * 0.5 * 2048 / (2048 + 512)
    assert attention_seconds(1e12, 2048, 128, False, RATE, KERNELS) == pytest.approx(1e12 / rate)
    backward = attention_seconds(2e12, 2048, 128, True, RATE, KERNELS)
    assert backward == pytest.approx(2.5e12 / (rate * 0.6))
    narrow = attention_seconds(1e12, 2048, 64, False, RATE, KERNELS)
    assert narrow == pytest.approx(1e12 / rate / 0.85)


def test_ops_go_by_their_shape() -> None:
    linear = Compute(
        "matmul", 2 * 2560 * 1280 * 4096, 100, "bfloat16", "forward", (1, 2560, 1280, 4096)
    )
    assert device_seconds(linear, CHIP) == seconds(2560, 1280, 4096)
    gradient = replace(linear, flops=2 * linear.flops, phase="backward")
    both = seconds(2560, 4096, 1280) + seconds(4096, 1280, 2560)
    assert device_seconds(gradient, CHIP) == pytest.approx(both)
    memory_bound = replace(linear, bytes=10**14)
    assert device_seconds(memory_bound, CHIP) == pytest.approx(0.1)
    unknown = replace(linear, shape=())
    assert device_seconds(unknown, CHIP) == pytest.approx(linear.flops / RATE)


def test_a_causal_mask_halves_attention() -> None:
    shape = (16, 2048, 2048, 128, 128)
    full = Compute("attention", 10**12, 1, "bfloat16", "forward", shape)
    causal = replace(full, skipped=0.5)
    assert device_seconds(causal, CHIP) == pytest.approx(device_seconds(full, CHIP) / 2)


def test_the_host_runs_ahead() -> None:
    assert together(8.0, 0.0, CHIP) == 8.0
    assert together(1.0, 1.0, CHIP) == pytest.approx(2 ** (1 / 3))
    assert together(1e-3, 1e-5, CHIP) == pytest.approx(1e-3, rel=1e-5)
    assert together(8.0, 2.0, replace(CHIP, kernels=None)) == 10.0
    op = Compute("pointwise", 0, 0, "bfloat16", "backward")
    assert host_seconds(op, CHIP) == 2e-5
    assert ComputeCost().cost(op, Mesh(()), CLUSTER) == pytest.approx(2e-5)
    step = Compute("optimizer", 0, 0, "bfloat16", "optimizer")
    assert host_seconds(step, CHIP) == 5e-6


def test_kernels_are_part_of_a_cluster_s_description() -> None:
    spec = resolve_cluster("h100:8")
    assert spec.device.kernels is not None and spec.device.kernels.units == 132
    assert resolve_cluster(describe_cluster(spec)) == spec
    assert "kernels" not in describe_cluster(resolve_cluster("cpu:4"))["device"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": 0}, "device.kernels.units must be a positive integer, not 0"),
        ({"sustained": -1}, "device.kernels.sustained must be a positive number, not -1"),
        ({"speed": 1}, "device.kernels has no 'speed': allowed are units"),
    ],
)
def test_refused_kernels(change: dict[str, float], message: str) -> None:
    described = describe_cluster(resolve_cluster("h100:8"))
    described["device"]["kernels"] |= change
    with pytest.raises(AutoparError, match=message):
        resolve_cluster(described)

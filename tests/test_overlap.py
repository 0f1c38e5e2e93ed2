"""What runs at the same time, as the largest of weighted sums."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import resolve_cluster
from autopar.cost_models.overlap import OverlapCost
from autopar.devices import ClusterSpec
from autopar.mesh import AxisPart, Mesh
from autopar.planning.books import timed
from autopar.planning.prices import Prices
from autopar.plugin import Alongside, Collective, Compute
from autopar.registry import select_cost_models

MESH = Mesh((("dp", 4),))
seconds = st.just(0.0) | st.floats(1e-3, 10)


def gpu(slowdown: float = 0.25, collective_s: float = 0.0) -> ClusterSpec:
    cluster = resolve_cluster("a100:4")
    assert cluster.device.kernels is not None
    kernels = replace(cluster.device.kernels, overlap_slowdown=slowdown, collective_s=collective_s)
    return replace(cluster, device=replace(cluster.device, kernels=kernels))


def cost(device: float, host: float, network: float, cluster: ClusterSpec) -> float:
    return OverlapCost().cost(Alongside(device, host, network), MESH, cluster)


def test_in_sequence_without_kernels() -> None:
    assert cost(1.0, 2.0, 4.0, resolve_cluster("cpu:4")) == 7.0


@given(seconds, seconds)
def test_communication_beside_compute(device: float, network: float) -> None:
    expected = max(device, network) + 0.25 * min(device, network)
    assert cost(device, 0.0, network, gpu()) == pytest.approx(expected)
    assert cost(device, 0.0, network, gpu(1.0)) == pytest.approx(device + network)


@given(seconds, seconds)
def test_a_host_that_runs_ahead(device: float, host: float) -> None:
    cluster = gpu()
    assert cluster.device.kernels is not None
    q = cluster.device.kernels.host_exponent
    curve = (device**q + host**q) ** (1 / q)
    assert 0.99 * curve <= cost(device, host, 0.0, cluster) <= curve * (1 + 1e-9)


@given(st.tuples(seconds, seconds, seconds), st.tuples(seconds, seconds, seconds))
def test_convex_and_rising(
    one: tuple[float, float, float], other: tuple[float, float, float]
) -> None:
    """What a linear programme needs, and what nobody gains by: more work is never faster."""
    cluster = gpu()
    both = one[0] + other[0], one[1] + other[1], one[2] + other[2]
    assert cost(*both, cluster) <= cost(*one, cluster) + cost(*other, cluster) + 1e-9
    assert cost(*both, cluster) >= cost(*one, cluster) - 1e-9


def prices(cluster: ClusterSpec, hides_sums: bool = False) -> Prices:
    models = [OverlapCost(hides_sums) if m.name == "overlap" else m for m in select_cost_models()]
    return Prices(select_cost_models(models), MESH, cluster)


COMPUTE = Compute("pointwise", 0, 10**10, "bfloat16", "backward")
SUM = Collective("all_reduce", 2**27, (AxisPart("dp", 4),), "grad_sync", "step", "w")
SCATTER = Collective(
    "reduce_scatter", 2**27, (AxisPart("dp", 4),), "backward", "step", "w", "", True
)


def test_once_a_step_beside_the_last_backward() -> None:
    own = prices(gpu())
    alone = timed({(COMPUTE, 1): 1}, own, 8)
    assert alone.step_s == pytest.approx(8 * own.cost(COMPUTE), rel=0.02)
    scattered = timed({(COMPUTE, 1): 1, (SCATTER, 1): 1}, own, 8)
    taken = own.cost(SCATTER)
    assert scattered.step_s - alone.step_s == pytest.approx(0.25 * taken, rel=0.02)
    assert scattered.once_s == pytest.approx(scattered.step_s - alone.step_s)
    # The program sums after the backward, and waits.
    summed = timed({(COMPUTE, 1): 1, (SUM, 1): 1}, own, 8)
    assert summed.step_s - alone.step_s == pytest.approx(own.cost(SUM))


def test_others_hide_their_sums() -> None:
    other = prices(gpu(), hides_sums=True)
    alone = timed({(COMPUTE, 1): 1}, other, 8)
    summed = timed({(COMPUTE, 1): 1, (SUM, 1): 1}, other, 8)
    assert summed.step_s - alone.step_s == pytest.approx(0.25 * other.cost(SUM), rel=0.02)


def test_every_collective_waits() -> None:
    own, late = prices(gpu()), prices(gpu(collective_s=1e-3))
    assert late.cost(SUM) == own.cost(SUM)  # by itself
    assert late.apart(SUM) == pytest.approx((own.cost(SUM) + 1e-3, 4e-3))

"""The price of collectives against closed forms, and which algorithm is taken where."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec, Device, Fit, Link, Protocol, resolve_cluster
from autopar.cost_models.collective_algorithms import ranks, with_below
from autopar.cost_models.collective_libraries import ALGORITHMS, LIBRARIES
from autopar.cost_models.collectives import CollectiveCost, cheapest
from autopar.cost_models.topology import Route, route
from autopar.errors import AutoparError
from autopar.plugin import AxisPart, Collective, Mesh

A, W = 1e-6, 1e9  # α, 1/β of the inner link
A2, W2 = 1e-5, 1e8  # of the outer one
MEMORY_RATE = 3e10
G = 3 / MEMORY_RATE  # γ
EVERY = tuple({name for named in ALGORITHMS.values() for name in named} | {"hierarchical"})


def cluster(devices: int, *links: Link, backend: str = "mpi") -> ClusterSpec:
    """Devices of a library that has every algorithm."""
    device = Device("chip", backend, 1000, (("float32", 1e9),), MEMORY_RATE, 1e-6)
    return ClusterSpec(device, devices, links or (Link("node", devices, A, W),), "a test", "")


def nodes(of: int, count: int, backend: str = "mpi") -> ClusterSpec:
    """Two levels: `count` nodes of `of` devices."""
    inner, outer = Link("node", of, A, W), Link("wire", of * count, A2, W2)
    return cluster(of * count, inner, outer, backend=backend)


def price(
    op: str, nbytes: float, spec: ClusterSpec, algorithm: str | None = None
) -> tuple[float, str]:
    """(seconds, algorithm) of a group of all devices."""
    mesh = Mesh((("tp", spec.devices),))
    levels = route((mesh.part("tp"),), mesh, spec)
    allowed = EVERY if algorithm is None else (algorithm,)
    return cheapest(op, levels, nbytes, spec.device.backend, allowed)


def seconds(op: str, nbytes: float, n: int, algorithm: str) -> float:
    """One algorithm on one switch."""
    found, name = price(op, nbytes, cluster(n), algorithm)
    assert name == algorithm
    return found


# ---------------------------------------------------------------- closed forms on one switch


@pytest.mark.parametrize("n", [2, 4, 8, 64])
@pytest.mark.parametrize("nbytes", [64, 10**6, 10**9])
def test_all_reduce_on_one_switch(n: int, nbytes: int) -> None:
    lg, b, part = math.log2(n), nbytes / W, (n - 1) / n

    def all_reduce(algorithm: str) -> float:
        return seconds("all_reduce", nbytes, n, algorithm)

    assert all_reduce("ring") == pytest.approx(2 * (n - 1) * A + 2 * part * b)
    assert all_reduce("tree") == pytest.approx(2 * lg * (A + b) + lg * nbytes * G)
    assert all_reduce("butterfly") == pytest.approx(lg * (A + b + nbytes * G))
    assert all_reduce("rabenseifner") == pytest.approx(
        2 * lg * A + 2 * part * b + part * nbytes * G
    )
    assert all_reduce("double_tree") == pytest.approx(2 * lg * A + 2 * b / 0.92)


@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_the_others_on_one_switch(n: int) -> None:
    nbytes = 4 * 10**6
    lg, b, part = math.log2(n), nbytes / W, (n - 1) / n
    for op in ("all_gather", "reduce_scatter"):
        assert seconds(op, nbytes, n, "ring") == pytest.approx((n - 1) * (A + b / n))
    doubling = lg * A + part * b
    assert seconds("all_gather", nbytes, n, "butterfly") == pytest.approx(doubling)
    halving = doubling + part * nbytes * G
    assert seconds("reduce_scatter", nbytes, n, "butterfly") == pytest.approx(halving)
    assert seconds("broadcast", nbytes, n, "tree") == pytest.approx(lg * (A + b))
    assert seconds("broadcast", nbytes, n, "chain") == pytest.approx((n - 1) * A + b)
    assert seconds("broadcast", nbytes, n, "scatter_all_gather") == pytest.approx(
        (lg + n - 1) * A + 2 * part * b
    )
    assert seconds("reduce", nbytes, n, "tree") == pytest.approx(lg * (A + b + nbytes * G))
    assert seconds("reduce", nbytes, n, "ring") == pytest.approx(2 * (n - 1) * (A + b / n))
    for op in ("gather", "scatter"):
        assert seconds(op, nbytes, n, "linear") == pytest.approx((n - 1) * (A + b / n))
        assert seconds(op, nbytes, n, "tree") == pytest.approx(lg * A + part * b)
    assert seconds("all_to_all", nbytes, n, "pairwise") == pytest.approx((n - 1) * (A + b / n))
    assert seconds("all_to_all", nbytes, n, "bruck") == pytest.approx(lg * (A + b / 2))
    assert seconds("send", nbytes, n, "direct") == pytest.approx(A + b)


@pytest.mark.parametrize("n", [3, 6, 12])
def test_odd_groups_have_no_butterfly(n: int) -> None:
    for op, algorithm in (("all_reduce", "rabenseifner"), ("all_gather", "butterfly")):
        assert price(op, 1000, cluster(n), algorithm) == (math.inf, "")
    rounds = math.ceil(math.log2(n))
    assert seconds("broadcast", 1000, n, "tree") == pytest.approx(rounds * (A + 1000 / W))


# ---------------------------------------------------------------- several levels


def test_a_ring_over_nodes() -> None:
    """Each chunk crosses the wire once for each further node; bytes enter by all 4 members' links,
    which is less than what a device's own link carries."""
    assert price("all_gather", 8e6, nodes(4, 2), "ring")[0] == pytest.approx(
        6 * A + 1 * A2 + 7 / 8 * 8e6 / (4 * W2)
    )
    assert price("all_reduce", 8e6, nodes(4, 2), "ring")[0] == pytest.approx(
        2 * (6 * A + A2 + 7 / 8 * 8e6 / (4 * W2))
    )


def test_hierarchical_all_reduce() -> None:
    """Reduce inside, all-reduce across, broadcast inside, each by its cheapest."""
    spec, nbytes = nodes(6, 4), 10**5
    mesh = Mesh((("tp", 24),))
    levels = route((mesh.part("tp"),), mesh, spec)
    found, name = cheapest(
        "all_reduce", levels, nbytes, "mpi", ("chain", "butterfly", "hierarchical")
    )
    across = 2 * (A2 + nbytes / W2 + nbytes * G)
    inside = 2 * (5 * A + nbytes / W)
    assert found == pytest.approx(inside + across)
    assert name == "hierarchical"


def test_sharded_hierarchy_sends_a_part_over_each_link() -> None:
    spec, nbytes = nodes(4, 3), 12e6
    names = ("ring", "hierarchical_sharded")
    mesh = Mesh((("tp", 12),))
    levels = route((mesh.part("tp"),), mesh, spec)
    inside = 2 * 3 * (A + nbytes / 4 / W)
    across = 4 * (A2 + nbytes / 4 / 3 / W2)
    ring = price("all_reduce", nbytes, spec, "ring")[0]
    found, _ = cheapest("all_reduce", levels, nbytes, "mpi", names)
    assert found == pytest.approx(min(inside + across, ring))
    small, chosen = cheapest("all_reduce", levels, 100, "mpi", names)
    assert chosen == "hierarchical_sharded"
    assert small == pytest.approx(6 * A + 4 * A2 + 6 * 100 / 4 / W + 4 * 100 / 12 / W2)


def test_all_gather_by_levels() -> None:
    mesh = Mesh((("tp", 12),))
    levels = route((mesh.part("tp"),), mesh, nodes(4, 3))
    found, name = cheapest("all_gather", levels, 1200, "mpi", ("ring", "hierarchical"))
    assert name == "hierarchical"
    assert found == pytest.approx(3 * (A + 300 / W) + 2 * (A2 + 100 / W2))


def test_nccl_s_tree_over_nodes() -> None:
    """A chain inside, double binary trees across."""
    found = price("all_reduce", 4096, nodes(8, 16), "hierarchical_tree")[0]
    assert found == pytest.approx(2 * (7 * A + 4 * A2) + 2 * 4096 / (0.92 * 8 * W2))


def test_all_to_all_over_nodes() -> None:
    found = price("all_to_all", 1600, nodes(4, 4), "pairwise")[0]
    assert found == pytest.approx(3 * (A + 100 / W) + 12 * (A2 + 100 / W2))


# ---------------------------------------------------------------- torus and mesh


def torus(*shape: int, wraps_from: int = 3) -> ClusterSpec:
    devices = math.prod(shape)
    return cluster(
        devices,
        Link("ici", devices, A, W, topology="torus", shape=shape, wraps_from=wraps_from),
    )


def test_torus_all_gather_uses_all_links() -> None:
    found = price("all_gather", 64e6, torus(4, 4, 4), "torus")[0]
    assert found == pytest.approx(3 * 2 * A + 63 / 64 * 64e6 / (6 * W))
    twice = price("all_reduce", 64e6, torus(4, 4, 4), "torus")[0]
    assert twice == pytest.approx(2 * found)


def test_a_line_is_half_as_fast_as_a_ring() -> None:
    ring = price("all_gather", 8e9, torus(8), "torus")[0]
    line = price("all_gather", 8e9, torus(8, wraps_from=9), "torus")[0]
    assert ring == pytest.approx(4 * A + 7 / 8 * 8e9 / (2 * W))
    assert line == pytest.approx(7 * A + 7 / 8 * 8e9 / W)


def test_torus_all_to_all() -> None:
    """A quarter of the all-gather of all buffers, in a ring (the Scaling Book's figure)."""
    found = price("all_to_all", 16e9, torus(16), "torus")[0]
    assert found == pytest.approx(8 * A + 16 / 8 * 16e9 / W)
    assert found == pytest.approx(16 * 16e9 / (2 * W) / 4, rel=1e-3)


def test_part_of_a_torus_dimension_is_a_line() -> None:
    spec = torus(4, 8)
    mesh = Mesh((("dp", 8), ("tp", 4)))
    (inner,) = route((mesh.part("tp"),), mesh, spec)
    (ring,) = inner.rings
    assert (ring.length, ring.closed, ring.bytes_per_s) == (4, False, W)
    (outer,) = route((mesh.part("dp"),), mesh, spec)
    assert [(r.length, r.closed, r.bytes_per_s, r.latency_s) for r in outer.rings] == [
        (2, True, W / 4, 4 * A),  # every fourth of a row of 8, which four groups share
        (4, True, W, A),
    ]


def test_full_mesh() -> None:
    spec = cluster(8, Link("xgmi", 8, A, W, topology="mesh"))
    part = 8e6 / 8 / W
    assert price("all_gather", 8e6, spec, "direct")[0] == pytest.approx(A + part)
    assert price("all_to_all", 8e6, spec, "direct")[0] == pytest.approx(A + part)
    assert price("all_reduce", 8e6, spec, "direct")[0] == pytest.approx(
        2 * (A + part) + 7 / 8 * 8e6 * G
    )
    # Rings over all seven links of a rank at once.
    assert price("all_gather", 8e6, spec, "ring")[0] == pytest.approx(7 * A + part)


def test_in_switch_reduction() -> None:
    link = Link("nvlink", 8, A, W, switch_bytes_per_s=0.75 * W, switch_latency_s=25e-6)
    spec = cluster(8, link, backend="nccl")
    found, name = price("all_reduce", 1e9, spec)
    assert found == pytest.approx(25e-6 + 1e9 / (0.75 * W))
    assert name == "in_switch"


# ---------------------------------------------------------------- which is taken


@pytest.mark.parametrize(
    ("nbytes", "spec", "expected"),
    [
        (64, cluster(64), {"butterfly", "tree", "rabenseifner"}),
        (10**5, cluster(256), {"rabenseifner"}),
        (10**9, cluster(4), {"ring"}),
        (10**9, cluster(8), {"ring"}),
        (100, nodes(6, 12), {"hierarchical", "hierarchical_sharded", "hierarchical_tree"}),
        (10**4, nodes(6, 12), {"hierarchical", "hierarchical_sharded", "hierarchical_tree"}),
        (64, nodes(8, 32, "nccl"), {"hierarchical_tree"}),
        (10**10, nodes(8, 2, "nccl"), {"ring"}),
        (64, cluster(64, backend="nccl"), {"double_tree"}),
        (10**9, cluster(8, backend="nccl"), {"ring"}),
        (64, cluster(64, backend="gloo"), {"ring"}),  # it has no other
        (10**6, torus(4, 4, 4), {"torus"}),
        (64, cluster(8, Link("xgmi", 8, A, W, topology="mesh")), {"direct"}),
    ],
)
def test_crossovers_of_all_reduce(nbytes: int, spec: ClusterSpec, expected: set[str]) -> None:
    mesh = Mesh((("tp", spec.devices),))
    effect = Collective("all_reduce", nbytes, (mesh.part("tp"),), "forward", "step", "x")
    assert CollectiveCost().explain(effect, mesh, spec) in expected


@pytest.mark.parametrize("op", ALGORITHMS)
@pytest.mark.parametrize("backend", [*LIBRARIES, "mpi"])
def test_every_backend_has_every_collective(op: str, backend: str) -> None:
    for spec in (cluster(6, backend=backend), nodes(4, 2, backend), nodes(3, 5, backend)):
        mesh = Mesh((("tp", spec.devices),))
        effect = Collective(op, 1000, (mesh.part("tp"),), "forward", "step", "x")  # type: ignore[arg-type]
        assert CollectiveCost().cost(effect, mesh, spec) > 0
        assert CollectiveCost().explain(effect, mesh, spec)


def test_gloo_reduce_scatters_by_an_all_reduce() -> None:
    spec = cluster(4, backend="gloo")
    mesh = Mesh((("tp", 4),))

    def cost(op: str) -> float:
        effect = Collective(op, 10**6, (mesh.part("tp"),), "forward", "step", "x")  # type: ignore[arg-type]
        return CollectiveCost().cost(effect, mesh, spec)

    assert cost("reduce_scatter") == cost("all_reduce") == pytest.approx(2 * cost("all_gather"))


# ---------------------------------------------------------------- properties


OPS = st.sampled_from(sorted(ALGORITHMS))
BYTES = st.integers(1, 10**10)
CLUSTERS = st.one_of(
    st.integers(2, 64).map(cluster),
    st.builds(nodes, st.integers(2, 8), st.integers(2, 16), st.sampled_from(["mpi", "nccl"])),
    st.lists(st.integers(2, 5), min_size=1, max_size=3).map(lambda shape: torus(*shape)),
    st.integers(2, 16).map(lambda n: cluster(n, Link("xgmi", n, A, W, topology="mesh"))),
)


def sends(levels: Route) -> float:
    """The most bytes/s that leave a rank over the group's levels."""
    total = 0.0
    for level in levels:
        links = level.ranks - 1 if level.link.topology == "mesh" else 1
        total += sum(r.ways * r.bytes_per_s for r in level.rings) or links * level.bytes_per_s
    return total


def crossing(levels: Route) -> float:
    """Seconds that one byte a rank takes out of a block of the outermost level, sent by all of its
    members' links at once, with the block's share of an all-gather: bytes · (blocks − 1)/blocks."""
    (top, below) = list(with_below(levels))[-1]
    if top.rings or top.link.topology == "mesh":
        return 0.0
    return (top.ranks - 1) / top.ranks / (below * top.bytes_per_s)


@given(op=OPS, spec=CLUSTERS, nbytes=BYTES, more=BYTES)
def test_grows_with_bytes_and_keeps_the_bounds(
    op: str, spec: ClusterSpec, nbytes: int, more: int
) -> None:
    found, name = price(op, nbytes, spec)
    assert name
    assert price(op, nbytes + more, spec)[0] > found
    mesh = Mesh((("tp", spec.devices),))
    levels = route((mesh.part("tp"),), mesh, spec)
    n = ranks(levels)
    share = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "reduce": 1.0, "send": 0.0}
    bound = max(
        share.get(op, (n - 1) / n) * nbytes / sends(levels),
        nbytes * crossing(levels) * (2 if op == "all_reduce" else 1) if op in (
            "all_reduce", "all_gather", "reduce_scatter") else 0.0,
    )  # fmt: skip
    assert found >= bound * (1 - 1e-12)
    if op != "send":
        assert found >= min(level.latency_s for level in levels)


def test_unknown_collective() -> None:
    effect = Collective("gossip", 8, (AxisPart("tp", 4),), "forward", "step", "h")  # type: ignore[arg-type]
    with pytest.raises(AutoparError, match="no price for collective 'gossip' of h"):
        CollectiveCost().cost(effect, Mesh((("tp", 4),)), cluster(4))


def test_no_algorithm_left() -> None:
    effect = Collective("all_reduce", 8, (AxisPart("tp", 3),), "forward", "step", "h")
    with pytest.raises(AutoparError, match="no algorithm for all_reduce of h over 3 ranks"):
        CollectiveCost(("rabenseifner",)).cost(effect, Mesh((("tp", 3),)), cluster(3))


# ---------------------------------------------------------------- protocols and measurements


def test_the_cheapest_protocol() -> None:
    """Each call costs its own, trees their own α."""
    short = Protocol("LL", 6e-6, 1e-6, 2e-6, 0.5, 0.25)
    long = Protocol("Simple", 8e-6, 3e-6, 4e-6, 1.0, 0.9)
    spec = cluster(4, Link("node", 4, A, W, protocols=(short, long)), backend="nccl")
    assert price("all_gather", 8, spec, "ring")[0] == pytest.approx(6e-6 + 3e-6 + 6 / (0.5 * W))
    assert price("all_gather", 8e9, spec, "ring")[0] == pytest.approx(8e-6 + 9e-6 + 6)
    tree = price("all_reduce", 8, spec, "tree")[0]
    assert tree == pytest.approx(6e-6 + 4 * (2e-6 + 8 / (0.25 * W)) + 2 * 8 * G)


def test_measured_links() -> None:
    fits = (
        Fit("all_gather", "ring", 1000, 2e-6, 5e8),
        Fit("all_gather", "ring", 0, 1e-6, 2e9),
    )
    spec = cluster(4, Link("node", 4, A, W, fits=fits), backend="gloo")
    assert price("all_gather", 800, spec)[0] == pytest.approx(3 * (2e-6 + 200 / 5e8))
    assert price("all_gather", 8e6, spec)[0] == pytest.approx(3 * (1e-6 + 2e6 / 2e9))
    # Where the larger sizes' fit starts lower, the smaller sizes' last price stands.
    assert price("all_gather", 1001, spec)[0] == pytest.approx(3 * (2e-6 + 250 / 5e8))
    # An op that wasn't measured goes by the link.
    assert price("broadcast", 800, spec)[0] == pytest.approx(2 * (A + 800 / W))


# ---------------------------------------------------------------- what others measured


H100_ALL_REDUCE_US = {
    8: 13.67, 1024: 16.94, 2**15: 19.33, 2**18: 20.43, 2**19: 20.66, 2**20: 27.37, 2**21: 42.21,
    2**22: 54.19, 2**23: 83.04, 2**24: 123.8, 2**25: 199.3, 2**26: 324.7, 2**27: 586.4,
    2**28: 1112.5, 2**29: 2151.0, 2**30: 4029.4, 2**32: 15749.0, 2**34: 62648.0,
}  # fmt: skip
"""nccl-tests on a DGX H100 by bytes: NVIDIA/dgxc-benchmarking, nccl/README.md. The preset's rate of
reduction in the switch is from the last row, everything else from NCCL's source."""


def test_the_preset_against_nccl_tests() -> None:
    spec, mesh = resolve_cluster("h100:8"), Mesh((("tp", 8),))
    errors = []
    for nbytes, measured_us in H100_ALL_REDUCE_US.items():
        effect = Collective("all_reduce", nbytes, (mesh.part("tp"),), "forward", "step", "x")
        predicted_us = 1e6 * CollectiveCost().cost(effect, mesh, spec)
        errors.append(abs(predicted_us / measured_us - 1))
    assert sum(errors) / len(errors) < 0.12
    assert max(errors) < 0.27


MEASURED_US = {
    2**10: 16.94,
    2**15: 19.33,
    2**18: 20.43,
    2**20: 27.37,
    2**21: 42.21,
    2**22: 54.19,
    2**23: 83.04,
    2**24: 123.8,
    2**25: 199.3,
    2**26: 324.7,
    2**27: 586.4,
    2**28: 1112.5,
    2**29: 2151.0,
    2**30: 4029.4,
    2**32: 15749.0,
}
"""All-reduces of 8 H100 by size: NVIDIA/dgxc-benchmarking, nccl/README.md."""


def test_h100_all_reduces_as_measured() -> None:
    cluster, axes = resolve_cluster("h100:8"), (AxisPart("tp", 8),)
    off = []
    for size, us in MEASURED_US.items():
        effect = Collective("all_reduce", size, axes, "forward", "microbatch", "x")
        seconds = CollectiveCost().cost(effect, Mesh((("tp", 8),)), cluster)
        off.append(seconds / us * 1e6 - 1)
    assert sum(map(abs, off)) / len(off) < 0.06
    assert max(map(abs, off)) < 0.21

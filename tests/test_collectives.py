"""The price of collectives against closed forms, and the links that groups need."""

import itertools
import math
from typing import Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec, Link, resolve_cluster
from autopar.cost_models.collectives import CollectiveCost, group_link
from autopar.errors import AutoparError
from autopar.plugin import AxisPart, Collective, Mesh, Split

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
ALPHA, RATE = 1e-6, 1e9
NODE = Link("node", 4, ALPHA, RATE)
WIRE_ALPHA, WIRE_RATE = 1e-5, 1e8


def cluster(devices: int) -> ClusterSpec:
    """Nodes of 4; one link only where that is all of it."""
    wire = (Link("wire", devices, WIRE_ALPHA, WIRE_RATE),) if devices > 4 else ()
    return ClusterSpec(resolve_cluster("h100:8").device, devices, (NODE, *wire), "a test", "")


def seconds(op: Op, nbytes: int, n: int) -> float:
    mesh = Mesh((("tp", n),))
    effect = Collective(op, nbytes, (mesh.part("tp"),), "forward", "microbatch", "x")
    spec = ClusterSpec(cluster(4).device, n, (Link("node", n, ALPHA, RATE),), "a test", "")
    return CollectiveCost().cost(effect, mesh, spec)


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("all_reduce", 6 * (1e-6 + 1e-3)),
        ("all_gather", 3 * (1e-6 + 1e-3)),
        ("reduce_scatter", 3 * (1e-6 + 1e-3)),
        ("all_to_all", 3 * (1e-6 + 1e-3)),
        ("broadcast", (2 + 3) * 1e-6 + 2 * 3e-3),  # scatter and all-gather: 4 MB is long
    ],
)
def test_four_ranks_and_four_megabytes(op: Op, expected: float) -> None:
    assert seconds(op, 4_000_000, 4) == pytest.approx(expected)


def test_gloo_reduce_scatters_by_an_all_reduce() -> None:
    mesh, spec = Mesh((("tp", 4),)), resolve_cluster("cpu:4")

    def price(op: Op) -> float:
        effect = Collective(op, 10**6, (mesh.part("tp"),), "forward", "microbatch", "x")
        return CollectiveCost().cost(effect, mesh, spec)

    assert price("reduce_scatter") == price("all_reduce") == pytest.approx(2 * price("all_gather"))


def test_a_short_broadcast_goes_down_a_tree() -> None:
    assert seconds("broadcast", 4, 8) == pytest.approx(3 * (1e-6 + 4e-9))


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_all_reduce_is_reduce_scatter_and_all_gather(n: int) -> None:
    parts = seconds("reduce_scatter", 10**6, n) + seconds("all_gather", 10**6, n)
    assert seconds("all_reduce", 10**6, n) == pytest.approx(parts)


@given(
    op=st.sampled_from(get_args(Op)),
    n=st.integers(2, 64),
    nbytes=st.integers(1, 10**10),
    more=st.integers(1, 10**10),
)
def test_grows_with_bytes_and_is_never_free(op: Op, n: int, nbytes: int, more: int) -> None:
    price = seconds(op, nbytes, n)
    assert price >= math.log2(n) * ALPHA
    assert seconds(op, nbytes + more, n) > price


def test_unknown_collective() -> None:
    effect = Collective("gossip", 8, (AxisPart("tp", 4),), "forward", "step", "h")  # type: ignore[arg-type]
    with pytest.raises(AutoparError, match="no price for collective 'gossip' of h"):
        CollectiveCost().cost(effect, Mesh((("tp", 4),)), cluster(4))


# ---------------------------------------------------------------- links


def link(axes: Split, *sizes: tuple[str, int]) -> tuple[float, float]:
    mesh = Mesh(sizes)
    return group_link(axes, mesh, cluster(mesh.world))


def test_the_link_of_a_group() -> None:
    dp, tp = AxisPart("dp", 4), AxisPart("tp", 4)
    sizes = (("dp", 4), ("tp", 4))
    assert link((tp,), *sizes) == (ALPHA, RATE)
    assert link((dp,), *sizes) == (WIRE_ALPHA, WIRE_RATE)
    # The whole cluster: a ring enters each node through the links of the group's 4 members in it.
    assert link((dp, tp), *sizes) == link((tp, dp), *sizes) == (WIRE_ALPHA, 4 * WIRE_RATE)
    # Two members in each node.
    assert link((AxisPart("dp", 8),), ("dp", 8), ("tp", 2)) == (WIRE_ALPHA, 2 * WIRE_RATE)


def test_a_factor_of_an_axis() -> None:
    sizes = (("tp", 8),)
    assert link((AxisPart("tp", 4, stride=1),), *sizes) == (ALPHA, RATE)
    assert link((AxisPart("tp", 2, stride=4),), *sizes) == (WIRE_ALPHA, WIRE_RATE)
    assert link((AxisPart("tp", 4, stride=2),), *sizes) == (WIRE_ALPHA, 2 * WIRE_RATE)


def test_groups_that_straddle_nodes_need_the_wire() -> None:
    assert link((AxisPart("tp", 3),), ("dp", 4), ("tp", 3))[0] == WIRE_ALPHA  # ranks 3, 4, 5


def test_a_wide_inner_group_is_bound_by_the_inner_link() -> None:
    fast_wire = (NODE, Link("wire", 8, WIRE_ALPHA, RATE))
    spec = ClusterSpec(cluster(4).device, 8, fast_wire, "a test", "")
    assert group_link((AxisPart("dp", 8),), Mesh((("dp", 8),)), spec) == (WIRE_ALPHA, RATE)


def test_a_group_larger_than_the_cluster() -> None:
    with pytest.raises(AutoparError, match="over 8 ranks of the mesh tp8 doesn't fit 4 devices"):
        group_link((AxisPart("tp", 8),), Mesh((("tp", 8),)), cluster(4))


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    chosen=st.data(),
)
def test_links_against_all_groups_of_all_ranks(sizes: list[int], chosen: st.DataObject) -> None:
    """The level found is the first in which no group has members in two blocks."""
    mesh = Mesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
    axes = chosen.draw(st.sets(st.sampled_from([name for name, _ in mesh.axes])))
    per_node = chosen.draw(
        st.sampled_from([d for d in range(1, mesh.world + 1) if mesh.world % d == 0])
    )
    levels = (Link("node", per_node, 1.0, 1.0), Link("wire", mesh.world, 2.0, 1.0))
    spec = ClusterSpec(cluster(4).device, mesh.world, levels, "a test", "")
    groups: dict[tuple[int, ...], set[int]] = {}
    for rank in range(mesh.world):
        place = mesh.coordinate(rank)
        rest = tuple(place[name] for name, _ in mesh.axes if name not in axes)
        groups.setdefault(rest, set()).add(rank // per_node)
    straddles = any(len(nodes) > 1 for nodes in groups.values())
    split = tuple(mesh.part(name) for name in sorted(axes))
    assert group_link(split, mesh, spec)[0] == (2.0 if straddles else 1.0)


def test_outer_axes_never_get_faster_links() -> None:
    spec = resolve_cluster("h100:64")
    for dp, tp in itertools.product((2, 4, 8), repeat=2):
        mesh = Mesh((("pp", 64 // dp // tp), ("dp", dp), ("tp", tp)))
        inner = group_link((mesh.part("tp"),), mesh, spec)
        outer = group_link((mesh.part("dp"),), mesh, spec)
        assert inner[0] <= outer[0]
        assert inner[1] >= outer[1]

"""Which links groups use, and their share."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_collectives import A2, W2, A, W, cluster, nodes

from autopar.cluster import ClusterSpec, Link, resolve_cluster
from autopar.cost_models.collective_libraries import ALGORITHMS
from autopar.cost_models.collectives import CollectiveCost
from autopar.cost_models.topology import Level, route
from autopar.errors import AutoparError
from autopar.plugin import AxisPart, Collective, Mesh, Split
from autopar.preset_files import preset_names


def levels(axes: Split, *sizes: tuple[str, int], node: int = 4) -> list[tuple[int, float, float]]:
    """(ranks, α, bytes/s) of each level of a group in nodes of 4."""
    mesh = Mesh(sizes)
    spec = nodes(node, mesh.world // node)
    return [(one.ranks, one.latency_s, one.bytes_per_s) for one in route(axes, mesh, spec)]


def test_the_levels_of_a_group() -> None:
    dp, tp = AxisPart("dp", 4), AxisPart("tp", 4)
    sizes = (("dp", 4), ("tp", 4))
    assert levels((tp,), *sizes) == [(4, A, W)]
    assert levels((dp,), *sizes) == [(4, A2, W2)]
    both = [(4, A, W), (4, A2, W2)]
    assert levels((dp, tp), *sizes) == levels((tp, dp), *sizes) == both
    assert levels((AxisPart("dp", 8),), ("dp", 8), ("tp", 2)) == [(2, A, W), (4, A2, W2)]
    assert levels((), *sizes) == []


def test_a_factor_of_an_axis() -> None:
    sizes = (("tp", 8),)
    assert levels((AxisPart("tp", 4, stride=1),), *sizes) == [(4, A, W)]
    assert levels((AxisPart("tp", 2, stride=4),), *sizes) == [(2, A2, W2)]
    assert levels((AxisPart("tp", 4, stride=2),), *sizes) == [(2, A, W), (2, A2, W2)]


def test_groups_that_straddle_nodes_need_the_wire() -> None:
    mesh = Mesh((("dp", 4), ("tp", 3)))
    (level,) = route((mesh.part("tp"),), mesh, nodes(4, 3))  # ranks 3, 4, 5, say
    assert (level.ranks, level.latency_s, level.aligned) == (3, A2, False)
    assert level.bytes_per_s == W2


def test_groups_beside_each_other_collide() -> None:
    """A group of some of a node's devices, more than one, pays for each that does the same."""
    wire = Link("wire", 32, A2, W2, crowding=0.5, leaf=2)
    spec = cluster(32, Link("node", 8, A, W), wire)

    def rate(dp: int) -> float:
        mesh = Mesh((("dp", dp), ("tp", 32 // dp)))
        return route((mesh.part("dp"),), mesh, spec)[-1].bytes_per_s

    assert rate(4) == W2  # one member a node
    assert rate(8) == W2 / 3  # two of each node's devices: four groups
    assert rate(16) == W2 / 2  # four of eight: two groups
    assert rate(32) == W2  # the whole node is one group's
    near = cluster(32, Link("node", 8, A, W), replace(wire, leaf=4))
    mesh = Mesh((("dp", 8), ("tp", 4)))
    assert route((mesh.part("dp"),), mesh, near)[-1].bytes_per_s == W2  # under one switch


def test_oversubscription() -> None:
    leaf = Link("leaf", 8, A2, W2)
    spine = Link("spine", 32, A2, W2, oversubscription=4)
    spec = cluster(32, Link("node", 4, A, W), leaf, spine)
    mesh = Mesh((("dp", 32),))
    rates = [level.bytes_per_s for level in route((mesh.part("dp"),), mesh, spec)]
    assert rates == [W, W2, W2 / 4]


def test_a_group_larger_than_the_cluster() -> None:
    with pytest.raises(AutoparError, match="over 8 ranks of the mesh tp8 doesn't fit 4 devices"):
        route((AxisPart("tp", 8),), Mesh((("tp", 8),)), cluster(4))


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), chosen=st.data())
def test_levels_against_all_groups_of_all_ranks(sizes: list[int], chosen: st.DataObject) -> None:
    """An aligned group has as many ranks in every node that it touches as its first level says; one
    on the outer level alone or unaligned has members in two."""
    mesh = Mesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
    axes = chosen.draw(st.sets(st.sampled_from([name for name, _ in mesh.axes])))
    divisors = [d for d in range(1, mesh.world + 1) if mesh.world % d == 0]
    per_node = chosen.draw(st.sampled_from(divisors))
    links = (Link("node", per_node, 1.0, 1.0), Link("wire", mesh.world, 2.0, 1.0))
    spec = ClusterSpec(cluster(4).device, mesh.world, links, "a test", "")
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world):
        place = mesh.coordinate(rank)
        rest = tuple(place[name] for name, _ in mesh.axes if name not in axes)
        groups.setdefault(rest, []).append(rank // per_node)
    split = tuple(mesh.part(name) for name in sorted(axes))
    found = route(split, mesh, spec)
    assert math.prod(level.ranks for level in found) == len(groups[next(iter(groups))])
    counts = {n.count(node) for n in groups.values() for node in set(n)}
    straddles = any(len(set(n)) > 1 for n in groups.values())
    assert any(level.latency_s == 2.0 for level in found) is straddles
    if all(level.aligned for level in found):
        assert counts == {inside(found)}


def inside(found: tuple[Level, ...]) -> int:
    """Members in one node."""
    return math.prod(level.ranks for level in found if level.link.name == "node")


def test_outer_axes_never_get_faster_links() -> None:
    spec = resolve_cluster("h100:64")
    for dp, tp in itertools.product((2, 4, 8), repeat=2):
        mesh = Mesh((("pp", 64 // dp // tp), ("dp", dp), ("tp", tp)))
        inner = route((mesh.part("tp"),), mesh, spec)
        outer = route((mesh.part("dp"),), mesh, spec)
        assert inner[-1].latency_s <= outer[-1].latency_s
        assert inner[-1].bytes_per_s >= outer[-1].bytes_per_s


PRESETS = [f"{name}:{72 if name == 'gb200_nvl72' else 64}" for name in preset_names()]


@pytest.mark.parametrize("preset", PRESETS)
@given(sizes=st.permutations([2, 2, 2, 2, 4]), chosen=st.data())
def test_every_group_on_every_preset_has_a_price(
    preset: str, sizes: list[int], chosen: st.DataObject
) -> None:
    """Whole axes and factors of them, aligned with nodes and tori or not."""
    spec = resolve_cluster(preset)
    if spec.devices == 72:
        sizes = [9 if size == 4 else size for size in sizes]
        sizes[sizes.index(2)] = 1
    mesh = Mesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
    names = chosen.draw(st.sets(st.sampled_from([name for name, _ in mesh.axes]), min_size=1))
    axes = tuple(mesh.part(name) for name in sorted(names))
    n = math.prod(part.size for part in axes)
    assert math.prod(level.ranks for level in route(axes, mesh, spec)) == n
    for op in ALGORITHMS:
        effect = Collective(op, 10**6, axes, "forward", "step", "x")  # type: ignore[arg-type]
        cost = CollectiveCost().cost(effect, mesh, spec)
        assert 0 < cost < 1 if n > 1 else cost == 0

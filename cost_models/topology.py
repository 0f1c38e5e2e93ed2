"""Which links a group of ranks uses: the levels of the network that it spans, with its share."""

import functools
import math
from dataclasses import dataclass, replace

from autopar.plugin import AutoparError, ClusterSpec, Fit, Link, Mesh, Protocol, Split

Spread = tuple[tuple[int, int], ...]
"""(size, stride in ranks) of the parts that make up a group."""


@dataclass(frozen=True)
class Ring:
    """The ranks of a group along one dimension of a torus: a closed ring, or a line. Each link
    carries `bytes_per_s` of this group's each way; a neighbour is `latency_s` away."""

    length: int
    closed: bool
    latency_s: float
    bytes_per_s: float

    @property
    def ways(self) -> int:
        """In how many directions a rank can send at once: a line's ends have one."""
        return 2 if self.closed else 1


@dataclass(frozen=True)
class Level:
    """One level of a group: `ranks` blocks of its members reach each other, at α = `latency_s` a
    message and `bytes_per_s` each way for every member, all sending at once.

    `add_s_per_byte` (γ) is what a device takes to add a byte of another's to its own. `link` is
    what lies beneath. `aligned`: False where the group's members don't lie alike in the level's
    blocks, so that it is all of the group in one, on the worst link. `inside`: the innermost of
    several levels, or of a library's protocols: a node. `rings`: the group's dimensions of a torus.
    """

    ranks: int
    latency_s: float
    bytes_per_s: float
    add_s_per_byte: float
    link: Link
    aligned: bool = True
    inside: bool = False
    rings: tuple[Ring, ...] = ()

    def under(self, protocol: Protocol, tree: bool) -> "Level":
        """The level as a protocol of the same name uses it; `tree`: in a tree's messages."""
        own = next((p for p in self.link.protocols if p.name == protocol.name), None)
        if own is None:
            return self
        latency_s, share = (
            (own.tree_latency_s, own.tree_share) if tree else (own.latency_s, own.share)
        )
        return replace(self, latency_s=latency_s, bytes_per_s=self.bytes_per_s * share)

    def fitted(self, fit: Fit) -> "Level":
        """The level with a measurement's α and β in place of the link's."""
        rate = fit.bytes_per_s * self.bytes_per_s / self.link.bytes_per_s
        return replace(self, latency_s=fit.latency_s, bytes_per_s=rate)

    @property
    def ring_bytes_per_s(self) -> float:
        """What rings carry out of a rank: a full mesh has as many disjoint ones as a rank has
        neighbours, which each use one of its links."""
        links = self.ranks - 1 if self.link.topology == "mesh" else 1
        return links * self.bytes_per_s


Route = tuple[Level, ...]
"""A group's levels, from the innermost out; the product of their ranks is the group's size."""


@functools.lru_cache(maxsize=4096)
def route(axes: Split, mesh: Mesh, cluster: ClusterSpec) -> Route:
    """The levels that the groups along `axes` span: all of them at once, as in a step.

    A rank has its own share of a level's links (a node's network cards divided by its devices), so
    groups beside each other don't slow each other down, but for `crowding`: where groups have some
    of a block's devices each, more than one, all such groups of the mesh cross the level together.

    Errors: AutoparError for a group that needs more devices than the cluster has.
    """
    spread = merged(axes, mesh)
    extent = max((size * stride for size, stride in spread), default=1)
    if extent > cluster.devices:
        raise AutoparError(
            f"a group over {extent} ranks of the mesh {mesh} doesn't fit {cluster.devices} devices"
        )
    if not spread:
        return ()
    levels: list[Level] = []
    inner, below = 1, 1
    for depth, link in enumerate(cluster.links):
        if not is_aligned(spread, link.devices):
            return (_unaligned(spread, extent, cluster),)
        members = members_within(spread, link.devices)
        if members > below:
            ranks = members // below
            crowd = _crowd(ranks, below, inner, link, cluster.devices, spread)
            level = _level(ranks, inner, link, spread, crowd)
            inside = depth == 0 and (len(cluster.links) > 1 or bool(link.protocols))
            levels.append(replace(level, inside=inside, add_s_per_byte=_adding(cluster)))
        inner, below = link.devices, members
    assert below == math.prod(size for size, _ in spread), (spread, cluster)
    return tuple(levels)


def merged(axes: Split, mesh: Mesh) -> Spread:
    """The group's parts by stride, innermost first, those that continue each other joined."""
    parts = sorted(
        (mesh.stride(part.axis) * part.stride, part.size) for part in axes if part.size > 1
    )
    spread: list[tuple[int, int]] = []
    for stride, size in parts:
        if spread and spread[-1][0] * spread[-1][1] == stride:
            spread[-1] = (spread[-1][0] * size, spread[-1][1])
        else:
            spread.append((size, stride))
    return tuple(spread)


def is_aligned(spread: Spread, block: int) -> bool:
    """Whether every group has as many members in each block of that many ranks that it touches."""
    return all(
        stride % block == 0
        or (block % stride == 0 and (size % (block // stride) == 0 or block % (size * stride) == 0))
        for size, stride in spread
    )


def members_within(spread: Spread, block: int) -> int:
    """How many of a group's members one block holds."""
    return math.prod(min(size, max(1, block // stride)) for size, stride in spread)


def fewest_within(spread: Spread, block: int) -> int:
    """How many members the block with the fewest of a group's holds, of those that it touches."""
    return math.prod(max(1, math.gcd(size * stride, block) // stride) for size, stride in spread)


def _crowd(ranks: int, below: int, inner: int, link: Link, devices: int, spread: Spread) -> int:
    """How many groups collide on a level: those with `below` of each block's `inner` devices."""
    groups = devices // math.prod(size for size, _ in spread)
    return groups if 1 < below < inner and ranks > link.leaf and groups > 1 else 0


def _level(ranks: int, inner: int, link: Link, spread: Spread, crowd: int) -> Level:
    """One level of an aligned group over blocks of `inner` devices, which `crowd` groups share."""
    rate = link.bytes_per_s / link.oversubscription / (1 + link.crowding * crowd)
    rings = torus_rings(spread, inner, link, rate) if link.topology == "torus" else ()
    if rings and math.prod(ring.length for ring in rings) != ranks:
        # The group doesn't fit the torus's lines: each hop crosses all dimensions, say.
        hops = sum(length // 2 for length in link.shape)
        rings = (Ring(ranks, False, link.latency_s * hops, rate / len(link.shape)),)
    latency_s = max((ring.latency_s for ring in rings), default=link.latency_s)
    rate = min((ring.bytes_per_s for ring in rings), default=rate)
    return Level(ranks, latency_s, rate, 0.0, link, rings=rings)


def _adding(cluster: ClusterSpec) -> float:
    """γ: two bytes are read and one is written."""
    return 3 / cluster.device.memory_bytes_per_s


def _unaligned(spread: Spread, extent: int, cluster: ClusterSpec) -> Level:
    """The whole group on the worst α and rate of the levels that it needs, up to the first whose
    blocks hold whole groups."""
    latency_s, rate, inside = 0.0, math.inf, 1
    needed = cluster.links[0]
    for link in cluster.links:
        needed = link
        hops = max(1, sum(length // 2 for length in link.shape))
        latency_s = max(latency_s, link.latency_s * hops)
        share = link.bytes_per_s / link.oversubscription / max(1, len(link.shape))
        rate = min(rate, fewest_within(spread, inside) * share)
        if link.devices % extent == 0:
            break
        inside = link.devices
    ranks = math.prod(size for size, _ in spread)
    return Level(ranks, latency_s, rate, _adding(cluster), needed, aligned=False)


def torus_rings(spread: Spread, inner: int, link: Link, rate: float) -> tuple[Ring, ...]:
    """The group's rings and lines along the torus's dimensions.

    Blocks lie in row-major order over the shape. Of a dimension whose every t-th place is a
    member's, each hop crosses t links, which t groups share; two parts in one dimension share it
    too. Members in part of a dimension form a line.
    """
    found: list[tuple[int, Ring]] = []
    pitch = inner
    for dim in reversed(range(len(link.shape))):
        places = link.shape[dim]
        for size, stride in spread:
            low, high = max(stride, pitch), min(size * stride, pitch * places)
            if high <= low:
                continue
            length, step = high // low, low // pitch
            closed = length * step == places and places >= link.wraps_from
            found.append((dim, Ring(length, closed, link.latency_s * step, rate / step)))
        pitch *= places
    dims = [dim for dim, _ in found]
    return tuple(
        Ring(ring.length, ring.closed, ring.latency_s, ring.bytes_per_s / dims.count(dim))
        for dim, ring in found
    )

"""Closed forms of collectives on the levels that a group spans.

Notation of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005): n ranks, B bytes (the larger of a rank's input and output), α seconds a message, β
seconds a byte, γ seconds to add up a byte, which pipelined algorithms (rings, chains, double trees)
hide behind their messages. Each function takes a group's levels and B and returns seconds,
or None where the topology doesn't offer the algorithm. On one level of a switch they are the
textbook's; over several, each message is priced on the level that it crosses.
"""

import math
from collections.abc import Iterator

from autopar.cost_models.topology import Level, Route

DOUBLE_TREE_SHARE = 0.92
"""The share of a ring's rate that pipelined trees reach: NVIDIA/nccl@5067397 src/graph/tuning.cc
(`treeAR`: 0.92 · bw)."""


def ranks(route: Route) -> int:
    """n."""
    return math.prod(level.ranks for level in route)


def with_below(route: Route) -> Iterator[tuple[Level, int]]:
    """Each level, and how many of the group's members one of its blocks holds."""
    below = 1
    for level in route:
        yield level, below
        below *= level.ranks


def rounds(level: Level) -> int:
    """⌈log2 n⌉ of one level."""
    return (level.ranks - 1).bit_length()


def bottleneck(route: Route) -> float:
    """Bytes/s of rings through all levels: they enter a block through each member's own link, as
    NCCL's channels do, and go at the pace of the slowest level."""
    return min(below * level.ring_bytes_per_s for level, below in with_below(route))


def ring_latency(route: Route) -> float:
    """α of the n − 1 hops that a chunk makes: each level is crossed once for each of its blocks.

    (NCCL's tuning.cc: nInter hops at the network's latency, the rest at the node's.)
    """
    n = ranks(route)
    return sum(
        (n // below - n // (below * level.ranks)) * level.latency_s
        for level, below in with_below(route)
    )


def is_switched(route: Route) -> bool:
    """Whether any pairs can talk at once: no level is a torus."""
    return not any(level.rings for level in route)


def doubles(route: Route) -> bool:
    """Whether ranks can be paired at distances 1, 2, 4, …"""
    return is_switched(route) and all(level.ranks & (level.ranks - 1) == 0 for level in route)


# ---------------------------------------------------------------- all-gather, reduce-scatter


def ring_pass(route: Route, nbytes: float) -> float:
    """All-gather or reduce-scatter: (n − 1)(α + Bβ/n)."""
    n = ranks(route)
    return ring_latency(route) + (n - 1) / n * nbytes / bottleneck(route)


def doubling(route: Route, nbytes: float) -> float | None:
    """All-gather by recursive doubling: lg n · α + (n − 1)/n · Bβ.

    Far partners exchange first, so that a level out carries one block's part.
    """
    if not doubles(route):
        return None
    return sum(
        rounds(level) * level.latency_s + (1 - 1 / level.ranks) * nbytes / below / level.bytes_per_s
        for level, below in with_below(route)
    )


def halving(route: Route, nbytes: float) -> float | None:
    """Reduce-scatter by recursive halving: doubling backwards, and (n − 1)/n · Bγ."""
    sent_s = doubling(route, nbytes)
    n = ranks(route)
    return None if sent_s is None else sent_s + (n - 1) / n * nbytes * route[0].add_s_per_byte


# ---------------------------------------------------------------- all-reduce


def ring_all_reduce(route: Route, nbytes: float) -> float:
    """Reduce-scatter, then all-gather: 2S(n − 1)/n bytes in 2(n − 1) steps."""
    return 2 * ring_pass(route, nbytes)


def tree_all_reduce(route: Route, nbytes: float) -> float | None:
    """Binomial reduce and broadcast: 2⌈lg n⌉(α + Bβ) + ⌈lg n⌉ · Bγ."""
    down_s, up_s = tree(route, nbytes), tree_reduce(route, nbytes)
    return None if down_s is None or up_s is None else down_s + up_s


def butterfly(route: Route, nbytes: float) -> float | None:
    """Recursive doubling with whole buffers: lg n · (α + Bβ + Bγ)."""
    return tree_reduce(route, nbytes) if doubles(route) else None


def rabenseifner(route: Route, nbytes: float) -> float | None:
    """Recursive halving, then doubling: 2 lg n · α + (n − 1)/n · (2Bβ + Bγ)."""
    first_s, then_s = halving(route, nbytes), doubling(route, nbytes)
    return None if first_s is None or then_s is None else first_s + then_s


def double_tree(route: Route, nbytes: float) -> float | None:
    """Two pipelined binary trees (Sanders, Speck and Träff 2009): 2 lg n · α + 2Bβ/0.92."""
    return _pipelined_trees(route, nbytes) if len(route) == 1 else None


def hierarchical_tree(route: Route, nbytes: float) -> float | None:
    """NCCL's tree over nodes of g: reduce along a chain inside, all-reduce across in two binary
    trees, broadcast inside, pipelined: 2((g − 1)α₁ + lg(n/g) · α₂) + 2Bβ/0.92."""
    return _pipelined_trees(route, nbytes) if len(route) > 1 else None


def _pipelined_trees(route: Route, nbytes: float) -> float | None:
    if not is_switched(route):
        return None
    latency_s = sum(
        (level.ranks - 1 if level.inside else rounds(level)) * level.latency_s for level in route
    )
    return 2 * latency_s + 2 * nbytes / (DOUBLE_TREE_SHARE * bottleneck(route))


def in_switch(route: Route, nbytes: float) -> float | None:
    """The switch adds up: α + Bβ, at the rate that the link states for it (NVLink SHARP)."""
    (level,) = route if len(route) == 1 else (None,)
    if level is None or not level.aligned or not level.link.switch_bytes_per_s:
        return None
    return level.link.switch_latency_s + nbytes / level.link.switch_bytes_per_s


# ---------------------------------------------------------------- rooted


def tree(route: Route, nbytes: float) -> float | None:
    """Binomial broadcast: ⌈lg n⌉(α + Bβ)."""
    if not is_switched(route):
        return None
    return sum(rounds(level) * (level.latency_s + nbytes / level.bytes_per_s) for level in route)


def tree_reduce(route: Route, nbytes: float) -> float | None:
    """Binomial reduce: ⌈lg n⌉(α + Bβ + Bγ)."""
    sent_s = tree(route, nbytes)
    steps = sum(rounds(level) for level in route)
    return None if sent_s is None else sent_s + steps * nbytes * route[0].add_s_per_byte


def chain(route: Route, nbytes: float) -> float:
    """Pipelined along a ring, broadcast or reduce: (n − 1)α + Bβ (NCCL's ring)."""
    return ring_latency(route) + nbytes / bottleneck(route)


def tree_gather(route: Route, nbytes: float) -> float | None:
    """Binomial gather or scatter: ⌈lg n⌉ · α + (n − 1)/n · Bβ, at the root's own link."""
    if not is_switched(route):
        return None
    n = ranks(route)
    return sum(
        rounds(level) * level.latency_s + (level.ranks - 1) * below / n * nbytes / level.bytes_per_s
        for level, below in with_below(route)
    )


def linear(route: Route, nbytes: float) -> float:
    """Gather or scatter, every rank with the root itself: (n − 1)(α + Bβ/n)."""
    return peers(route, nbytes)


def scatter_all_gather(route: Route, nbytes: float) -> float | None:
    """Broadcast as scatter and ring all-gather (van de Geijn): (⌈lg n⌉ + n − 1)α + 2(n − 1)/n · Bβ.
    Backwards, reduce-scatter and gather, a reduce."""
    first = tree_gather(route, nbytes)
    return None if first is None else first + ring_pass(route, nbytes)


def ring_reduce(route: Route, nbytes: float) -> float:
    """Ring reduce-scatter, then each rank sends its part to the root: 2(n − 1)(α + Bβ/n)."""
    return ring_pass(route, nbytes) + linear(route, nbytes)


# ---------------------------------------------------------------- all-to-all, point to point


def peers(route: Route, nbytes: float) -> float:
    """One message of B/n with each other rank in turn, each on the level that it crosses."""
    n = ranks(route)
    return sum(
        (level.ranks - 1) * below * (level.latency_s + nbytes / n / level.bytes_per_s)
        for level, below in with_below(route)
    )


def pairwise(route: Route, nbytes: float) -> float | None:
    """All-to-all in pairs: (n − 1)(α + Bβ/n)."""
    return peers(route, nbytes) if is_switched(route) else None


def bruck(route: Route, nbytes: float) -> float | None:
    """All-to-all in ⌈lg n⌉ steps of half the buffer (Bruck et al. 1997): ⌈lg n⌉(α + Bβ/2)."""
    if not is_switched(route):
        return None
    return sum(
        rounds(level) * (level.latency_s + nbytes / 2 / level.bytes_per_s) for level in route
    )


def send(route: Route, nbytes: float) -> float:
    """From each rank to its neighbour, on the slowest level that some pair crosses: α + Bβ."""
    return max(level.latency_s + nbytes / level.bytes_per_s for level in route)

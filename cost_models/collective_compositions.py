"""Closed forms of collectives that follow the topology: full meshes, tori, levels in turn."""

import math
from collections.abc import Callable

from autopar.cost_models.topology import Level, Ring, Route

Best = Callable[[str, Route, float], float]
"""The cheapest price of an op on a route: what a level of a hierarchy takes."""


# ---------------------------------------------------------------- full mesh


def _mesh(route: Route) -> Level | None:
    (level,) = route if len(route) == 1 else (None,)
    return level if level and level.aligned and level.link.topology == "mesh" else None


def direct(route: Route, nbytes: float) -> float | None:
    """All-gather, all-to-all, gather or scatter over every pair's own link at once: α + Bβ/n."""
    level = _mesh(route)
    return level.latency_s + nbytes / level.ranks / level.bytes_per_s if level else None


def direct_sum(route: Route, nbytes: float) -> float | None:
    """Reduce-scatter: the same, and (n − 1)/n · Bγ."""
    sent_s = direct(route, nbytes)
    n = route[0].ranks
    return None if sent_s is None else sent_s + (n - 1) / n * nbytes * route[0].add_s_per_byte


def direct_broadcast(route: Route, nbytes: float) -> float | None:
    """Scatter, then all-gather: 2(α + Bβ/n)."""
    one_s = direct(route, nbytes)
    return None if one_s is None else 2 * one_s


def direct_reduce(route: Route, nbytes: float) -> float | None:
    """All-reduce or reduce: reduce-scatter, then all-gather or gather."""
    first_s, then_s = direct_sum(route, nbytes), direct(route, nbytes)
    return None if first_s is None or then_s is None else first_s + then_s


# ---------------------------------------------------------------- torus


def _torus(route: Route) -> tuple[Ring, ...]:
    return route[0].rings if len(route) == 1 else ()


def torus_pass(route: Route, nbytes: float) -> float | None:
    """All-gather or reduce-scatter on a torus of d dimensions, ring by ring.

    The buffer is cut into d parts; part p starts along dimension p and goes on to the next, so that
    all links are busy (Sack and Gropp, "Collective algorithms for multiported torus networks",
    2015). A ring of length L takes ⌊L/2⌋ hops (a line L − 1) and (L − 1)/L of what is there, both
    ways at once where it is closed. With equal closed rings: Σ⌊L/2⌋ · α + (n − 1)/n · Bβ/(2d).
    """
    rings = _torus(route)
    if not rings:
        return None
    part = nbytes / len(rings)
    total_s = 0.0
    for phase in range(len(rings)):
        times = []
        for first in range(len(rings)):
            order = [rings[(first + k) % len(rings)] for k in range(phase + 1)]
            left = part / math.prod(ring.length for ring in order[:-1])
            times.append(_ring_pass(order[-1], left))
        total_s += max(times)
    return total_s


def _ring_pass(ring: Ring, nbytes: float) -> float:
    hops = ring.length // 2 if ring.closed else ring.length - 1
    sent = (ring.length - 1) / ring.length * nbytes
    return hops * ring.latency_s + sent / (ring.ways * ring.bytes_per_s)


def torus_twice(route: Route, nbytes: float) -> float | None:
    """All-reduce, broadcast or reduce as two passes."""
    one = torus_pass(route, nbytes)
    return None if one is None else 2 * one


def torus_all_to_all(route: Route, nbytes: float) -> float | None:
    """Every dimension's links carry what crosses it: LBβ/8 in a closed ring of length L, LBβ/4 in
    a line, whose middle is the narrowest; the dimensions work at once. Hops as in a pass."""
    rings = _torus(route)
    if not rings:
        return None
    hops_s = sum(
        (ring.length // 2 if ring.closed else ring.length - 1) * ring.latency_s for ring in rings
    )
    return hops_s + max(_crossing(ring) * nbytes / ring.bytes_per_s for ring in rings)


def _crossing(ring: Ring) -> float:
    """The busiest link's bytes, as a multiple of a rank's buffer."""
    half, other = ring.length // 2, ring.length - ring.length // 2
    # A cut in two sends half · other pairs' messages each way; a ring is cut in two places.
    return half * other / ring.length / ring.ways


def torus_send(route: Route, nbytes: float) -> float | None:
    """To the neighbour: α + Bβ on one link."""
    rings = _torus(route)
    if not rings:
        return None
    return max(ring.latency_s + nbytes / ring.bytes_per_s for ring in rings)


# ---------------------------------------------------------------- levels in turn


def hierarchical(op: str, route: Route, nbytes: float, best: Best) -> float | None:
    """Level by level, each with its own cheapest algorithm.

    All-reduce: reduce inside, all-reduce across by one leader a block, broadcast inside. Broadcast
    and reduce: across by leaders and inside. All-gather and reduce-scatter: across on a block's
    part, which each member moves over its own link, and inside on the whole. Gather and scatter:
    by leaders. All-to-all: inside, then across, each of the whole buffer.
    """
    if len(route) < 2:
        return None
    inner, outer = route[:1], route[1:]
    block = inner[0].ranks
    match op:
        case "all_reduce":
            return (
                best("reduce", inner, nbytes)
                + best("all_reduce", outer, nbytes)
                + best("broadcast", inner, nbytes)
            )
        case "broadcast" | "reduce" | "all_to_all":
            return best(op, inner, nbytes) + best(op, outer, nbytes)
        case "all_gather" | "reduce_scatter":
            return best(op, inner, nbytes) + best(op, outer, nbytes / block)
        case "gather" | "scatter":
            blocks = math.prod(level.ranks for level in outer)
            return best(op, inner, nbytes / blocks) + best(op, outer, nbytes)
    return None


def hierarchical_sharded(route: Route, nbytes: float, best: Best) -> float | None:
    """All-reduce: reduce-scatter inside, all-reduce across by every member on its part, all-gather
    inside (Cho et al., "BlueConnect", 2019)."""
    if len(route) < 2:
        return None
    inner, outer = route[:1], route[1:]
    return (
        best("reduce_scatter", inner, nbytes)
        + best("all_reduce", outer, nbytes / inner[0].ranks)
        + best("all_gather", inner, nbytes)
    )

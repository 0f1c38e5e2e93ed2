"""Collectives that the runtime joins into one call: what each adds to it, and the call itself.

ZeRO gathers a layer's parameters together and reduce-scatters their gradients together (a unit);
gradients that are summed once a step lie in buckets. A call's latency is paid once by all that
share it, so it is no region's: `split_price` parts it from the bytes, which are.
"""

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.planning.columns import Joined
from autopar.planning.problem import Edge, Use
from autopar.plugin import BUCKET, Collective, Effect
from autopar.runtime.gradients import BUCKET_BYTES

Late = tuple[float, float]
"""Seconds each microbatch, and once a step."""
Cost = Callable[[Collective], Late]
MANY = 64
"""Buckets in which a call's latency is nothing."""
Taken = frozenset[Collective]
"""The units, as empty calls, that a choice takes part in."""


def empty_call(effect: Collective) -> Collective:
    """The call that an effect shares, without what is communicated."""
    return replace(effect, bytes=0, what="")


def split_price(effect: Collective, cost: Cost) -> Late:
    """Seconds that a joined collective adds: of its bytes, and of the buckets that they fill.

    In a bucket a byte costs what it costs in a full one; in a unit what it costs where so many are
    sent that only the rate counts. (`late_rates` has the rest.) A short message alone would go by
    another algorithm, and prices of shares must add up to that of the whole.
    """
    rates = _bucket_rate if effect.unit == BUCKET else _full_rate
    each_s, once_s = rates(effect, cost)
    return effect.bytes * each_s, effect.bytes * once_s


def _sent(call: Collective, size_bytes: int, cost: Cost) -> Late:
    return cost(replace(empty_call(call), bytes=size_bytes))


def _bucket_rate(call: Collective, cost: Cost) -> Late:
    """Seconds a byte of a full bucket."""
    each_s, once_s = _sent(call, BUCKET_BYTES, cost)
    return each_s / BUCKET_BYTES, once_s / BUCKET_BYTES


def _full_rate(call: Collective, cost: Cost) -> Late:
    """Seconds a byte where latencies are nothing."""
    size = MANY * BUCKET_BYTES
    twice, one = _sent(call, 2 * size, cost), _sent(call, size, cost)
    return (twice[0] - one[0]) / size, (twice[1] - one[1]) / size


def late_rates(
    rows: Iterable[Sequence[Mapping[Collective, int]]], cost: Cost
) -> Mapping[Collective, Late]:
    """Of each unit of a layer, the seconds a byte beyond the full rate: what all bytes that it may
    have come to, less the empty call. A price is concave in the bytes, so that fewer, which are
    priced by the same rate, cost at least so much, and all of them just so much.

    `rows`: by region, the bytes of each choice."""
    most: dict[Collective, int] = {}
    for row in rows:
        for call in {call for taken in row for call in taken}:
            most[call] = most.get(call, 0) + max(taken.get(call, 0) for taken in row)
    return {call: _late_rate(call, size, cost) for call, size in most.items()}


def _late_rate(call: Collective, size: int, cost: Cost) -> Late:
    if not size:
        return 0.0, 0.0
    whole, empty, full = _sent(call, size, cost), _sent(call, 0, cost), _full_rate(call, cost)
    # Each window by itself: a microbatch's, and the one with what hides once a step.
    each_s = max(0.0, (whole[0] - empty[0]) / size - full[0])
    ends_s = max(0.0, (sum(whole) - sum(empty)) / size - sum(full))
    return each_s, ends_s - each_s


def beyond_rate(call: Collective, size_bytes: int, cost: Cost) -> Late:
    """What one call of so many bytes takes beyond what they take at the full rate."""
    whole, rate = _sent(call, size_bytes, cost), _full_rate(call, cost)
    return whole[0] - size_bytes * rate[0], whole[1] - size_bytes * rate[1]


def joined_calls(rows: Sequence[Sequence[Mapping[Collective, int]]], cost: Cost) -> list[Joined]:
    """The calls of a layer that its regions join. `rows`: by region, the bytes of each choice."""
    together: dict[Hashable, list[Collective]] = {}
    for call in sorted({call for row in rows for taken in row for call in taken}, key=repr):
        takers = tuple(tuple(call in taken for taken in row) for row in rows)
        together.setdefault(takers, []).append(call)
    return [_joined(calls, rows, cost) for calls in together.values()]


def _joined(
    calls: Sequence[Collective], rows: Sequence[Sequence[Mapping[Collective, int]]], cost: Cost
) -> Joined:
    @functools.cache
    def beyond(sizes: tuple[int, ...]) -> Late:
        every = [beyond_rate(call, size, cost) for call, size in zip(calls, sizes, strict=True)]
        return sum(each for each, _ in every), sum(once for _, once in every)

    takes = tuple(
        tuple(tuple(taken[call] for call in calls) if calls[0] in taken else None for taken in row)
        for row in rows
    )
    return Joined(takes, beyond)


def late_seconds(taken: Mapping[Collective, int], rates: Mapping[Collective, Late]) -> Late:
    """What a choice's bytes cost beyond the full rate: each microbatch, and once a step."""
    each_s = sum(size * rates[call][0] for call, size in taken.items())
    once_s = sum(size * rates[call][1] for call, size in taken.items())
    return each_s, once_s


def whole_calls(effects: Iterable[tuple[str, Effect]]) -> Iterator[tuple[str, Effect, int]]:
    """(layer, effect, calls) with joined collectives put together: a layer's in one call, those of
    all layers in as many buckets as they fill."""
    joined: dict[tuple[str, Collective], int] = {}
    empty: dict[int, tuple[Effect, Collective]] = {}  # alike layers have the same effects
    for path, effect in effects:
        if isinstance(effect, Collective) and effect.unit:
            if id(effect) not in empty:
                empty[id(effect)] = effect, empty_call(effect)
            key = ("" if effect.unit == BUCKET else path, empty[id(effect)][1])
            joined[key] = joined.get(key, 0) + effect.bytes
        else:
            yield path, effect, 1
    for (path, call), total in joined.items():
        buckets = math.ceil(total / BUCKET_BYTES) if call.unit == BUCKET else 1
        yield path, replace(call, bytes=total), buckets


def unit_edges(units: Mapping[str, Mapping[int, Sequence[Taken]]], call_s: Cost) -> Iterator[Edge]:
    """What a layer pays once if any of its regions takes part in a unit: a conversion from "none"
    to "joined" that all who take part share.

    `units`: by layer and slot, what each choice takes part in; `call_s`: a call's seconds.
    """
    for path, slots in units.items():
        together: dict[tuple[tuple[int, ...], ...], list[Collective]] = {}
        for call in _calls(slots.values()):
            takers = tuple(tuple(int(call in taken) for taken in row) for row in slots.values())
            together.setdefault(takers, []).append(call)
        first, choices = next(iter(slots.items()))
        source = Use(first, (0,) * len(choices))
        for takers, calls in together.items():
            uses = tuple(Use(slot, row) for slot, row in zip(slots, takers, strict=True))
            costs = [call_s(call) for call in calls]
            each, once = (((0.0, sum(cost[i] for cost in costs)), (0.0, 0.0)) for i in range(2))
            name = f"{path}:{calls[0].unit} over {' · '.join(part.axis for part in calls[0].axes)}"
            yield Edge(name, source, uses, each, ((0, 0), (0, 0)), step_seconds=once)


def _calls(rows: Iterable[Sequence[Taken]]) -> list[Collective]:
    """All units that some choice takes part in, in a fixed order."""
    return sorted({call for row in rows for taken in row for call in taken}, key=repr)

"""Collectives that the runtime joins into one call: latency once, bytes each."""

from collections.abc import Iterator

import pytest

from autopar.planning.ilp import solve
from autopar.planning.joined import (
    Late,
    late_rates,
    late_seconds,
    split_price,
    unit_edges,
    whole_calls,
)
from autopar.planning.problem import Choice, PlanningProblem, Slot, Solution
from autopar.plugin import BUCKET, AxisPart, Collective, Effect
from autopar.runtime.gradients import BUCKET_BYTES

DP = (AxisPart("dp", 4),)
LATENCY_S, S_PER_BYTE = 1.0, 1e-6


def cost(effect: Collective) -> Late:
    seconds = LATENCY_S + S_PER_BYTE * effect.bytes
    return (0.0, seconds) if effect.per == "step" else (seconds, 0.0)


def gather(size: int, what: str = "w", unit: str = "shards") -> Collective:
    return Collective("all_gather", size, DP, "forward", "microbatch", what, unit)


def gradient(size: int) -> Collective:
    return Collective("all_reduce", size, DP, "grad_sync", "step", "w", BUCKET)


def together(*effects: tuple[str, Collective]) -> list[tuple[str, int, int]]:
    found: Iterator[tuple[str, Effect, int]] = whole_calls(effects)
    return [(path, e.bytes, n) for path, e, n in found if isinstance(e, Collective)]


def test_a_layers_unit_is_one_call_and_gradients_of_all_layers_share_buckets() -> None:
    effects = [(path, e) for path in ("h.0", "h.1") for e in (gather(3), gather(4), gradient(5))]
    assert together(*effects) == [("h.0", 7, 1), ("", 10, 1), ("h.1", 7, 1)]


def test_what_is_in_no_unit_or_in_another_stays_apart() -> None:
    effects = [
        ("h.0", gather(3, unit="")),
        ("h.0", gather(4, unit="")),
        ("h.0", gather(5, unit="a")),
    ]
    assert together(*effects, ("h.0", gather(6))) == [
        ("h.0", 3, 1), ("h.0", 4, 1), ("h.0", 5, 1), ("h.0", 6, 1)
    ]  # fmt: skip


def test_many_gradients_fill_several_buckets() -> None:
    effects = [("h.0", gradient(BUCKET_BYTES // 2))] * 5
    assert together(*effects) == [("", 5 * BUCKET_BYTES // 2, 3)]


def test_a_joined_collective_adds_its_bytes_and_its_share_of_a_bucket() -> None:
    assert split_price(gather(1000), cost) == pytest.approx((1000 * S_PER_BYTE, 0.0))
    half = BUCKET_BYTES // 2
    once_s = half * S_PER_BYTE + LATENCY_S / 2
    assert split_price(gradient(half), cost) == pytest.approx((0.0, once_s))


def test_shares_add_up_to_the_whole_where_short_messages_go_another_way() -> None:
    """By the cheaper of an algorithm without latency and one with: what all regions send costs just
    what the call costs, and what some of them send at most that."""

    def cheaper(effect: Collective) -> Late:
        return min(0.25 + 1e-5 * effect.bytes, cost(effect)[0]), 0.0

    call = gather(0, what="")
    sizes = (100, 30_000, 70_000)
    rates = late_rates([[{}, {call: size}] for size in sizes], cheaper)

    def priced(some: tuple[int, ...]) -> float:
        return sum(
            split_price(gather(size), cheaper)[0] + late_seconds({call: size}, rates)[0]
            for size in some
        )

    def whole(some: tuple[int, ...]) -> float:
        return cheaper(gather(sum(some)))[0] - cheaper(call)[0]

    assert priced(sizes) == pytest.approx(whole(sizes))
    for some in (sizes[:1], sizes[:2], sizes[1:]):
        assert priced(some) < whole(some)
    assert sum(whole((size,)) for size in sizes) > 1.1 * whole(sizes)


@pytest.mark.parametrize("takers", [0, 1, 2])
def test_a_layer_pays_for_a_call_once_if_any_region_takes_part(takers: int) -> None:
    call = gather(0, what="")
    slots = {slot: [frozenset({call} if slot < takers else ())] for slot in range(3)}
    problem = PlanningProblem(
        tuple(Slot(f"h.0/{slot}", (Choice(0.0, 0, 0),), "h.0") for slot in range(3)),
        tuple(unit_edges({"h.0": slots}, cost)),
        limit_bytes=1,
    )
    solution = solve(problem)
    assert isinstance(solution, Solution)
    assert solution.seconds == pytest.approx(LATENCY_S if takers else 0.0)


def test_the_planner_packs_shards_into_few_layers() -> None:
    """Two of four regions must be sharded to fit: both in one layer, whose call they share."""
    call = gather(0, what="")
    units = {
        path: {slot: [frozenset(), frozenset({call})] for slot in slots}
        for path, slots in (("h.0", (0, 1)), ("h.1", (2, 3)))
    }
    choices = (Choice(0.0, 10, 0), Choice(0.1, 1, 0))
    problem = PlanningProblem(
        tuple(Slot(f"slot {slot}", choices, path) for path in units for slot in units[path]),
        tuple(unit_edges(units, cost)),
        limit_bytes=22,
    )
    solution = solve(problem)
    assert isinstance(solution, Solution)
    assert solution.seconds == pytest.approx(LATENCY_S + 0.2)
    assert solution.choices in ((1, 1, 0, 0), (0, 0, 1, 1))

"""Sequence parallelism on hand-made regions, and the order of the strategies on dims."""

import itertools

import pytest
from gpt2_regions import BLOCK, FFN_REGION, HEADS_REGION, STREAM, mesh, refined, refusal, region
from hypothesis import given
from hypothesis import strategies as st

from autopar.plugin import AxisPart, Candidate, Dim, Mesh, Region, Strategy
from autopar.strategies.data import Data
from autopar.strategies.sequence import Sequence
from autopar.strategies.tensor import Tensor


def test_splits_the_sequence_between_the_regions() -> None:
    assert refined(Sequence(), STREAM, mesh(dp=2, tp=4)) == [
        Candidate(
            "stream", splits=(("sequence", (AxisPart("tp", 4),)),), made_by=(("sequence", ()),)
        )
    ]


def test_heads_that_only_cross_the_region_are_no_reason_to_refuse() -> None:
    crossing = region("stream", Dim("heads", 4, "heads", internal=False))
    (found,) = refined(Sequence(), crossing, mesh(tp=2))
    assert isinstance(found, Candidate)
    assert found.split("sequence") == (AxisPart("tp", 2),)


def test_owns_no_axis() -> None:
    assert Sequence().axes() == ()


def test_nothing_to_say_without_the_axis_or_a_second_time() -> None:
    assert refined(Sequence(), STREAM, mesh(dp=2)) == []
    (once,) = refined(Sequence(), STREAM, mesh(tp=2))
    assert isinstance(once, Candidate)
    assert refined(Sequence(), STREAM, mesh(tp=2), once) == []


def test_refusals() -> None:
    for where in (HEADS_REGION, FFN_REGION):
        assert refusal(Sequence(), where, mesh(tp=2)) == (
            f"region {where.name}: its own dim may be split by tensor"
        )
    assert refusal(Sequence(), STREAM, mesh(tp=3)) == (
        "region stream: sequence = 16 isn't divisible by 3 (tp3)"
    )
    blocked = region("stream", blocked={"sequence": "a pool runs over it"})
    assert refusal(Sequence(), blocked, mesh(tp=2)) == (
        "region stream: sequence can't be split: a pool runs over it"
    )
    bare = Region("stream", "Block", (Dim("batch", 8, "batch", False),), ())
    assert refusal(Sequence(), bare, mesh(tp=2)) == "region stream has no sequence dim"


def test_shares_the_sequence_with_another_axis_in_the_mesh_s_order() -> None:
    on = mesh(cp=2, tp=2)
    start = Candidate("stream").with_split("context", "sequence", (on.part("cp"),))
    (found,) = refined(Sequence(), STREAM, on, start)
    assert isinstance(found, Candidate)
    assert found.split("sequence") == (AxisPart("cp", 2), AxisPart("tp", 2))


# ---------------------------------------------------------------- no order matters


def closure(order: tuple[Strategy, ...], where: Region, on: Mesh) -> set[Candidate]:
    """All candidates when each strategy in turn refines what there is so far."""
    candidates = [Candidate(where.name)]
    for strategy in order:
        for candidate in tuple(candidates):
            made = strategy.refine(candidate, where, on)
            candidates += [found for found in made if isinstance(found, Candidate)]
    assert len(set(candidates)) == len(candidates)
    return set(candidates)


@pytest.mark.parametrize("where", BLOCK, ids=lambda where: where.name)
@given(dp=st.integers(1, 8), tp=st.integers(1, 8))
def test_the_order_of_strategies_changes_nothing(where: Region, dp: int, tp: int) -> None:
    on = mesh(dp=dp, tp=tp)
    reached = [
        closure(order, where, on)
        for order in itertools.permutations((Data(), Tensor(), Sequence()))
    ]
    assert all(other == reached[0] for other in reached)
    by_data = 2 if dp > 1 and 8 % dp == 0 else 1
    size = next((dim.size for dim in where.dims if dim.internal), 16)
    assert len(reached[0]) == by_data * (2 if tp > 1 and size % tp == 0 else 1)

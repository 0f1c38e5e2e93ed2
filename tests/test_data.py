"""Data parallelism on hand-made regions."""

import pytest
from gpt2_regions import BLOCK, STREAM, mesh, refined, refusal, region

from autopar.plugin import AxisPart, Candidate, Dim, Region
from autopar.strategies.data import Data


@pytest.mark.parametrize("where", BLOCK, ids=lambda where: where.name)
def test_splits_the_batch_everywhere(where: Region) -> None:
    assert refined(Data(), where, mesh(dp=4, tp=2)) == [
        Candidate(where.name, splits=(("batch", (AxisPart("dp", 4),)),), made_by=(("data", ()),))
    ]


def test_owns_dp_on_the_slow_links() -> None:
    (axis,) = Data().axes()
    assert (axis.name, axis.splits_batch) == ("dp", True)


def test_nothing_to_say_without_the_axis_or_a_second_time() -> None:
    assert refined(Data(), STREAM, mesh(tp=2)) == []
    assert refined(Data(), STREAM, mesh(dp=1, tp=2)) == []
    (once,) = refined(Data(), STREAM, mesh(dp=2))
    assert isinstance(once, Candidate)
    assert refined(Data(), STREAM, mesh(dp=2), once) == []


def test_shares_the_batch_with_another_axis_in_the_mesh_s_order() -> None:
    on = mesh(outer=2, dp=2, inner=2)
    for axis, order in (("outer", ["outer", "dp"]), ("inner", ["dp", "inner"])):
        start = Candidate("stream").with_split("other", "batch", (on.part(axis),))
        (found,) = refined(Data(), STREAM, on, start)
        assert isinstance(found, Candidate)
        assert [part.axis for part in found.split("batch")] == order


def test_refusals() -> None:
    on = mesh(dp=4)
    odd = region("stream", batch=6)
    assert refusal(Data(), odd, on) == "region stream: batch = 6 isn't divisible by 4 (dp4)"
    start = Candidate("stream").with_split("other", "batch", (AxisPart("ep", 4),))
    assert refusal(Data(), STREAM, mesh(dp=4, ep=4), start) == (
        "region stream: batch = 8 isn't divisible by 16 (ep4 · dp4)"
    )
    blocked = region("stream", blocked={"batch": "a mean over it has no rule"})
    assert refusal(Data(), blocked, on) == (
        "region stream: batch can't be split: a mean over it has no rule"
    )
    bare = Region("stream", "Block", (Dim("hidden", 8, "hidden", False),), ())
    assert refusal(Data(), bare, on) == "region stream has no batch dim"

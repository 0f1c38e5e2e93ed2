"""Tensor parallelism on hand-made regions."""

import pytest
from gpt2_regions import FFN_REGION, HEADS_REGION, STREAM, mesh, refined, refusal, region

from autopar.plugin import AxisPart, Candidate, Dim, Refusal, Region
from autopar.strategies.data import Data
from autopar.strategies.tensor import Tensor


@pytest.mark.parametrize("where", [HEADS_REGION, FFN_REGION], ids=lambda where: where.name)
def test_splits_the_region_s_own_dim(where: Region) -> None:
    assert refined(Tensor(), where, mesh(dp=2, tp=4)) == [
        Candidate(
            where.name, splits=((where.name, (AxisPart("tp", 4),)),), made_by=(("tensor", ()),)
        )
    ]


def test_owns_the_innermost_axis() -> None:
    (tensor,), (data,) = Tensor().axes(), Data().axes()
    assert (tensor.name, tensor.splits_batch) == ("tp", False)
    assert tensor.locality > data.locality


def test_nothing_to_say_without_the_axis_or_a_second_time() -> None:
    assert refined(Tensor(), FFN_REGION, mesh(dp=2)) == []
    used = Candidate("ffn").with_split("other", "sequence", (AxisPart("tp", 2),))
    assert refined(Tensor(), FFN_REGION, mesh(tp=2), used) == []


def test_refusals() -> None:
    assert (
        refusal(Tensor(), STREAM, mesh(tp=2))
        == "region stream has no heads, ffn, channels or vocab dim of its own"
    )
    assert refusal(Tensor(), HEADS_REGION, mesh(tp=8)) == (
        "region heads: heads = 4 isn't divisible by tp = 8"
    )
    blocked = region("heads", Dim("heads", 4, "heads", True, "a norm runs over all heads"))
    assert refusal(Tensor(), blocked, mesh(tp=2)) == (
        "region heads: heads can't be split: a norm runs over all heads"
    )
    crossing = region("stream", Dim("heads", 4, "heads", internal=False))
    assert "no heads, ffn, channels or vocab dim of its own" in refusal(
        Tensor(), crossing, mesh(tp=2)
    )
    used = Candidate("ffn").with_split("other", "ffn", (AxisPart("ep", 2),))
    assert refusal(Tensor(), FFN_REGION, mesh(ep=2, tp=2), used) == (
        "region ffn: ffn is already split"
    )


def test_each_own_dim_has_its_say() -> None:
    grouped = region("heads", Dim("kv_heads", 2, "heads", internal=True))
    grouped = Region(
        grouped.name,
        grouped.layer_class,
        (*grouped.dims, Dim("q_group", 4, "heads", internal=True)),
        (),
    )
    first, second = refined(Tensor(), grouped, mesh(tp=4))
    assert first == Refusal("region heads: kv_heads = 2 isn't divisible by tp = 4")
    assert isinstance(second, Candidate)
    assert second.split("q_group") == (AxisPart("tp", 4),)

"""ZeRO on hand-made regions."""

import pytest
from gpt2_regions import FFN_REGION, STREAM, mesh, param, refined, refusal, region

from autopar.errors import AutoparError
from autopar.plugin import AxisPart, Candidate, ParamPlan
from autopar.strategies.data import Data
from autopar.strategies.tensor import Tensor
from autopar.strategies.zero import Zero

DP = (AxisPart("dp", 2),)
SPLIT = Candidate("ffn").with_split("data", "batch", DP)


@pytest.mark.parametrize("strategy", [Zero(), Zero(stage=3)])
def test_shards_every_parameter_over_the_batch_s_axes(strategy: Zero) -> None:
    plan = ParamPlan(DP, DP, DP)
    assert refined(strategy, FFN_REGION, mesh(dp=2, tp=2), SPLIT) == [
        Candidate(
            "ffn",
            SPLIT.splits,
            (("mlp.c_fc.weight", plan), ("mlp.c_proj.weight", plan)),
            (("data", ()), ("zero", (("stage", 3),))),
        )
    ]


def test_keeps_what_the_dims_say() -> None:
    on = mesh(dp=2, tp=2)
    (dp,) = refined(Data(), FFN_REGION, on)
    assert isinstance(dp, Candidate)
    (dp_tp,) = refined(Tensor(), FFN_REGION, on, dp)
    assert isinstance(dp_tp, Candidate)
    (found,) = refined(Zero(), FFN_REGION, on, dp_tp)
    assert isinstance(found, Candidate)
    assert found.splits == dp_tp.splits
    assert found.param("mlp.c_fc.weight").state == DP
    assert found.options("zero") == {"stage": 3}
    assert refined(Zero(), FFN_REGION, on, found) == []


def test_frozen_parameters_stay_whole() -> None:
    mixed = region("ffn", params=(param("lora", 8, 8), param("base", 8, 8, trainable=False)))
    (found,) = refined(Zero(), mixed, mesh(dp=2), SPLIT)
    assert isinstance(found, Candidate)
    assert [name for name, _ in found.params] == ["lora"]


def test_comes_after_the_strategies_on_dims() -> None:
    assert (Data().tier, Tensor().tier, Zero().tier) == ("dims", "dims", "state")
    assert Zero().axes() == ()


def test_refusals() -> None:
    assert refusal(Zero(), STREAM, mesh(dp=2)) == (
        "region stream: its batch isn't split, nothing is replicated"
    )
    for params in ((), (param("base", 8, trainable=False),)):
        assert refusal(Zero(), region("ffn", params=params), mesh(dp=2), SPLIT) == (
            "region ffn has no trainable parameters"
        )


@pytest.mark.parametrize("stage", [0, 1, 4, "3"])
def test_unknown_stage(stage: int) -> None:
    with pytest.raises(AutoparError, match=f"no stage {stage!r}: legal are 3, and False for none"):
        Zero(stage=stage)

"""ZeRO on hand-made regions: what it says, what follows from that, and what is refused."""

from typing import Any

import pytest
import torch
from gpt2_regions import FFN_REGION, STREAM, mesh, param, refined, refusal, region

from autopar.errors import AutoparError
from autopar.layouts.effects import param_effects
from autopar.layouts.layout import Setting
from autopar.layouts.state_ratio import StateRatio
from autopar.planning.full_shards import one_full_shard
from autopar.planning.legal import candidate_faults
from autopar.plugin import (
    AxisPart,
    Candidate,
    Collective,
    Compute,
    GradientSync,
    ParamPlan,
    Refusal,
    Resident,
    Split,
)
from autopar.strategies.data import Data
from autopar.strategies.tensor import Tensor
from autopar.strategies.zero import Zero

DP = (AxisPart("dp", 2),)
SPLIT = Candidate("ffn").with_split("data", "batch", DP)


PLANS = {1: ParamPlan(state=DP), 2: ParamPlan(grad=DP, state=DP), 3: ParamPlan(DP, DP, DP)}


def sharded(stage: int, within: int | None = None, axis: AxisPart = DP[0]) -> Candidate:
    """What ZeRO makes of the ffn region with its batch split over one axis."""
    start = Candidate("ffn").with_split("data", "batch", (axis,))
    (found,) = refined(Zero(stage, within), FFN_REGION, mesh(**{axis.axis: axis.size}), start)
    assert isinstance(found, Candidate)
    return found


@pytest.mark.parametrize(("strategy", "stages"), [(Zero(), (1, 2, 3)), (Zero(stage=2), (2,))])
def test_shards_every_parameter_over_the_batch_s_axes(
    strategy: Zero, stages: tuple[int, ...]
) -> None:
    assert refined(strategy, FFN_REGION, mesh(dp=2, tp=2), SPLIT) == [
        Candidate(
            "ffn",
            SPLIT.splits,
            (("mlp.c_fc.weight", PLANS[stage]), ("mlp.c_proj.weight", PLANS[stage])),
            (("data", ()), ("zero", (("stage", stage),))),
        )
        for stage in stages
    ]


def test_keeps_what_the_dims_say() -> None:
    on = mesh(dp=2, tp=2)
    (dp,) = refined(Data(), FFN_REGION, on)
    assert isinstance(dp, Candidate)
    (dp_tp,) = refined(Tensor(), FFN_REGION, on, dp)
    assert isinstance(dp_tp, Candidate)
    (found,) = refined(Zero(3), FFN_REGION, on, dp_tp)
    assert isinstance(found, Candidate)
    assert found.splits == dp_tp.splits
    assert found.param("mlp.c_fc.weight").state == DP
    assert found.options("zero") == {"stage": 3}
    assert refined(Zero(), FFN_REGION, on, found) == []


def test_frozen_parameters_and_scalars_stay_whole() -> None:
    params = (param("lora", 8, 8), param("base", 8, 8, trainable=False), param("scale"))
    (found,) = refined(Zero(1), region("ffn", params=params), mesh(dp=2), SPLIT)
    assert isinstance(found, Candidate)
    assert [name for name, _ in found.params] == ["lora"]


def test_comes_after_the_strategies_on_dims() -> None:
    assert (Data().tier, Tensor().tier, Zero().tier) == ("dims", "dims", "state")
    assert Zero().axes() == ()


# ---------------------------------------------------------------- hybrid


def test_within_is_a_factor_of_the_axis() -> None:
    found = sharded(3, 2, AxisPart("dp", 8))
    inner = (AxisPart("dp", 2),)
    assert found.param("mlp.c_fc.weight") == ParamPlan(inner, inner, inner)
    assert found.options("zero") == {"stage": 3, "within": 2}


@pytest.mark.parametrize(
    ("within", "parts"),
    [
        (2, (AxisPart("ep", 2),)),
        (4, (AxisPart("dp", 2), AxisPart("ep", 2))),
        (8, (AxisPart("dp", 4), AxisPart("ep", 2))),
    ],
)
def test_within_takes_the_innermost_ranks(within: int, parts: Split) -> None:
    batch = (AxisPart("ep", 2), AxisPart("dp", 4))  # in whatever order the batch is split
    start = Candidate("ffn").with_split("data", "batch", batch)
    (found,) = refined(Zero(1, within), FFN_REGION, mesh(dp=4, ep=2), start)
    assert isinstance(found, Candidate)
    assert found.param("mlp.c_fc.weight").state == parts


@pytest.mark.parametrize("within", [3, 6, 16])
def test_within_that_makes_no_equal_groups(within: int) -> None:
    start = Candidate("ffn").with_split("data", "batch", (AxisPart("dp", 4), AxisPart("ep", 2)))
    assert refusal(Zero(within=within), FFN_REGION, mesh(dp=4, ep=2), start) == (
        f"zero within {within} ranks doesn't divide the batch's axes (dp 4 · ep 2) into equal "
        "groups of neighbours"
    )


# ---------------------------------------------------------------- what follows

ITEM, SHAPE = 4, (6, 5)
"""float32; 6 rows over 4 ranks are 2, 2, 2 and 0: padded to 8."""
WHOLE, PADDED, SHARD = 6 * 5 * ITEM, 8 * 5 * ITEM, 2 * 5 * ITEM
RANKS = (AxisPart("dp", 4),)


def effects(plan: ParamPlan, microbatches: int, sums: Split = RANKS) -> list[object]:
    found = list(
        param_effects(
            "w", SHAPE, torch.float32, True, sums, plan, StateRatio(2.0), microbatches, True
        )
    )
    added = [e for e in found if isinstance(e, Compute) and e.phase == "backward"]
    assert [e.bytes for e in added] == (
        [3 * (SHARD if plan.grad else WHOLE) * (microbatches - 1) // microbatches]
        if microbatches > 1
        else []
    )
    assert sum(isinstance(effect, Compute) for effect in found) == 1 + len(added)
    return [effect for effect in found if not isinstance(effect, Compute)]


def resident(found: list[object]) -> dict[str, int]:
    return {effect.what: effect.bytes for effect in found if isinstance(effect, Resident)}


def collectives(found: list[object]) -> list[tuple[str, int, str, str]]:
    return [(c.op, c.bytes, c.phase, c.per) for c in found if isinstance(c, Collective)]


def test_stage_1() -> None:
    found = effects(ParamPlan(state=RANKS), microbatches=2)
    assert resident(found) == {
        "parameter": WHOLE, "gradient": WHOLE, "optimizer": 2 * SHARD, "transient": PADDED
    }  # fmt: skip
    assert collectives(found) == [
        ("all_gather", PADDED, "forward", "step"),
        ("reduce_scatter", PADDED, "backward", "step"),
    ]


def test_stage_1_with_one_microbatch_is_stage_2() -> None:
    """Gradients are scattered as they are made: there is nothing to wait for."""
    one = effects(ParamPlan(state=RANKS), microbatches=1)
    two = effects(ParamPlan(grad=RANKS, state=RANKS), microbatches=1)
    assert resident(one) == resident(two)
    assert [c[:3] for c in collectives(one)] == [c[:3] for c in collectives(two)]


def test_stage_2() -> None:
    found = effects(ParamPlan(grad=RANKS, state=RANKS), microbatches=2)
    assert resident(found) == {
        "parameter": WHOLE, "gradient": SHARD, "optimizer": 2 * SHARD, "transient": 2 * PADDED
    }  # fmt: skip
    assert collectives(found) == [
        ("all_gather", PADDED, "forward", "step"),
        ("reduce_scatter", PADDED, "backward", "microbatch"),
    ]


def test_stage_3() -> None:
    found = effects(ParamPlan(RANKS, RANKS, RANKS), microbatches=2)
    assert resident(found) == {
        "parameter": SHARD, "gradient": SHARD, "optimizer": 2 * SHARD, "transient": 4 * PADDED
    }  # fmt: skip
    assert collectives(found) == [
        ("all_gather", PADDED, "forward", "microbatch"),
        ("all_gather", PADDED, "backward", "microbatch"),
        ("reduce_scatter", PADDED, "backward", "microbatch"),
    ]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sums_shards_over_the_other_ranks(stage: int) -> None:
    other, inner = AxisPart("dp_0", 2), (AxisPart("dp_1", 4),)
    plan = ParamPlan(inner if stage > 2 else (), inner if stage > 1 else (), inner)
    found = effects(plan, 2, (other, *inner))
    assert collectives(found)[-1] == ("all_reduce", SHARD, "grad_sync", "step")
    sums = [effect for effect in found if isinstance(effect, Collective)][-1]
    assert sums.axes == (other,)


# ---------------------------------------------------------------- refusals and errors


def test_refusals() -> None:
    assert refusal(Zero(), STREAM, mesh(dp=2)) == (
        "region stream: its batch isn't split, nothing is replicated"
    )
    nothing = region("ffn", params=())
    assert refusal(Zero(), nothing, mesh(dp=2), SPLIT) == "region ffn has no trainable parameters"


@pytest.mark.parametrize("stage", [0, 4, "3", True, 3.0])
def test_unknown_stage(stage: Any) -> None:
    message = f"zero has no stage {stage!r}: legal are 1, 2, 3, and False for none"
    with pytest.raises(AutoparError, match=message):
        Zero(stage=stage)


@pytest.mark.parametrize("within", [0, 1, -2, 2.0, True])
def test_within_is_a_number_of_ranks(within: int) -> None:
    with pytest.raises(AutoparError, match=f"zero within {within!r}: it takes the number of ranks"):
        Zero(within=within)


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (ParamPlan(param=DP, state=DP), "over dp (value), none (gradient) and dp (state)"),
        (ParamPlan(grad=DP), "over none (value), dp (gradient) and none (state)"),
        (ParamPlan(state=DP, sync=GradientSync(DP, "a:b")), "whose gradient has a sync of its own"),
    ],
)
def test_plans_that_are_no_stage(plan: ParamPlan, fault: str) -> None:
    candidate = SPLIT.with_params("mine", {"mlp.c_fc.weight": plan})
    (found,) = candidate_faults(candidate, FFN_REGION, Setting(mesh(dp=2), DP, 1))
    assert fault in found and "mlp.c_fc.weight" in found


def test_frozen_parameters_have_values_alone_and_scalars_cannot_be_sharded() -> None:
    params = (param("base", 8, trainable=False), param("scale"))
    candidate = SPLIT.with_params("mine", {"base": PLANS[2], "scale": PLANS[1]})
    where = region("ffn", params=params)
    assert candidate_faults(candidate, where, Setting(mesh(dp=2), DP, 1)) == [
        "shards the gradient or state of base, which is frozen",
        "shards scale, which has no dim",
    ]
    full = SPLIT.with_params("mine", {"base": PLANS[3]})
    assert candidate_faults(full, where, Setting(mesh(dp=2), DP, 1)) == []


def test_frozen_parameters_are_sharded_by_stage_3() -> None:
    """The trained ones by every stage; where there are none, other stages have nothing to do."""
    params = (param("base", 8, trainable=False), param("adapter", 8))
    some = refined(Zero(), region("ffn", params=params), mesh(dp=2), SPLIT)
    plans = [dict(c.params) for c in some if isinstance(c, Candidate)]
    assert [sorted(found) for found in plans] == [["adapter"], ["adapter"], ["adapter", "base"]]
    assert plans[2]["base"] == PLANS[3]
    frozen = refined(Zero(), region("ffn", params=params[:1]), mesh(dp=2), SPLIT)
    nothing = Refusal("region ffn has no trainable parameters")
    assert frozen[:2] == [nothing, nothing]
    assert isinstance(frozen[2], Candidate) and frozen[2].param("base") == PLANS[3]


# ---------------------------------------------------------------- one group a layer (FSDP2)


def test_values_of_one_layer_are_sharded_over_the_same_axes() -> None:
    eight = AxisPart("dp", 8)
    whole, within, second = (sharded(3, None, eight), sharded(3, 2, eight), sharded(2, 2, eight))
    free = {("h.0", "heads"): (within,), ("h.0", "ffn"): (whole, within, second)}
    assert one_full_shard(free) == {
        ("h.0", "heads"): (within,),
        ("h.0", "ffn"): (within, second),
    }
    apart = {("h.0", "ffn"): (within,), ("h.1", "ffn"): (whole,)}
    assert one_full_shard(apart) == apart


def test_values_of_one_layer_that_cannot_be() -> None:
    eight = AxisPart("dp", 8)
    forced = {("h.0", "heads"): (sharded(3, 2, eight),), ("h.0", "ffn"): (sharded(3, 4, eight),)}
    reason = one_full_shard(forced)
    assert isinstance(reason, str)
    assert reason.startswith("parameters of h.0 would be sharded over different axes")

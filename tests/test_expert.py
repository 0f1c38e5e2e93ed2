"""Expert parallelism: the emitted module against the plain model, its faults, its refusals."""

import re
from typing import Any

import experts
import pytest
import torch
from experts import CASES, compiled
from families import FAMILIES
from models import gpt2
from moe import MOE, grouped
from pool import Pool

import autopar

TOLERANCE = 1e-9
SINGLE = 2e-4
"""For float32: three steps of AdamW divide small gradients by their own size."""
QUICK = {
    ("mixtral", "ep4"),
    ("mixtral", "ep2_tp2_sequence"),
    ("qwen3_moe", "dp2_ep2_microbatches2_zero1"),
    ("deepseek_v3", "dp2_ep2"),
    ("mixtral", "pp2_ep2_zero2"),
    ("qwen3_moe", "pp2_ep2_full"),
    ("deepseek_v3", "dp2_ep2_microbatches2_zero3"),
}
PAIRS = [(family, case) for family in MOE for case in CASES]


def marked(pairs: list[tuple[str, str]]) -> list[Any]:
    """The cases, slow but for a few."""
    return [p if p in QUICK else pytest.param(*p, marks=pytest.mark.slow) for p in pairs]


def check(found: list[Any], tolerance: float) -> None:
    """Equal; bytes as planned, those of tokens as they were routed, and evenly on average."""
    counts = []
    for one in found:
        assert isinstance(one, experts.Sent)
        assert one.comparison.worst <= tolerance, one.comparison.errors
        counted, planned, tokens, even = experts.split_bytes(one.comparison)
        assert counted == planned
        assert tokens == one.bytes
        counts.append((tokens, even))
    # Each rank's larger side is counted, so that the mean is never below the even one.
    assert sum(t for t, _ in counts) >= sum(e for _, e in counts)


@pytest.mark.parametrize(("family", "case"), marked(PAIRS))
def test_equal(pool4: Pool, family: str, case: str) -> None:
    """Loss, every gradient, the norm, weights after three clipped steps; bytes."""
    check(pool4.run(experts.compare, family, case, "cpu:4", False), TOLERANCE)


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_ranks_and_experts_without_tokens(pool4: Pool, family: str) -> None:
    """All tokens go to two experts: they lie on one rank of two, on one or two of four."""
    found = pool4.run(experts.compare, family, "dp2_ep2", "cpu:4", True)
    check(found, TOLERANCE)
    assert [one.rows > 0 for one in found] == [True, False, True, False]
    if family == "qwen3_moe":  # two of the first rank's four
        assert found[0].empty_experts == 2 * 2
    # The first of two receives all rows, the second sends as many as it would anyway.
    busier = [
        tokens > even
        for _, _, tokens, even in map(experts.split_bytes, (s.comparison for s in found))
    ]
    assert busier == [True, False, True, False]


@pytest.mark.parametrize(
    "family", ["mixtral", *(pytest.param(f, marks=pytest.mark.slow) for f in MOE[1:])]
)
def test_single_precision(pool4: Pool, family: str) -> None:
    """With torch's own grouped matmuls."""
    check(pool4.run(experts.compare_single, family, "ep2_tp2", "cpu:4"), SINGLE)


# ---------------------------------------------------------------- the runtime alone


@pytest.mark.parametrize(
    "numbers",
    [
        [[3, 0, 1, 2, 5, 0, 0, 1], [0] * 8, [1] * 8, [0, 0, 0, 0, 0, 0, 9, 0]],
        [[0, 0, 2, 3, 0, 0, 0, 0]] * 4,
        [[0] * 8] * 4,
    ],
)
def test_round_trip(pool4: Pool, numbers: list[list[int]]) -> None:
    """Uneven numbers, experts and ranks without rows, no rows at all."""
    for errors in pool4.run(experts.round_trip, torch.float64, numbers):
        assert max(errors) < 1e-12
    for errors in pool4.run(experts.round_trip, torch.float32, numbers):
        assert max(errors) < 1e-4


# ---------------------------------------------------------------- what the plan says


def test_what_is_emitted() -> None:
    """The exchange stands in sight, around the grouped matmuls and nothing else."""
    source = compiled(grouped("mixtral"), "dp2_ep2", "cpu:4").source
    order = [
        "torch.topk(",
        "torch.sort(",
        '= route(running_sum, axis=self.mesh["ep"])',
        "= dispatch(picked, routing)",
        "F.grouped_mm(",
        "= combine(grouped_4, routing)",
        "torch.argsort(order)",
    ]
    places = [source.index(text) for text in order]
    assert places == sorted(places)
    assert source.count("route(") == source.count("dispatch(") == source.count("combine(") == 1
    assert 'declare(self, "mlp.gate.weight", experts, hidden, sums=("dp", "ep"))' in source


def test_the_plan_says_that_tokens_are_taken_as_even() -> None:
    plan = compiled(grouped("mixtral"), "ep4", "cpu:4").plan
    assert any("spread evenly over the experts" in note for note in plan.assumptions)
    assert any("all-to-all" in note for note in plan.assumptions)


def test_zero_shards_experts_over_dp_and_the_rest_over_all() -> None:
    program = compiled(grouped("mixtral"), "dp2_ep2_zero3", "cpu:4")
    assert program.plan.axes["ep"] == 2
    first, second, *_ = re.findall(r"(?s)shard_(?:state|fully)\(.*?\)\n", program.source)
    assert 'axes=("dp",)' in first and "mlp.experts.down_proj" in first
    assert 'axes=("dp", "ep")' in second and "mlp.gate.weight" in second
    assert "experts" not in second


@pytest.mark.parametrize(
    ("job", "pins", "message"),
    [
        (gpt2, {"ep": 2}, "ep = 2: the model has no experts to split"),
        (FAMILIES["mixtral"].tiny, {"ep": 2}, 'experts_implementation="grouped_mm"'),
        (lambda: grouped("mixtral"), {"ep": 8}, "experts = 4 can.t be divided among ep = 8"),
    ],
)
def test_refusals(job: Any, pins: dict[str, int], message: str) -> None:
    made = job()
    size = next(iter(pins.values()))
    with pytest.raises(autopar.AutoparError, match=message):
        autopar.compile(made.model, f"cpu:{size}", made.batch, loss=made.loss, pin=pins)


def test_groups_of_experts_are_split_first() -> None:
    """DeepSeek-V3 chooses groups of experts: 2 of 4, here."""
    source = compiled(grouped("deepseek_v3"), "ep4", "cpu:4").source
    assert "(split(expert_groups" in source

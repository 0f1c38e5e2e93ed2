"""What published runs' software did otherwise: changes to a program's effects."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from fidelity_predict import Outcome, Prepared, facts, prepare
from fidelity_report import reported, step_times
from published_models import Shape
from published_moe import Moe
from published_runs import Run
from published_software import SixteenBitHead, as_software, casts, keeping_ops

from autopar.cluster import resolve_cluster
from autopar.cost_models.compute import ComputeCost
from autopar.mesh import AxisPart
from autopar.plugin import Collective, Compute, Mesh, Resident

TOKENS, HIDDEN, FFN, KV, LAYERS = 512, 256, 640, 128, 2
SHAPE = Shape(
    layers=LAYERS,
    hidden=HIDDEN,
    heads=4,
    kv_heads=2,
    head=64,
    ffn=FFN,
    vocab=1024,
    sequence=TOKENS,
    gated=True,
    tied=False,
    fused_attention=True,
    fused_softmax=True,
    dropout=0.0,
    dtype=torch.bfloat16,
    repeats_heads=True,
)
PINS: Mapping[str, Any] = {
    **dict.fromkeys(("pp", "dp", "cp", "ep", "tp", "microbatches"), 1),
    **{"zero": False, "sequence": False, "recompute": "full"},
}
RUN = Run(
    name="small",
    source="torchtitan",
    group="",
    shape=SHAPE,
    batch=1,
    preset="h100",
    devices=1,
    site="",
    software="fsdp2",
    pins=PINS,
    step_s=1.0,
    memory_bytes=None,
)


def prepared(run: Run) -> Prepared:
    """Its program."""
    found = prepare(run)
    assert isinstance(found, Prepared), found
    return found


def again(one: Prepared, op: str) -> list[Compute]:
    """What runs again, each as often as it does."""
    (work,) = one.works
    return [
        effect
        for (effect, _), count in work.tally.items()
        if isinstance(effect, Compute) and effect.again and effect.op == op
        for _ in range(count)
    ]


def saved(one: Prepared) -> int:
    """Bytes that layers keep."""
    (work,) = one.works
    held = work.held.items()
    return sum(n for (path, kind), n in held if path and kind.what == "saved")


def test_every_second_product_and_attention_are_kept() -> None:
    whole, kept = prepared(RUN), prepared(replace(RUN, keeps_ops=True))
    assert len(again(whole, "attention")) == LAYERS
    assert not again(kept, "attention")
    products = sorted(effect.shape[2:] for effect in again(kept, "matmul"))
    # Keys, out and up; queries, values and gate are kept, and down isn't needed again.
    assert products == sorted(LAYERS * [(KV, HIDDEN), (HIDDEN, HIDDEN), (FFN, HIDDEN)])
    attention = TOKENS * HIDDEN * 2 + 4 * TOKENS * 4
    kept_bytes = TOKENS * (HIDDEN + KV + FFN) * 2 + attention
    assert saved(kept) - saved(whole) == LAYERS * kept_bytes


def test_what_is_kept_is_not_made_again() -> None:
    product = Compute("matmul", 8, 1, "bfloat16", "backward", (1, 2, 2, 1), again=True)
    found = list(
        keeping_ops(
            [("a", product, 1), ("a", product, 1), ("a", Resident("transient", 5, "again"), 1)]
        )
    )
    assert found == [
        ("a", product, 1),
        ("a", Resident("saved", 5), 1),
        ("a", Resident("transient", 0, "again"), 1),
        ("a", Resident("saved", 3), 1),
    ]


def test_losses_hold_what_their_software_needs() -> None:
    logits = TOKENS * SHAPE.vocab * 4
    for software, copies in (("megatron", 1.5), ("fsdp2", 2.0), ("fsdp2_2025", 1.0)):
        (found,) = as_software([("", Resident("transient", 9, "end"), 1)], RUN, facts(software))
        assert found[1] == Resident("transient", int(copies * logits), "end"), software
    split = replace(RUN, pins={**PINS, "tp": 4})
    (found,) = as_software([("", Resident("transient", 9, "end"), 1)], split, facts("fsdp2"))
    assert found[1] == Resident("transient", 3 * logits // 4, "end")


def test_a_compiled_loss_takes_logits_as_they_are() -> None:
    compiled = replace(RUN, software="fsdp2_2025", shape=replace(SHAPE, compiled_loss=True))
    peaks = []
    for run in (RUN, compiled):
        (work,) = prepared(run).works
        peaks.append(
            sum(n for (path, kind), n in work.held.items() if not path and kind.when == "end")
        )
    logits = TOKENS * SHAPE.vocab
    assert peaks[0] - peaks[1] == pytest.approx(logits * (4 + 2 * 4 - 2 - 2), rel=0.01)


def layer(rows: int, pieces: int = 1) -> list[tuple[str, Compute, int]]:
    """The seven products of a layer, forward and backward, on one of `pieces` tp ranks."""
    columns = (HIDDEN // pieces, KV // pieces, KV // pieces, HIDDEN, FFN // pieces, FFN // pieces)
    inner = (HIDDEN, HIDDEN, HIDDEN, HIDDEN // pieces, HIDDEN, HIDDEN)
    shapes = [*zip(columns, inner, strict=True), (HIDDEN, FFN // pieces)]
    return [
        ("layer", Compute("matmul", 1, 1, "bfloat16", phase, (1, rows, n, k)), 1)
        for n, k in shapes
        for phase in ("forward", "backward")
    ]


def cast_bytes(run: Run, pieces: int) -> tuple[int, int]:
    """Of the forward's casts, and the backward's."""
    found = [effect for _, effect, _ in casts(layer(TOKENS, pieces), run)]
    kernels = [effect for effect in found if isinstance(effect, Compute)]
    assert len(kernels) == len(found) and {effect.op for effect in kernels} == {"pointwise"}
    forward = sum(effect.bytes for effect in kernels if effect.phase == "forward")
    return forward, sum(effect.bytes for effect in kernels) - forward


EIGHT = replace(RUN, weight_products="float8_e4m3fn")


def test_casts_of_operands() -> None:
    inputs = 3 * HIDDEN + FFN  # queries, keys and values have one; gate and up have one
    results = 2 * HIDDEN + 2 * KV + 2 * FFN + HIDDEN
    assert cast_bytes(EIGHT, 1) == (TOKENS * 5 * inputs, TOKENS * (5 * inputs + 7 * results))
    rows = replace(EIGHT, scaled_rows=True)
    assert cast_bytes(rows, 1) == (TOKENS * 3 * inputs, TOKENS * (3 * inputs + 6 * results))


def test_ranks_cast_their_shares_before_gathers() -> None:
    pins = {**PINS, "tp": 2, "sequence": True}
    inputs = HIDDEN // 2 + HIDDEN // 2 + HIDDEN // 2 + FFN // 2
    whole = 2 * HIDDEN  # gathered inputs, copied the other way round
    narrow = HIDDEN // 2 + FFN // 2
    results = HIDDEN // 2 + KV + FFN
    expected = TOKENS * (2 * whole + 5 * narrow + 7 * results + 2 * (5 * HIDDEN // 2 + 2 * HIDDEN))
    assert cast_bytes(replace(EIGHT, pins=pins), 2) == (TOKENS * 5 * inputs, expected)


def test_gathers_in_eight_bits_and_rings_of_all_heads() -> None:
    pins = {**PINS, "tp": 2, "sequence": True}
    tp, cp = (AxisPart("tp", 2),), (AxisPart("cp", 2),)
    gather = Collective("all_gather", 64, tp, "forward", "microbatch", "x")
    scatter = Collective("reduce_scatter", 64, tp, "forward", "microbatch", "x")
    sent = Collective("send", 64, cp, "forward", "microbatch", "x")
    run = replace(EIGHT, pins=pins)
    found = as_software(
        [("a", gather, 1), ("a", scatter, 1), ("", gather, 1), ("a", sent, 1)], run, facts("fsdp2")
    )
    assert [effect.bytes for _, effect, _ in found] == [32, 64, 64, 128]  # type: ignore[union-attr]
    kept = as_software([("a", gather, 1)], replace(run, scaled_rows=True), facts("fsdp2"))
    assert kept[0][1] == gather


def test_tp_ranks_send_experts_their_own_tokens() -> None:
    sent = Collective("all_to_all", 64, (AxisPart("ep", 8),), "forward", "microbatch", "x")
    pins = {**PINS, "tp": 4, "ep": 8, "sequence": True}
    run = replace(RUN, pins=pins, software="nemo")
    nemo = facts("nemo")
    split = [effect for _, effect, _ in as_software([("a", sent, 1)], run, nemo)]
    own = replace(sent, bytes=16)
    assert split == [own, replace(sent, op="all_gather", axes=(AxisPart("tp", 4),))]
    folded = replace(run, folds_experts=True)
    (found,) = as_software([("a", sent, 1)], folded, nemo)
    assert found[1] == replace(own, axes=(AxisPart("ep", 2), AxisPart("tp", 4)))
    small = replace(folded, pins={**pins, "ep": 2})
    ((_, found_small, _),) = as_software([("a", sent, 1)], small, nemo)
    assert found_small == replace(own, axes=(AxisPart("tp", 2),))
    assert as_software([("a", sent, 1)], run, facts("fsdp2")) == [("a", sent, 1)]


def test_flat_buffers_pad_no_experts() -> None:
    moe = Moe(experts=16, top_k=2, ffn=64, shared_ffn=0, dense_layers=0, dense_ffn=0)
    pins = {**PINS, "dp": 8, "ep": 8, "zero": 1}
    run = replace(RUN, shape=replace(SHAPE, moe=moe), pins=pins, software="nemo")
    dp, ep = AxisPart("dp", 8), AxisPart("ep", 8)
    gather = Collective("all_gather", 64, (dp,), "forward", "step", "x", "unit", True)
    other = replace(gather, axes=(dp, ep))
    found = as_software([("a", gather, 1), ("a", other, 1)], run, facts("nemo"))
    # Two experts a rank, padded to eight rows.
    assert [effect for _, effect, _ in found] == [replace(gather, bytes=16), other]


def test_the_head_stays_in_sixteen_bits() -> None:
    cluster = resolve_cluster("h100:1")
    device = cluster.device
    assert device.kernels is not None
    eight = replace(device.kernels, weight_products="float8_e4m3fn")
    cast = replace(cluster, device=replace(device, kernels=eight))
    for columns, other in ((4096, cluster), (8192, cast)):
        effect = Compute("matmul", 2 * 4096**3, 0, "bfloat16", "forward", (1, 4096, 4096, 4096))
        found = SixteenBitHead(columns).apart(effect, Mesh(()), cast)
        assert found == ComputeCost().apart(effect, Mesh(()), other)


def test_casts_cost_what_they_move() -> None:
    device = resolve_cluster("h100:1").device
    assert device.kernels is not None
    plain = replace(device.kernels, weight_products="float8_e4m3fn", cast_bytes=0.0)
    seconds = []
    for kernels in (plain, replace(plain, cast_bytes=3.0)):
        cluster = resolve_cluster("h100:1")
        cluster = replace(cluster, device=replace(device, kernels=kernels))
        effect = Compute("matmul", 2 * 4096**3, 0, "bfloat16", "forward", (1, 4096, 4096, 4096))
        seconds.append(ComputeCost().apart(effect, Mesh(()), cluster)[0])
    assert seconds[1] - seconds[0] == pytest.approx(3 * 4096**2 / device.memory_bytes_per_s)


def test_a_ring_merges_what_each_pass_gives() -> None:
    pins = {**PINS, "cp": 2, "context": {"form": "ring"}, "recompute": False}
    (work,) = prepared(replace(RUN, pins=pins, devices=2)).works
    merged = {
        effect.phase: (effect.bytes, count)
        for (effect, _), count in work.tally.items()
        if isinstance(effect, Compute) and effect.op == "pointwise" and effect.dtype == "float32"
    }
    rows = TOKENS // 2
    assert merged["forward"] == (rows * HIDDEN * (6 * 4 + 2), 2 * LAYERS)
    assert merged["backward"] == (rows * (HIDDEN + 2 * KV) * (2 * 4 + 2), 2 * LAYERS)


def test_reports_say_how_far_off_runs_are() -> None:
    one = Outcome(RUN, step_s=1.25, memory={"saved": 8}, counted_bytes=8)
    raw = replace(one, step_s=0.5)
    slower = replace(one, run=replace(RUN, name="b", step_s=2.0), step_s=2.2)
    half = "fitted half" if RUN.fitted else "other half"
    lines = step_times([raw, slower], [one, slower], {"torchtitan": 0.5}).splitlines()
    cells = dict(zip(lines[0].split(" | "), lines[2].split(" | "), strict=True))
    assert cells["| source"] == "| torchtitan" and cells["rows"] == "2"
    assert (cells["raw"], cells[half], cells["bias"]) == ("30.0 %", "17.5 %", "17.5 %")
    assert cells["fitted without it |"] == "50.0 % |"
    guessed = replace(one, run=replace(RUN, assumed=("micro batch 1",)))
    assert "| torchtitan | micro batch 1 | 1 | 25.0 % | 25.0 % | 25.0 % |" in reported([guessed])

"""Context parallelism: the emitted module against the plain model, its faults, its refusals."""

import re
from typing import Any

import context
import pytest
import torch
from clusters import cluster
from context import MESHES, SHAPES, compiled
from equality import Comparison
from experts import split_bytes
from families import FAMILIES
from models import Job, classifier, float32_raised, gpt2, llama
from moe import MOE
from pool import Pool
from test_dropout import given

import autopar
from autopar.capture import reference_loss

TOLERANCE = 1e-9
QUICK = [
    ("gpt2", "cp4_all_to_all"),
    ("llama", "cp4_ring"),
    ("bert_padded", "cp4_ring"),
    ("bert_padded", "cp4_all_to_all"),
    ("llama_padded", "cp4_ring"),
    ("llama", "cp2_tp2_all_to_all"),  # both over the two heads of keys: queries are exchanged
    ("llama", "cp2_tp2_sequence_ring"),
    ("llama", "cp2_dp2_zero3_microbatches2_ring"),
    ("gpt2", "cp2_pp2_zero_bubble_all_to_all"),
    ("mixtral", "cp2_ep2_zero3_ring"),
    ("gpt2", "cp4_zero3_full_ring"),
]
SLOW = [
    *(("gpt2", f"{name}_ring") for name in MESHES if "ep2" not in name and name != "cp2"),
    *(("llama", f"{name}_all_to_all") for name in MESHES if "ep2" not in name and "cp2_" in name),
    *(("llama4", f"{name}_all_to_all") for name in ("cp4", "cp2_tp2", "cp4_zero2", "cp4_full")),
    *((f"{name}_padded", "cp2_dp2_ring") for name in ("gpt2", "llama", "bert")),
    *(("bert", case) for case in ("cp4_ring", "cp2_tp2_sequence_all_to_all", "cp2_pp2_1f1b_ring")),
    ("qwen3_moe", "cp2_ep2_ring"),
    ("mixtral", "cp2_ep2_all_to_all"),
]


@pytest.mark.parametrize(
    ("model", "case"),
    [*QUICK, *(pytest.param(*p, marks=pytest.mark.slow) for p in SLOW if p not in QUICK)],
)
def test_equal(pool4: Pool, model: str, case: str) -> None:
    """Loss, every gradient, the norm, weights after three clipped steps; bytes."""
    for found in pool4.run(context.compare, model, case, "cpu:4"):
        assert isinstance(found, Comparison)
        assert found.worst <= TOLERANCE, found.errors
        if model in MOE:  # how many tokens travel to experts depends on the router
            found = Comparison(0, {}, 0, 0, *split_bytes(found)[:2])
        assert found.counted == found.planned


# ---------------------------------------------------------------- the runtime alone


@pytest.mark.parametrize("shape", SHAPES)
def test_ring_attention(pool4: Pool, shape: str) -> None:
    """Output and gradients are those of torch's attention to the whole sequence."""
    for errors in pool4.run(context.attention_errors, shape, torch.float64):
        assert max(errors) < 1e-12, errors
    for errors in pool4.run(context.attention_errors, shape, torch.bfloat16):
        assert max(errors) < 0.05, errors


# ---------------------------------------------------------------- dropout


def test_masks_follow_from_the_chunks(pool4: Pool) -> None:
    """Every rank drops its own positions, and its own heads' weights; the plain model with the same
    masks has the same loss and gradients."""
    found = pool4.run(context.dropped, "cp4_all_to_all")
    ranks = [masks for _, _, masks in found]
    calls = range(len(ranks[0]))
    masks = [(ranks[0][call][0], context.whole_mask(ranks, call)) for call in calls]
    kept = torch.cat([mask.flatten() for kind, mask in masks if kind == "stream"]).double().mean()
    assert abs(float(kept) - (1 - context.RATE)) < 0.02
    with float32_raised():
        job = gpt2(dropout=context.RATE)
        with given(masks):
            loss = reference_loss(job.model, job.batch, job.loss)
        loss.backward()
    for own, gradients, _ in found:
        assert abs(own - loss.item()) <= TOLERANCE * loss.item()
        for name, parameter in job.model.named_parameters():
            assert parameter.grad is not None
            error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert float(error) <= 1e-9, name


# ---------------------------------------------------------------- what the plan says


def planned(job: Job, case: str, size: int = 4) -> autopar.Compiled:
    with float32_raised():
        return compiled(job, case, f"cpu:{size}")


def test_a_ring_sends_keys_and_values() -> None:
    """cp - 1 times each in the forward; in the backward those and their gradients as well."""
    plan = planned(gpt2(), "cp4_ring").plan
    sends = {c.phase: (c.bytes, c.count) for c in plan.collectives if c.op == "send"}
    local = 2 * 8 * 4 * (16 // 4) * 8 * 8  # k and v: batch · heads · positions · channels · bytes
    layers = 2
    assert sends["forward"] == (layers * 3 * local, layers * 3)
    assert sends["backward"] == (layers * 6 * local, layers * 6)


def test_an_exchange_moves_heads_and_positions() -> None:
    plan = planned(gpt2(), "cp4_all_to_all").plan
    moved = [c for c in plan.collectives if c.op == "all_to_all"]
    local = 8 * 4 * (16 // 4) * 8 * 8
    assert {c.phase: (c.bytes, c.count) for c in moved} == {
        "forward": (2 * 4 * local, 2 * 4),
        "backward": (2 * 4 * local, 2 * 4),
    }


@pytest.mark.parametrize("form", ["ring", "all_to_all"])
def test_work_and_saved_tensors_are_divided(form: str) -> None:
    """Each of four ranks keeps a quarter of the activations and does a quarter of the work. What an
    all-to-all takes back to positions is there twice: attention's result, and the projection's
    input."""
    split = planned(gpt2(), f"cp4_{form}").plan.predicted
    with float32_raised():
        job = gpt2()
        whole = autopar.compile(
            job.model, "cpu:1", job.batch, strategies=("data",), pin={"microbatches": 1}
        ).plan.predicted
    assert split.model_flops == whole.model_flops
    config: Any = job.model.config
    ids = job.batch["input_ids"]
    exchanged = ids.numel() // 4 * config.n_embd * 8 * config.n_layer  # float32 raised to 8 bytes
    twice = exchanged if form == "all_to_all" else 0
    assert split.memory["saved"] == pytest.approx(whole.memory["saved"] / 4 + twice, rel=1e-3)
    assert split.compute_s < whole.compute_s


def test_what_is_emitted() -> None:
    source = planned(llama(), "cp4_ring").source
    assert "from autopar.runtime.context import ring_attention" in source
    assert re.search(r"ring_attention\([^)]*is_causal=True[^)]*axis=self.mesh\[\"cp\"\]", source)
    assert 'declare(self, "input_layernorm.weight", hidden, sums=("cp",)' in source
    assert 'LOSS_SUMS = ("cp",)' in source and "DATA_AXES = ()" in source
    # Labels are shifted whole; each rank takes its chunks of them where they meet the logits.
    assert source.index("contiguous_local = local_part(") > source.index("F.pad(labels")


@pytest.mark.parametrize("case", ["cp2_tp2_ring", "cp2_tp2_all_to_all"])
def test_a_plan_comes_back_from_its_json(case: str) -> None:
    job = gpt2()
    first = planned(job, case)
    plan = autopar.Plan.from_json(first.plan.to_json())
    with float32_raised():
        again = autopar.emit(gpt2().model, plan, strategies=context.STRATEGIES)
    assert again.source == first.source
    heads = next(choice for choice in plan.regions if choice.region == "heads")
    assert heads.balanced == {"sequence": ("cp",)} and len(heads.forms) == 1


def test_a_plan_in_rank_order_is_refused() -> None:
    """Half of the program would take other positions for its own."""
    text = planned(gpt2(), "cp4_ring").plan.to_json()
    cut = re.sub(r'"balanced": \{[^}]*\}', '"balanced": {}', text, count=1)
    assert cut != text
    refused = pytest.raises(autopar.AutoparError, match="isn't what its strategies make")
    with float32_raised(), refused:
        autopar.emit(gpt2().model, autopar.Plan.from_json(cut), strategies=context.STRATEGIES)


# ---------------------------------------------------------------- refusals


def short() -> Job:
    """12 positions: 8 chunks aren't equal."""
    job = gpt2()
    return Job(job.model, {name: x[:, :12] for name, x in job.batch.items()}, None)


def two_of_a_length() -> Job:
    """An encoder and a decoder, each of 16 positions."""
    job = FAMILIES["transformer"].tiny()
    return Job(job.model, {n: x[:, :16] for n, x in job.batch.items()}, job.loss)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (classifier, {"cp": 2}, "cp = 2: the model has no attention over a sequence"),
    (FAMILIES["resnet"].tiny, {"cp": 2}, "cp = 2: the model has no attention over a sequence"),
    (short, {"cp": 4}, "sequence = 12 isn't divisible by 4 .cp4., each of two chunks"),
    (FAMILIES["vit"].tiny, {"cp": 2}, "17 isn't divisible by 2"),
    (FAMILIES["t5"].tiny, {"cp": 2}, "region heads_2 has several sequences .sequence_2, sequence."),
    (FAMILIES["t5"].tiny, {"cp": 2}, "embedding has it twice, as queries by keys"),
    (two_of_a_length, {"cp": 2}, "region heads_2 has several sequences"),
    (llama, {"cp": 4, "context": "all_to_all"}, "kv_heads = 2 · query_group = 2 can't be divided"),
    (
        lambda: gpt2(dropout=0.1),
        {"cp": 2, "context": "ring"},
        "drops attention weights, which ring attention doesn't",
    ),
    (
        gpt2,
        {"cp": 4, "tp": 2, "layers": {"*attn": {"tensor": True, "context": "all_to_all"}}},
        "heads = 4 isn't divisible by tp 2 · cp 4",
    ),
    (gpt2, {"cp": 4, "zero": {"stage": 1, "within": 2}}, "would cut cp = 4"),
    (gpt2, {"cp": 2, "context": "spiral"}, "context has no form 'spiral'"),
]


@pytest.mark.parametrize(("job", "pins", "message"), REFUSED)
def test_refusals(job: Any, pins: dict[str, Any], message: str) -> None:
    made, size = job(), 1
    for axis in ("cp", "tp"):
        size *= pins.get(axis, 1)
    with pytest.raises(autopar.AutoparError, match=message):
        autopar.compile(made.model, f"cpu:{size}", made.batch, loss=made.loss, pin=pins)


def test_sequence_beside_a_form(pool4: Pool) -> None:
    """Query heads that share one of keys, in a fused weight that tp can't split: of attention's two
    axes the sequence is exchanged along cp, and whole along tp."""
    for found in pool4.run(
        context.compare, "phi3_one_key_head", "cp2_tp2_sequence_all_to_all", "cpu:4"
    ):
        assert found.worst <= TOLERANCE, found.errors
        assert found.counted == found.planned


# ---------------------------------------------------------------- the choice


@pytest.mark.parametrize("pins", [{"cp": 4}, {"cp": 2, "pp": 2, "schedule": "1f1b"}])
def test_what_is_solved_is_what_is_planned(pins: dict[str, int]) -> None:
    """The solver's seconds are those of the finished plan, but for a few scalars; the form that it
    takes is no slower than the other."""
    times = {}
    for form in (None, "ring", "all_to_all"):
        more = {} if form is None else {"context": form}
        plan = autopar.compile(
            gpt2().model,
            cluster(),
            gpt2().batch,
            strategies=context.STRATEGIES,
            pin={"zero": False, "recompute": False, "microbatches": 2, **pins, **more},
        ).plan
        assert abs(plan.certificate.difference_s) < 0.08 * plan.predicted.step_s
        times[form] = plan.predicted.step_s
    assert times[None] <= 1.01 * min(times["ring"], times["all_to_all"])

"""The plan as a value: JSON both ways, questions, the summary. (test_reload has edited plans.)"""

import dataclasses
import getpass
import json
import os
import socket
import time
from pathlib import Path

import pytest
from clusters import cluster
from models import classifier, gpt2

import autopar
from autopar import AutoparError, Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    """GPT-2 on dp2 · tp2, with sequence parallelism and one layer under ZeRO."""
    job = gpt2()
    pin = {"dp": 2, "tp": 2, "sequence": True, "zero": False, "microbatches": 2}
    layers = {"transformer.h.1.*": {"zero": 3}}
    return autopar.compile(job.model, cluster(), job.batch, pin={**pin, "layers": layers}).plan


@pytest.fixture(scope="module")
def mlp_plan() -> Plan:
    job = classifier()
    return autopar.compile(job.model, cluster(), job.batch, loss=job.loss, pin={"dp": 4}).plan


# ---------------------------------------------------------------- JSON both ways


def test_round_trip(plan: Plan, mlp_plan: Plan, tmp_path: Path) -> None:
    for one in (plan, mlp_plan):
        text = one.to_json()
        again = Plan.from_json(text)
        assert again == one and again is not one
        assert again.to_json() == text
        one.save(tmp_path / "plan.json")
        assert (tmp_path / "plan.json").read_text(encoding="utf-8") == text
        assert Plan.load(tmp_path / "plan.json") == one
    assert plan != mlp_plan


def test_json_is_plain_and_complete(plan: Plan) -> None:
    """Every field, in order, one to a line; a plan that differs in one value isn't equal."""
    data = json.loads(plan.to_json())
    assert list(data) == [field.name for field in dataclasses.fields(plan)]
    assert data["axes"] == {"pp": 1, "dp": 2, "cp": 1, "ep": 1, "tp": 2}
    assert data["microbatches"] == 2
    data["predicted"]["step_s"] *= 2
    assert Plan.from_json(json.dumps(data)) != plan


def test_plan_says_nothing_of_when_and_where(plan: Plan) -> None:
    text = plan.to_json()
    for word in (os.getcwd(), str(Path.home()), socket.gethostname(), time.strftime("%Y-%m-%d")):
        assert word not in text, word
    assert f'"{getpass.getuser()}"' not in text


def test_plan_is_frozen(plan: Plan) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.microbatches = 1  # type: ignore[misc]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match=r"can't read the plan .*none\.json"):
        Plan.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this is not a plan: "),
        ("{", "this is not a plan: "),
        ("17", "this is not a plan: "),
        ("{}", "this is not a plan: "),
        ('{"format": 99}', "the plan has format 99; this autopar reads format 1"),
    ],
)
def test_hand_made_documents(text: str, message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        Plan.from_json(text)


def test_wrong_type_is_named(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    data["regions"][1]["splits"] = 3
    with pytest.raises(AutoparError, match=r"this is not a plan: .* at regions\.1\.splits \(1"):
        Plan.from_json(json.dumps(data))
    del data["tokens"]
    with pytest.raises(AutoparError, match=r"this is not a plan: .*\(2 faults\)"):
        Plan.from_json(json.dumps(data))


# ---------------------------------------------------------------- questions


def test_options(plan: Plan) -> None:
    assert plan.options("transformer.h.0/heads") == {"data": {}, "tensor": {}}
    with_zero = plan.options("transformer.h.1/heads")
    assert set(with_zero) == {"data", "tensor", "zero"} and with_zero["zero"]["stage"] == 3
    assert plan.options("transformer.h.0/stream") == {"data": {}, "sequence": {}}
    assert set(plan.options("stream")) == {"data", "sequence"}


@pytest.mark.parametrize("region", ["transformer.h.2/heads", "transformer.h.0/moe", "heads", ""])
def test_options_of_an_unknown_region(plan: Plan, region: str) -> None:
    with pytest.raises(AutoparError) as caught:
        plan.options(region)
    assert str(caught.value).startswith(f"the plan has no region {region!r}; it has, for example, ")
    assert "transformer.h.0/heads" in str(caught.value)


def test_predicted_figures_agree_with_each_other(plan: Plan) -> None:
    p = plan.predicted
    assert p.step_s == pytest.approx(p.compute_s + p.communication_s + p.optimizer_s)
    assert p.communication_s == pytest.approx(sum(c.seconds for c in plan.collectives))
    assert p.memory_bytes == sum(p.memory.values()) <= plan.memory_limit_bytes
    assert plan.tokens == 8 * 16 and p.tokens_per_s == pytest.approx(plan.tokens / p.step_s)
    assert p.mfu == pytest.approx(p.model_flops / (p.step_s * 4 * 5e10))  # float64 on four devices
    c = plan.certificate
    assert c.bound_s <= c.objective_s and p.step_s == pytest.approx(c.objective_s + c.difference_s)
    assert c.candidates == c.solved + c.pruned + c.dropped


# ---------------------------------------------------------------- the summary


def test_summary(plan: Plan) -> None:
    text = plan.summary()
    assert text == str(plan)
    lines = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    p = plan.predicted
    for line in (
        f"step time {p.step_s * 1e3:.2f} ms",
        f"tokens/s {p.tokens_per_s:,.0f}",
        f"MFU {p.mfu:.1%}",
        f"memory per device {p.memory_bytes / 1e3:.2f} kB",
        f"parameter {p.memory['parameter'] / 1e3:.2f} kB",
        "memory limit 8.00 GB",
    ):
        assert line in lines, (line, text)
    assert "GPT2LMHeadModel" in text and "dp 2 · cp 1 · ep 1 · tp 2; batch 8 in 2" in text
    assert "Certificate: within " in text
    for region in plan.regions:
        assert all(strategy in text for strategy in region.strategies)


def test_summary_lists_the_best_of_each_other_mesh(mlp_plan: Plan) -> None:
    """Not several settings of one mesh, nor the plan's own; the fastest first."""
    data = json.loads(mlp_plan.to_json())
    others = [
        ({"dp": 4}, 1, "", 0.5, 0.4, ""),
        ({"dp": 2, "tp": 2}, 2, "", 0.7, 0.6, ""),
        ({"dp": 2, "tp": 2}, 1, "", 0.6, 0.6, ""),
        ({"tp": 4}, 1, "", None, 0.65, "at least 0.65 s a step: not solved"),
        ({"pp": 4}, 4, "1f1b", None, 0.1, "short by 12 bytes of memory"),
        ({"pp": 2, "dp": 2}, 4, "gpipe", None, None, "illegal"),
    ]
    names = ("mesh", "microbatches", "schedule", "step_s", "bound_s", "why")
    data["axes"], data["alternatives"] = (
        {"dp": 4},
        [dict(zip(names, o, strict=True)) for o in others],
    )
    lines = Plan.from_json(json.dumps(data)).summary().splitlines()
    assert [line for line in lines if line.startswith("  instead ")] == [
        "  instead dp 2 · tp 2: 600.00 ms",
        "  instead tp 4: at least 0.65 s a step: not solved",
        "  instead pp 4 by 1f1b, 4 microbatches: short by 12 bytes of memory",
        "  instead pp 2 · dp 2 by gpipe, 4 microbatches: illegal",
    ]


def test_summary_of_a_model_without_a_sequence(mlp_plan: Plan) -> None:
    """It has samples, not tokens."""
    text = mlp_plan.summary()
    assert "samples/s" in text and "tokens/s" not in text
    assert mlp_plan.tokens == mlp_plan.batch_size == 8


@pytest.mark.parametrize("width", ["20", "300"])
def test_summary_is_the_same_in_any_terminal(
    plan: Plan, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert Plan.from_json(plan.to_json()).summary() == plan.summary()
    assert max(map(len, plan.summary().splitlines())) <= 100

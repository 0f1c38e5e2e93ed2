"""The JSON Schema of plans: the shipped file, every plan against it, and what both refuse."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from clusters import cluster
from edits import Json
from models import MODELS, classifier, deep_classifier, gpt2
from test_golden import FOLDER as GOLDEN
from torch import nn

import autopar
from autopar import AutoparError, Plan
from autopar.cli import main

FILE = Path(autopar.__file__).parent / "plan_schema.json"
PLANS = sorted(GOLDEN.glob("*.plan.json"))


def shipped() -> jsonschema.Draft202012Validator:
    """A validator of the file that users get."""
    return jsonschema.Draft202012Validator(json.loads(FILE.read_text("utf-8")))


def test_the_shipped_file_is_what_the_classes_say(update_golden: bool) -> None:
    text = json.dumps(Plan.json_schema(), indent=2) + "\n"
    if update_golden:
        FILE.write_text(text, "utf-8")
    assert FILE.read_text("utf-8") == text


def test_it_is_a_schema_in_which_every_key_is_known() -> None:
    schema = Plan.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for name, kind in schema["$defs"].items():
        assert kind.get("additionalProperties") is False or name == "JsonValue", name
    assert schema["additionalProperties"] is False


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == FILE.read_text("utf-8")


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.name)
def test_golden_plans_validate(file: Path) -> None:
    shipped().validate(json.loads(file.read_text("utf-8")))


def _stages() -> Plan:
    job = deep_classifier()
    pin = {"pp": 2, "dp": 2, "schedule": "interleaved"}
    return autopar.compile(job.model, cluster(), job.batch, loss=job.loss, pin=pin).plan


def _free() -> Plan:
    job = gpt2()
    return autopar.compile(job.model, cluster(), job.batch).plan


def _tuple_batch() -> Plan:
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
    job = classifier()
    batch = (job.batch["x"].float(), [job.batch["y"], 3, None])

    def loss(outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs, batch[1][0])

    return autopar.compile(model, cluster(), batch, loss=loss, pin={"dp": 2}).plan


def _options() -> Plan:
    job = MODELS["llama"]()
    pin = {"dp": 4, "zero": {"stage": 3, "within": 2}, "recompute": "full", "microbatches": 2}
    return autopar.compile(job.model, cluster(), job.batch, pin=pin).plan


@pytest.mark.parametrize("make", [_free, _stages, _options, _tuple_batch])
def test_fresh_plans_validate(make: Callable[[], Plan]) -> None:
    plan = make()
    shipped().validate(json.loads(plan.to_json()))
    assert Plan.from_json(plan.to_json()) == plan


def test_a_gradient_sync_of_its_own_validates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "plugins" / "topk")
    topk = importlib.import_module("autopar_topk.strategy").TopK(0.1)
    job = classifier()
    pin = {"dp": 4, "topk": True}
    plan = autopar.compile(
        job.model, cluster(), job.batch, loss=job.loss, pin=pin, strategies=["data", topk]
    ).plan
    data = json.loads(plan.to_json())
    assert '"function": "autopar_topk.runtime:topk_sum"' in plan.to_json()
    shipped().validate(data)


def _last(data: Json) -> Json:
    found: Json = data["regions"][-1]
    return found


EDITS: list[tuple[str, Callable[[Json], object]]] = [
    ("a key too many", lambda data: data.update(hook="os.system")),
    ("stratgies", lambda data: _last(data).update(stratgies={})),
    ("a field left out", lambda data: data.pop("axes")),
    ("another format", lambda data: data.update(format=2)),
    ("format", lambda data: data.update(format=True)),
    ("microbatches", lambda data: data.update(microbatches=0)),
    ("microbatches", lambda data: data.update(microbatches="2")),
    ("axes.dp", lambda data: data["axes"].update(dp=2.5)),
    ("memory_limit_bytes", lambda data: data.update(memory_limit_bytes=None)),
    ("regions", lambda data: data.update(regions={})),
    ("layers", lambda data: _last(data).update(layers=[])),
    ("splits", lambda data: _last(data).update(splits={"batch": "dp"})),
    ("strategies", lambda data: _last(data)["strategies"].update(zero={"stage": [3]})),
    ("recompute", lambda data: _last(data).update(recompute={"scope": "some", "layers": 1})),
    ("batch", lambda data: data["batch"].update(kind="pickle")),
    ("predicted.step_s", lambda data: data["predicted"].update(step_s="fast")),
    ("schedule", lambda data: data.update(schedule="1f1b")),
    ("certificate.gap", lambda data: data["certificate"].pop("gap")),
]


@pytest.mark.parametrize(("place", "edit"), EDITS)
def test_what_the_schema_refuses_so_does_the_reader(
    place: str, edit: Callable[[Json], object]
) -> None:
    data = json.loads(PLANS[0].read_text("utf-8"))
    edit(data)
    assert list(shipped().iter_errors(data)), place
    with pytest.raises(AutoparError) as error:
        Plan.from_json(json.dumps(data))
    assert " " in place or place in str(error.value)

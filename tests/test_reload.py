"""emit() and load(): plans that come back in, as they were, edited, and broken."""

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from autopar_wide_batch import WideBatch
from edits import (
    EDITS,
    Json,
    apply,
    compare_edited,
    edited,
    emit_different_plans,
    load_saved,
    part,
    planned,
    zero_off,
)
from equality import Comparison
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS, classifier, classifier_loss, gpt2, llama
from pool import Pool
from torch import nn

import autopar
from autopar.batch_spec import batch_text, describe_batch, meta_batch

TOLERANCE = 1e-9
H0, H1 = "transformer.h.0", "transformer.h.1"
Edit = Callable[[Json], object]


@functools.cache
def original(model: str = "gpt2") -> autopar.Compiled:
    """A planned model, made once."""
    return planned(MODELS[model]())


def emitted(plan: autopar.Plan, model: str = "gpt2", **keywords: Any) -> autopar.Compiled:
    """A plan emitted for the model that it was made for."""
    job = MODELS[model]()
    return autopar.emit(job.model, plan, loss=job.loss, **keywords)


# ---------------------------------------------------------------- as it was


@pytest.mark.parametrize("model", MODELS)
def test_an_untouched_plan_gives_the_same_bytes(model: str, tmp_path: Path) -> None:
    compiled, job = original(model), MODELS[model]()
    compiled.save(tmp_path)
    again = autopar.load(tmp_path, job.model, loss=job.loss, clip_norm=0.5)
    assert again.plan == compiled.plan
    assert again.plan.to_json() == (tmp_path / "plan.json").read_text("utf-8")
    assert again.source == compiled.source == (tmp_path / "module.py").read_text("utf-8")
    assert (again.clip_norm, again.device_type) == (0.5, "cpu")
    assert compiled.plan.diff(again.plan) == ""


def test_a_plan_on_factors_of_an_axis_comes_back() -> None:
    job = llama()
    compiled = planned(job, {"tp": 4, "tensor": True})
    assert dict(compiled.plan.mesh) == {"dp": 1, "tp_0": 2, "tp_1": 2}
    again = autopar.emit(job.model, compiled.plan)
    assert (again.plan, again.source) == (compiled.plan, compiled.source)
    plan = edited(compiled.plan, lambda data: data.update(mesh={"dp": 1, "tp": 4}))
    with pytest.raises(autopar.AutoparError, match=r"/vocab: 'tp_0' is no axis of the mesh tp4"):
        autopar.emit(job.model, plan)


@pytest.mark.parametrize(("chunks", "microbatches"), [(3, 4), (2, 1)])
def test_a_pinned_schedule_comes_back(chunks: int, microbatches: int) -> None:
    """Three chunks, one microbatch of two stages: which the planner doesn't look at by itself."""
    job = gpt2(layers=6)
    schedule = {"schedule": "interleaved", "chunks": chunks}
    pin = {"pp": 2, "microbatches": microbatches, "pipeline": schedule}
    compiled = autopar.compile(job.model, "cpu:2", job.batch, pin=pin)
    assert compiled.plan.schedule is not None
    assert compiled.plan.schedule.options["chunks"] == chunks
    again = autopar.emit(job.model, compiled.plan, job.batch)
    assert (again.plan, again.source) == (compiled.plan, compiled.source)
    assert compiled.explained(meshes=0).region_costs


def test_a_real_batch_serves_as_well_as_the_plans() -> None:
    job = gpt2()
    assert autopar.emit(job.model, original().plan, job.batch).source == original().source


def test_a_model_on_meta_will_do() -> None:
    with torch.device("meta"):
        job = gpt2()
    assert autopar.emit(job.model, original().plan).source == original().source


def test_a_folder_loads_on_every_rank(pool4: Pool, tmp_path: Path) -> None:
    original("mlp").save(tmp_path)
    assert pool4.run(load_saved, str(tmp_path)) == [original("mlp").source] * 4


def test_ranks_with_different_plans(pool4: Pool) -> None:
    for message in pool4.run(emit_different_plans):
        assert message.startswith("the ranks hold different plans (SHA-256: rank 0 ")
        assert message.endswith("give every rank the same")


# ---------------------------------------------------------------- edited, and legal


@pytest.mark.parametrize(
    ("model", "edit"),
    [
        *[("gpt2", edit) for edit in EDITS],
        ("llama", "first_attention_without_tensor"),
        ("llama", "second_layer_without_zero"),
        ("mlp", "ffn_without_tensor_and_zero"),
        ("mlp", "two_microbatches"),
    ],
)
def test_an_edited_plan_computes_the_same(pool4: Pool, model: str, edit: str) -> None:
    for comparison in pool4.run(compare_edited, model, edit):
        assert isinstance(comparison, Comparison)
        assert comparison.worst <= TOLERANCE, comparison
        assert comparison.counted == comparison.planned


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_honoured_priced_and_no_longer_proven(edit: str) -> None:
    plan = apply(original().plan, edit)
    again = emitted(plan)
    assert again.source != original().source
    for layer in ("", H0, H1):
        for choice in (c for c in plan.regions if layer in c.layers):
            place = f"{layer}/{choice.region}".lstrip("/")
            assert again.plan.options(place) == choice.strategies
    assert again.plan.microbatches == plan.microbatches
    assert again.plan.predicted != plan.predicted
    certificate = again.plan.certificate
    assert (certificate.solver, certificate.gap, certificate.bound_s) == ("none", 1.0, 0.0)
    assert "Certificate: none, no search made this plan." in again.plan.summary()
    assert again.plan.assumptions[-1].startswith("the figures were computed anew")
    assert again.plan.alternatives == ()
    assert emitted(again.plan).plan == again.plan, "an emitted plan is a fixed point"


def test_load_emits_an_edited_plan_anew_and_says_so(tmp_path: Path) -> None:
    original().save(tmp_path)
    plan = apply(original().plan, "second_layer_without_zero")
    plan.save(tmp_path / "plan.json")
    with pytest.warns(UserWarning, match=r"module.py isn't what plan.json beside it gives, from l"):
        again = autopar.load(tmp_path, gpt2().model)
    assert again.source == emitted(plan).source
    again.save(tmp_path)
    with warnings.catch_warnings(action="error"):
        autopar.load(tmp_path, gpt2().model)


def test_an_edited_module_is_not_run(tmp_path: Path) -> None:
    original("mlp").save(tmp_path)
    module = tmp_path / "module.py"
    module.write_text(module.read_text("utf-8") + "raise SystemExit('run')\n", "utf-8")
    with pytest.warns(UserWarning, match=r"The file was not used: the program was emitted"):
        again = autopar.load(tmp_path, classifier().model, loss=classifier_loss)
    assert again.source == original("mlp").source


def test_the_module_may_be_missing(tmp_path: Path) -> None:
    original("mlp").plan.save(tmp_path / "plan.json")
    again = autopar.load(tmp_path, classifier().model, loss=classifier_loss)
    assert again.source == original("mlp").source


def test_another_optimizer_is_priced_anew() -> None:
    again = emitted(original().plan, optimizer=torch.optim.SGD)
    assert again.source == original().source
    assert "optimizer" not in again.plan.predicted.memory
    assert again.plan.certificate.solver == "none"


def test_diff_puts_decisions_first() -> None:
    again = emitted(apply(original().plan, "second_layer_without_zero"))
    lines = original().plan.diff(again.plan).splitlines()
    at = lines.index("figures")
    assert lines[0] == "decisions"
    assert any(
        line.startswith(f"  {H1} ffn: data, tensor, zero 3 (batch over dp; ffn over tp; 3 param")
        and line.endswith("→ data, tensor (batch over dp; ffn over tp)")
        for line in lines[1:at]
    )
    assert any(line.startswith("  memory: ") for line in lines[at:])
    assert any(line.startswith("  all_gather over dp, forward: ") for line in lines[at:])
    assert not any(H0 in line for line in lines)


# ---------------------------------------------------------------- edited, and illegal


def _heads(data: Json) -> Json:
    return part(data, "heads", H0)


def _set(**fields: Any) -> Edit:
    return lambda data: data.update(fields)


def _splits(region: str, **splits: list[str]) -> Edit:
    return lambda data: part(data, region, H0)["splits"].update(splits)


def _strategies(region: str, **options: Json) -> Edit:
    return lambda data: part(data, region, H0)["strategies"].update(options)


def _without_layer(data: Json) -> None:
    data["regions"].remove(_heads(data))


def _twice(data: Json) -> None:
    data["regions"].append(dict(_heads(data)))


def _unknown_layer(data: Json) -> None:
    data["regions"].append({**_heads(data), "layers": ["transformer.h.7"]})


def _unknown_region(data: Json) -> None:
    data["regions"].append({**_heads(data), "region": "fnn"})


def _foreign_parameter(data: Json) -> None:
    heads = _heads(data)
    heads["params"]["mlp.c_fc.weight"] = heads["params"]["attn.c_attn.weight"]


def _half_sharded(data: Json) -> None:
    del _heads(data)["params"]["attn.c_attn.weight"]


def _only_the_name(data: Json) -> None:
    del _heads(data)["strategies"]["zero"]


ILLEGAL: list[tuple[str, Edit, str]] = [
    ("unknown dim", _splits("ffn", fnn=["dp"]),
     f"the plan's {H0}/ffn can't be run: it splits 'fnn', which the region doesn't have "
     r"\(it has batch, sequence, ffn, hidden\); it uses the axis 'dp' twice"),
    ("blocked dim", _splits("stream", hidden=["tp"]),
     f"the plan's {H0}/stream can't be run: it splits 'hidden': layer_norm runs along it"),
    ("unknown axis", _splits("ffn", ffn=["cp"]),
     f"the plan's region {H0}/ffn: 'cp' is no axis of the mesh dp2 · tp2"),
    ("a split that no strategy makes", _splits("ffn", ffn=[], hidden=["tp"]),
     f"the plan's {H0}/ffn isn't what its strategies make. By data, tensor, zero 3 it has batch "
     "over dp, ffn over tp and 3 parameters sharded; in the plan it has batch over dp, hidden "
     "over tp and 3 parameters sharded. Change its strategies, splits, params, forms and "
     "recompute together"),
    ("unknown strategy", _strategies("ffn", magic={}),
     f"the plan's {H0}/ffn was made by the strategy 'magic', which isn't at hand: there are "
     r"context, data, .*tensor.*. Install its package, or pass it in strategies="),
    ("strategy that refuses", _strategies("stream", tensor={}),
     f"the plan's {H0}/stream can't be run by data, tensor, zero 3: region stream has no heads"),
    ("option with no such value", _strategies("ffn", zero={"stage": 7}),
     f"the plan's {H0}/ffn: zero has no stage 7"),
    ("option that isn't there", _strategies("ffn", zero={"level": 3}),
     f"the plan's {H0}/ffn can't be run by data, tensor, zero 3: zero has no option 'level'; it "
     "has stage"),
    ("strategy taken off, its sharding left", _only_the_name,
     f"the plan's {H0}/heads isn't what its strategies make. By data, tensor it has .* and no "
     "parameter sharded; in the plan it has .* and 3 parameters sharded"),
    ("sharding of one parameter taken off", _half_sharded,
     f"{H0}/heads isn't what its strategies make.* 3 parameters sharded; .* 2 parameters sharded"),
    ("parameter of another region", _foreign_parameter,
     "it plans the parameter 'mlp.c_fc.weight', which isn't the region's"),
    ("region left out", _without_layer, f"the plan says nothing of {H0}/heads"),
    ("region twice", _twice, f"the plan has {H0}/heads twice"),
    ("unknown layer", _unknown_layer,
     "the plan has transformer.h.7/heads, which the model doesn't: there are skeleton/stream, "),
    ("unknown region", _unknown_region, f"the plan has {H0}/fnn, which the model doesn't"),
    ("axes that don't fill the cluster", _set(axes={"dp": 2, "tp": 4}, mesh={"dp": 2, "tp": 4}),
     r"the plan's axes \(dp 2 · tp 4\) make 8 ranks; its cluster has 4 devices"),
    ("axis without an owner", _set(axes={"xp": 2, "tp": 2}, mesh={"xp": 2, "tp": 2}),
     "no strategy at hand owns the plan's axis 'xp': they own pp, dp, .*tp"),
    ("stages without a schedule", _set(axes={"pp": 2, "dp": 1, "tp": 2}, mesh={"pp": 2, "tp": 2}),
     "the plan has pp = 2, but no schedule"),
    ("axes in another order", _set(axes={"tp": 2, "dp": 2}, mesh={"tp": 2, "dp": 2}),
     "the plan's axes stand in another order than dp, tp"),
    ("a mesh that isn't the axes", _set(mesh={"dp": 2, "tp": 4}),
     r"the plan's mesh {'dp': 2, 'tp': 4} isn't its axes {'dp': 2, 'tp': 2}, nor those with some"),
    ("a mesh cut wrongly", _set(mesh={"dp": 2, "tp_0": 2, "tp_1": 2}), "isn't its axes"),
    ("batch split over tp", _set(data_axes=["dp", "tp"]),
     r"data_axes are \['dp', 'tp'\]; on these axes they are \['dp'\]"),
    ("microbatches that don't divide the batch", _set(microbatches=3),
     r"the plan can't run: the batch of 8 samples isn't divisible by 6 \(dp 2, 3 microbatches\)"),
    ("a limit beyond the device", _set(memory_limit_bytes=10**12),
     "memory_limit_bytes is 1,000,000,000,000; the cluster's device has 6,319,127,552"),
    ("another batch", _set(batch={"kind": "dict", "items": {}}), "capture|loss|batch"),
    ("a dtype that torch lacks",
     lambda data: data["batch"]["items"]["labels"].update(dtype="compile"),
     "the plan's batch: torch has no dtype 'compile'"),
    ("a batch beyond 64 bits",
     lambda data: data["batch"]["items"]["labels"].update(shape=[2**40, 2**40]),
     r"the plan's batch: no tensor can have the shape \[1099511627776, 1099511627776\]"),
    ("another batch size", _set(batch_size=16),
     "the plan's batch_size is 16; its batch makes 8. For another batch plan again"),
    ("another number of tokens", _set(tokens=8), "the plan's tokens is 8; its batch makes 128"),
    ("a cluster without links", lambda data: data["cluster"].update(links=[]),
     "the outermost link joins 1 of 4 devices"),
    ("an unknown backend", lambda data: data["cluster"]["device"].update(backend="mpi"),
     "device.backend is 'mpi': autopar runs on gloo and nccl"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "message"), [case[1:] for case in ILLEGAL], ids=[case[0] for case in ILLEGAL]
)
def test_an_illegal_edit_is_an_error(edit: Edit, message: str) -> None:
    plan = edited(original().plan, edit)
    with pytest.raises(autopar.AutoparError, match=message):
        emitted(plan)


def test_a_split_that_does_not_divide() -> None:
    """A width of 10 over tp = 4, which isn't padded, since a sigmoid makes halves of zeros: edited
    to what the strategy refuses."""
    model = nn.Sequential(nn.Linear(12, 10), nn.Sigmoid(), nn.Linear(10, 8))
    batch = (torch.empty(8, 12, device="meta"), torch.empty(8, dtype=torch.int64, device="meta"))

    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    compiled = autopar.compile(model, "cpu:4", batch, loss=loss, pin={"tp": 4})
    assert compiled.plan.options("vocab").keys() == {"tensor"}

    def edit(data: Json) -> None:
        entry = next(entry for entry in data["regions"] if entry["region"] == "ffn")
        entry["strategies"]["tensor"], entry["splits"]["ffn"] = {}, ["tp"]

    message = "the plan's skeleton/ffn can't be run: it splits 'ffn' = 10 into 4 pieces"
    with pytest.raises(autopar.AutoparError, match=message):
        autopar.emit(model, edited(compiled.plan, edit), loss=loss)


def test_over_the_limit_says_by_how_much() -> None:
    needs = original().plan.predicted.memory_bytes
    plan = edited(original().plan, _set(memory_limit_bytes=needs - 1000))
    with pytest.raises(autopar.InfeasibleError) as error:
        emitted(plan)
    assert error.value.short_bytes == 1000
    assert str(error.value).startswith(f"the plan needs {needs:,} bytes")
    assert f"over its memory_limit_bytes of {needs - 1000:,}" in str(error.value)
    assert emitted(edited(original().plan, _set(memory_limit_bytes=needs))).plan.predicted


def test_a_plan_of_another_model() -> None:
    job = gpt2(layers=3)
    with pytest.raises(autopar.AutoparError) as error:
        autopar.emit(job.model, original().plan)
    assert str(error.value).startswith(
        "the plan is for another model, batch or loss: a GPT2LMHeadModel with 28,544 parameters, "
    )
    assert "; this is a GPT2LMHeadModel with " in str(error.value)


def test_a_plan_of_another_batch() -> None:
    job = gpt2()
    batch = {name: tensor[:, :8] for name, tensor in job.batch.items()}
    with pytest.raises(autopar.AutoparError, match="for another model, batch or loss"):
        autopar.emit(job.model, original().plan, batch)


def test_a_plan_of_another_loss() -> None:
    def other(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return classifier_loss(outputs, batch) * 2

    with pytest.raises(autopar.AutoparError, match="for another model, batch or loss"):
        autopar.emit(classifier().model, original("mlp").plan, loss=other)


def test_a_strategy_that_was_passed_is_passed_again() -> None:
    job = classifier()
    strategies = ("data", "tensor", WideBatch())
    pin = {"dp": 2, "tp": 2, "tensor": False, "wide_batch": True, "microbatches": 1}
    compiled = autopar.compile(
        job.model, "cpu:4", job.batch, loss=job.loss, strategies=strategies, pin=pin
    )
    with pytest.raises(autopar.AutoparError, match=r"strategy 'wide_batch', which isn't at hand"):
        emitted(compiled.plan, "mlp")
    assert emitted(compiled.plan, "mlp", strategies=strategies).source == compiled.source


def test_a_path_is_no_plan() -> None:
    with pytest.raises(autopar.AutoparError, match=r"plan is str, not a Plan: Plan.load reads"):
        autopar.emit(gpt2().model, "build/plan.json")  # type: ignore[arg-type]


# ---------------------------------------------------------------- files that aren't plans


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(autopar.AutoparError, match=r"can't read the plan .*plan.json: No such fi"):
        autopar.load(tmp_path, gpt2().model)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(autopar.AutoparError, match="isn't text in UTF-8"):
        autopar.load(tmp_path, gpt2().model)


def test_every_truncation_is_noticed() -> None:
    text = original("mlp").plan.to_json().rstrip()
    for end in range(0, len(text), 97):
        with pytest.raises(autopar.AutoparError, match="this is not a plan"):
            autopar.Plan.from_json(text[:end])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this is not a plan: Expecting value"),
        ("null", "this is not a plan: "),
        ("[]", "this is not a plan: "),
        ("[" * 100_000, "this is not a plan: it is nested too deeply"),
        ('{"format": 1, "format": 1}', "an object has the key 'format' twice"),
        ('{"format": 2, "new": 3}', "the plan has format 2; this autopar reads format 1"),
        ('{"format": NaN}', "NaN is no number of JSON"),
        ('{"format": -Infinity}', "-Infinity is no number of JSON"),
        ('{"format": 1e999}', "1e999 is beyond what a number can hold"),
        ('{"format": ' + "9" * 5000 + "}", "this is not a plan: Exceeds the limit"),
        ('{"format": "' + "9" * 5000 + '"}', r"the plan has format '9{40,90}…; this autopar"),
    ],
)
def test_a_text_that_is_no_plan(text: str, message: str) -> None:
    with pytest.raises(autopar.AutoparError, match=message) as error:
        autopar.Plan.from_json(text)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set(hook="os.system"), "Unexpected keyword argument at hook"),
        (_set(microbatches="2"), "Input should be a valid integer at microbatches"),
        (_set(microbatches=True), "Input should be a valid integer at microbatches"),
        (_set(microbatches=0), "greater than or equal to 1 at microbatches"),
        (_set(axes={"dp": 2.5}), "Input should be a valid integer at axes.dp"),
        (_set(axes=[["dp", 4]]), "Input should be an object at axes"),
        (_set(regions={}), "Input should be a valid array at regions"),
        (_set(batch={"kind": "pickle", "items": []}), "batch"),
        (lambda data: data.pop("regions"), "Field required at regions"),
        (lambda data: data["regions"][0].update(layers=[]), r"at regions.0.layers"),
        (lambda data: data["regions"][0]["strategies"].update(zero={"stage": [3]}), "stage"),
        (lambda data: data["predicted"].update(step_s=None), "at predicted.step_s"),
    ],
)
def test_a_field_of_another_type(edit: Edit, message: str) -> None:
    with pytest.raises(autopar.AutoparError, match=f"this is not a plan: .*{message}"):
        edited(original("mlp").plan, edit)


def test_deep_nesting_where_json_is_free() -> None:
    text = original("mlp").plan.to_json()
    for depth in (500, 50_000):
        deep = '{"x": ' + "[" * depth + "]" * depth + "}"
        hostile = text.replace('"cluster": {', f'"cluster": {{"deep": {deep},', 1)
        with pytest.raises(autopar.AutoparError, match="this is not a plan"):
            autopar.Plan.from_json(hostile)


SCALARS: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, False, 0, 1, -1, 2, 2**70, 0.5, -1e300, "", "dp", "tp", "ffn", [], ["tp"], {}]
)


def _leaves(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in JSON data."""
    inner: list[tuple[Any, ...]] = [path] if path else []
    items = data.items() if isinstance(data, dict) else enumerate(data)
    if isinstance(data, dict | list):
        for key, value in items:
            inner += _leaves(value, (*path, key)) if isinstance(value, dict | list) else [
                (*path, key)
            ]  # fmt: skip
    return inner


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_change_of_one_value_is_a_program_or_an_autopar_error(data: st.DataObject) -> None:
    """Whatever stands in one place of a plan: what comes out is checked, or a clear error."""
    plan = json.loads(original("mlp").plan.to_json())
    *path, last = data.draw(st.sampled_from(_leaves(plan)))
    place = plan
    for key in path:
        place = place[key]
    place[last] = data.draw(SCALARS)
    try:
        read = autopar.Plan.from_json(json.dumps(plan))
        again = autopar.emit(classifier().model, read, loss=classifier_loss)
    except autopar.AutoparError as error:
        assert str(error)
        return
    assert again.plan.predicted.memory_bytes <= again.plan.memory_limit_bytes
    assert again.plan.model == original("mlp").plan.model


# ---------------------------------------------------------------- the batch in the plan


class Pair(NamedTuple):
    """A batch that JSON can't describe."""

    x: torch.Tensor
    y: torch.Tensor


def test_a_batchs_structure_goes_there_and_back() -> None:
    batch = {
        "x": torch.zeros(2, 3),
        "more": [torch.zeros(4, dtype=torch.bool), (1, None, "s", True, 0.5)],
    }
    spec = describe_batch(batch)
    back = meta_batch(spec)
    assert describe_batch(back) == spec
    assert list(back) == ["x", "more"] and back["more"][1] == (1, None, "s", True, 0.5)
    assert back["x"].is_meta and back["more"][0].dtype == torch.bool
    assert batch_text(spec) == "x float32 [2, 3], more (bool [4], (1, None, 's', True, 0.5))"


def test_a_batch_that_a_plan_cannot_describe_is_passed_again() -> None:
    job = classifier()
    batch = Pair(job.batch["x"], job.batch["y"])

    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch.y)

    compiled = autopar.compile(job.model, "cpu:4", batch, loss=loss)
    message = r"the plan's batch holds a test_reload.Pair, which a plan can't describe: pass batch="
    with pytest.raises(autopar.AutoparError, match=message):
        autopar.emit(job.model, compiled.plan, loss=loss)
    assert autopar.emit(job.model, compiled.plan, batch, loss=loss).source == compiled.source


def test_zero_off_changes_only_what_it_says() -> None:
    """The helper that the edits are made with."""
    before = original().plan
    after = edited(before, lambda data: zero_off(part(data, "ffn", H0)))
    assert after.options(f"{H0}/ffn") == {"data": {}, "tensor": {}}
    assert after.options(f"{H1}/ffn") == before.options(f"{H1}/ffn")

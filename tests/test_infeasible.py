"""Nothing fits: by how much and where, and the advice that follows, each change planned again."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from clusters import cluster
from models import Job, classifier, deep_classifier, gpt2, llama
from pool import Pool

import autopar
from autopar import AutoparError, InfeasibleError
from autopar.cli import main
from autopar.cluster import describe_cluster, resolve_cluster, with_devices
from autopar.planning.advice import Advice
from autopar.text import layer_span, size


def error_of(job: Job, limit: int, **keywords: Any) -> InfeasibleError:
    """How planning for four devices with so much memory ends."""
    spec = {"preset": "cpu:4", "memory_bytes": limit}
    with pytest.raises(InfeasibleError) as caught:
        autopar.compile(job.model, spec, job.batch, loss=job.loss, **keywords)
    return caught.value


def changes(advice: Advice) -> dict[str, autopar.Plan]:
    return {change.what: change.plan for change in advice.changes}


# ---------------------------------------------------------------- by how much, and where


def test_the_smallest_plan_is_there_in_full() -> None:
    error = error_of(classifier(), 8_000, forbid=["zero"])
    plan = error.smallest
    assert plan is not None and error.setting is not None
    assert plan.predicted.memory_bytes == 8_000 + error.short_bytes
    assert dict(plan.axes) == dict(error.setting.mesh.axes)
    assert plan.microbatches == error.setting.microbatches
    for kind, count in plan.predicted.memory.items():
        assert f"{kind} {size(count)}" in str(error)


PINNED = {"pp": 4, "microbatches": 2, "schedule": "1f1b", "recompute": "selective"}


def test_a_plan_fits_into_what_it_says_that_it_needs() -> None:
    """Two regions of each layer keep what it is called with."""
    job = deep_classifier(torch.float32, layers=8)
    roomy = autopar.compile(job.model, cluster(4), job.batch, loss=job.loss, pin=PINNED).plan
    need = roomy.predicted.memory_bytes
    spec = cluster(4, memory_bytes=need)
    plan = autopar.compile(job.model, spec, job.batch, loss=job.loss, pin=PINNED).plan
    assert plan.predicted.memory_bytes <= plan.memory_limit_bytes == need
    assert plan.predicted.step_s <= roomy.predicted.step_s * (1 + 1e-9)
    assert plan.certificate.solver == "highs"
    assert plan.certificate.bound_s <= roomy.predicted.step_s * (1 + 1e-9)
    assert autopar.emit(job.model, plan, loss=job.loss).plan == plan
    with pytest.raises(InfeasibleError) as caught:
        spec = cluster(4, memory_bytes=need - 1)
        autopar.compile(job.model, spec, job.batch, loss=job.loss, pin=PINNED)
    smallest = caught.value.smallest
    assert smallest is not None and smallest.predicted.memory_bytes == need
    assert caught.value.short_bytes == 1 and f"needs {need:,} bytes" in str(caught.value)


GAP = 1e-3
"""The default."""
AGAIN = [
    (mesh, scope)
    for mesh in (
        {"dp": 4},
        {"pp": 4, "microbatches": 2, "schedule": "1f1b"},
        {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "interleaved"},
    )
    for scope in ("selective", "full")
]
AGAIN.append(({"tp": 4}, "full"))  # by regions alone two of them keep the same


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize(("mesh", "scope"), AGAIN)
def test_the_search_counts_what_runs_again_as_the_account_does(
    make: Callable[..., Job], mesh: dict[str, Any], scope: str
) -> None:
    """Where all layers do the same: what the model's end holds is gone when the last one runs
    again, and of regions that do so alone one does at a time. So a plan as good is found, and
    proven, in just what the plan needs."""
    job, pin = make(torch.float32, layers=4), {**mesh, "recompute": scope}
    roomy = autopar.compile(job.model, cluster(4), job.batch, loss=job.loss, pin=pin).plan
    need = roomy.predicted.memory_bytes
    spec = cluster(4, memory_bytes=need)
    plan = autopar.compile(job.model, spec, job.batch, loss=job.loss, pin=pin).plan
    assert plan.certificate.solver == "highs"
    assert plan.predicted.memory_bytes <= need
    assert plan.predicted.step_s <= roomy.predicted.step_s / (1 - GAP)
    assert plan.certificate.bound_s <= roomy.predicted.step_s * (1 + 1e-9)


STAGED = {"cp": 2, "pp": 2}
SHARING: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (4, {**STAGED, "microbatches": 4, "schedule": "zero_bubble"}, {"recompute": False}),
    (2, {"cp": 2, "dp": 2, "microbatches": 2}, {"recompute": False, "zero": False}),
    (
        4,
        {"pp": 2, "tp": 2, "microbatches": 1, "schedule": "gpipe"},
        {"recompute": True, "zero": False},
    ),
    (
        4,
        {**STAGED, "microbatches": 1, "pipeline": {"schedule": "interleaved", "chunks": 2}},
        {"zero": False},
    ),
    (4, {"cp": 4}, {"recompute": "full"}),  # the tables are an argument of each layer, whole
    (4, {"cp": 4}, {"recompute": "selective"}),
]
"""Layers, what is pinned both times, and the first time only."""


@pytest.mark.parametrize(("layers", "mesh", "first"), SHARING)
def test_what_layers_share_counts_once_in_the_search_too(
    layers: int, mesh: dict[str, Any], first: dict[str, Any]
) -> None:
    """Rotary tables, in whatever layout they are kept: a plan as good is found in just the bytes
    that one needs, and the certificate's bound isn't above that."""
    job = llama(torch.float64, layers=layers)

    def planned(spec: dict[str, Any], pin: dict[str, Any]) -> autopar.Plan:
        return autopar.compile(job.model, spec, job.batch, loss=job.loss, pin=pin).plan

    pinned = planned(cluster(4), {**mesh, **first})
    need = pinned.predicted.memory_bytes
    for pin in (mesh, {**mesh, **first}):
        plan = planned(cluster(4, memory_bytes=need), pin)
        assert plan.predicted.memory_bytes <= need
        assert plan.certificate.solver == "highs"
        assert plan.predicted.step_s <= pinned.predicted.step_s / (1 - GAP)
        assert plan.certificate.bound_s <= pinned.predicted.step_s * (1 + 1e-9)


def test_the_fullest_stage_is_named_with_its_layers() -> None:
    job, limit = gpt2(layers=4), 500_000
    pin = {"pp": 4, "zero": False, "microbatches": 4, "schedule": "1f1b"}
    error = error_of(job, limit, pin=pin)
    plan = error.smallest
    assert plan is not None and plan.schedule is not None
    needs = [stage.memory_bytes for stage in plan.predicted.stages]
    worst = needs.index(max(needs))
    assert needs[worst] == limit + error.short_bytes
    text = str(error)
    layers = layer_span(plan.schedule.parts[worst])
    assert f"Stage {worst} of 0 to 3 ({layers}) is the fullest: parameter " in text
    for stage in {0, 1, 2, 3} - {worst}:
        over = needs[stage] - limit
        assert f"{stage} is {size(abs(over))} {'over' if over > 0 else 'under'}" in text


def test_a_plan_from_outside_names_its_stage_too() -> None:
    job = deep_classifier()
    pin = {"pp": 2, "dp": 2, "schedule": "gpipe"}
    plan = autopar.compile(job.model, "cpu:4", job.batch, loss=job.loss, pin=pin).plan
    data = plan.to_json().replace(
        f'"memory_limit_bytes": {plan.memory_limit_bytes}',
        f'"memory_limit_bytes": {plan.predicted.memory_bytes - 1}',
    )
    with pytest.raises(InfeasibleError, match=r"Stage [01] of 0 to 1 \(layers.* is the fullest"):
        autopar.emit(job.model, autopar.Plan.from_json(data), loss=job.loss)


# ---------------------------------------------------------------- advice


def test_advice_to_allow_what_was_forbidden() -> None:
    """Each change is a plan that compile makes with it, and fits; what doesn't help is said."""
    job, limit, pin = classifier(), 26_000, {"dp": 4, "microbatches": 1}
    error = error_of(job, limit, pin=pin, forbid=["zero", "recompute"])
    advice = error.advice()
    found = changes(advice)
    spec = {"preset": "cpu:4", "memory_bytes": limit}
    allowed = autopar.compile(
        job.model, spec, job.batch, loss=job.loss, pin=pin, forbid=["recompute"]
    )
    assert found["allow zero"] == allowed.plan
    assert found["allow zero"].predicted.memory_bytes <= limit
    assert found["lift the pin dp = 4"].axes["dp"] < 4
    assert "allow recompute" in dict(advice.refused)
    assert dict(advice.refused)["allow recompute"].startswith("still short by ")
    assert all(plan.predicted.step_s > 0 for plan in found.values())
    text = str(advice)
    for what in (*found, *dict(advice.refused)):
        assert what.split()[0] in text
    assert "each of these alone would fit" in text


def test_advice_on_memory_is_exact() -> None:
    job = classifier()
    error = error_of(job, 8_000, forbid=["zero"])
    need = 8_000 + error.short_bytes
    found = changes(error.advice())
    (what,) = [what for what in found if what.startswith(size(need))]
    assert f"({need:,} bytes) instead of 8.00 kB" in what
    spec = {"preset": "cpu:4", "memory_bytes": need}
    assert autopar.compile(job.model, spec, job.batch, loss=job.loss, forbid=["zero"])


def test_advice_on_the_fraction_of_memory() -> None:
    job = classifier()
    error = error_of(job, 40_000, memory_fraction=0.1)
    (what,) = [what for what in changes(error.advice()) if what.startswith("memory_fraction")]
    fraction = float(what.split()[1])
    spec = {"preset": "cpu:4", "memory_bytes": 40_000}
    assert autopar.compile(job.model, spec, job.batch, loss=job.loss, memory_fraction=fraction)
    error_of(job, 40_000, memory_fraction=fraction - 0.001)


def test_advice_on_devices() -> None:
    job = classifier()
    found = changes(error_of(job, 5_000).advice())
    (what,) = [what for what in found if "devices instead of 4" in what]
    plan = found[what]
    assert plan.cluster["devices"] == int(what.split()[0])
    assert plan.predicted.memory_bytes <= 5_000 == plan.memory_limit_bytes


def test_advice_to_take_a_strategy_that_was_left_out() -> None:
    advice = error_of(classifier(), 26_000, strategies=["data"]).advice()
    plan = changes(advice)["take zero among the strategies"]
    assert any("zero" in region.strategies for region in plan.regions)
    assert "take recompute among the strategies" in dict(advice.refused)


def test_microbatches_that_are_no_power_of_two() -> None:
    """Six samples on one data rank: with 1 or 2 microbatches nothing fits."""
    job = classifier()
    six = Job(job.model, {name: value[:6] for name, value in job.batch.items()}, job.loss)
    for count in (1, 2):
        error_of(six, 8_400, pin={"tp": 4, "microbatches": count})
    spec = {"preset": "cpu:4", "memory_bytes": 8_400}
    plan = autopar.compile(six.model, spec, six.batch, loss=six.loss, pin={"tp": 4}).plan
    assert plan.microbatches in (3, 6)
    assert plan.predicted.memory_bytes <= 8_400


def test_an_error_that_travelled_has_its_plan_but_no_advice() -> None:
    error = error_of(classifier(), 8_000, forbid=["zero"])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.short_bytes) == (str(error), error.short_bytes)
    assert again.smallest == error.smallest
    with pytest.raises(AutoparError, match="there is advice only where the planner itself"):
        again.advice()


def fails_on_this_rank() -> tuple[int, int, str]:
    """A task for the pool: short by, bytes of the smallest plan, how advice ends here."""
    error = error_of(classifier(), 26_000, pin={"dp": 4, "microbatches": 1}, forbid=["zero"])
    assert error.smallest is not None
    try:
        ends = str(error.advice(progress=False))
    except AutoparError as refusal:
        ends = str(refusal)
    return error.short_bytes, error.smallest.predicted.memory_bytes, ends


def test_every_rank_has_the_smallest_plan_and_rank_0_the_advice(pool4: Pool) -> None:
    first, *others = pool4.run(fails_on_this_rank)
    assert "each of these alone would fit" in first[2]
    for short, needs, ends in others:
        assert (short, needs) == first[:2] and needs == 26_000 + short
        assert ends.startswith("there is advice only where the planner itself found")


def test_advice_on_the_command_line(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "large_model.py").write_text(
        "import torch\n\ndef job():\n"
        "    batch = (torch.zeros(8, 12), torch.zeros(8, dtype=torch.int64))\n"
        "    loss = lambda out, b: torch.nn.functional.cross_entropy(out, b[1])\n"
        "    return torch.nn.Sequential(torch.nn.Linear(12, 64)), batch, loss\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["plan", "large_model:job", "cpu:4", "--memory-fraction", "1e-7"]  # 631 bytes
    assert main(command) == 2
    assert capsys.readouterr().out == ""
    assert main([*command, "--advice"]) == 2
    printed = capsys.readouterr()
    assert "memory_fraction 0.0001 instead of" in printed.out
    assert printed.err.startswith("autopar: nothing fits into 631 bytes")


def test_a_plan_fits_where_fragments_are_counted() -> None:
    """A device's allocator loses a share of what comes and goes: of many small tensors it is
    rounded as a plan's memory is, so that its own bytes are enough."""
    job, pin = llama(layers=5), {"pp": 2, "microbatches": 2, "schedule": "gpipe"}
    plan = autopar.compile(job.model, "h100:8", job.batch, loss=job.loss, pin=pin).plan
    spec = {"preset": "h100:8", "memory_bytes": plan.predicted.memory_bytes}
    again = autopar.compile(
        job.model, spec, job.batch, loss=job.loss, pin=pin, memory_fraction=1.0
    ).plan
    assert again.predicted.memory_bytes <= plan.predicted.memory_bytes
    assert again.certificate.bound_s <= plan.predicted.step_s
    assert again.predicted.step_s <= plan.predicted.step_s * 1.001


# ---------------------------------------------------------------- more devices


def test_more_devices_of_a_preset_bring_its_next_level() -> None:
    for spec in ("h100:8", {"preset": "h100:8"}, {"preset": "h100", "devices": 8}):
        assert with_devices(spec, 16) == resolve_cluster("h100:16")
    changed = with_devices({"preset": "h100:8", "memory_bytes": 10**9}, 16)
    assert (changed.device.memory_bytes, len(changed.links)) == (10**9, 2)


def test_more_devices_of_a_cluster_in_full(tmp_path: Any) -> None:
    whole = cluster()
    for spec in (whole, resolve_cluster(whole), describe_cluster(resolve_cluster(whole))):
        grown = with_devices(spec, 8)
        assert (grown.devices, grown.links[-1].devices) == (8, 8)
        assert grown.device == resolve_cluster(whole).device
    with pytest.raises(AutoparError, match="no multiple of the 8"):
        with_devices(resolve_cluster("h100:16"), 12)
    with pytest.raises(AutoparError, match="is a torus of shape"):
        with_devices(resolve_cluster("tpu_v5p:64"), 128)


@pytest.mark.parametrize("pin", [{"dp": 4, "zero": 3}, {"pp": 2, "dp": 2, "zero": 1}])
def test_what_is_needed_is_enough_where_the_allocator_loses_a_share(pin: dict[str, Any]) -> None:
    """To the byte, rounded as a plan's memory is: rotary tables, which layers share, too."""
    job, spec = llama(layers=3), resolve_cluster("h100:4")

    def planned(memory_bytes: int) -> autopar.Plan:
        device = replace(spec.device, memory_bytes=memory_bytes)
        here = replace(spec, device=device)
        return autopar.compile(
            job.model, here, job.batch, loss=job.loss, pin=pin, memory_fraction=1.0
        ).plan

    limit = 2_577_000_000
    with pytest.raises(InfeasibleError) as caught:
        planned(limit)
    needed = limit + caught.value.short_bytes
    assert planned(needed).predicted.memory_bytes <= needed
    with pytest.raises(InfeasibleError):
        planned(needed - 1)

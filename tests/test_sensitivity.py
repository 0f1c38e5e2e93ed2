"""What more or less memory and bandwidth would change, against plans made for such a cluster."""

from dataclasses import replace
from typing import Any

import pytest
from clusters import cluster
from models import classifier

import autopar
from autopar import AutoparError
from autopar.cli import main
from autopar.cluster import resolve_cluster
from autopar.planning.sensitivity import Sensitivity, changes

LIMIT = 28_000
FLAT = {"pp": 1, "cp": 1, "ep": 1, "microbatches": 1}


def planned(spec: Any, **pin: int) -> autopar.Compiled:
    """The MLP on a flat mesh of four devices."""
    job = classifier()
    return autopar.compile(job.model, spec, job.batch, loss=job.loss, pin={**FLAT, **pin})


@pytest.fixture(scope="module")
def compiled() -> autopar.Compiled:
    return planned(cluster(memory_bytes=LIMIT))


@pytest.fixture(scope="module")
def found(compiled: autopar.Compiled) -> Sensitivity:
    return compiled.sensitivity()


def test_the_four_changes(found: Sensitivity, compiled: autopar.Compiled) -> None:
    assert [shift.what for shift in found.shifts] == [
        "memory +10%",
        "bandwidth +10%",
        "memory -10%",
        "bandwidth -10%",
    ]
    assert found.plan == compiled.plan


def test_each_best_is_what_compile_plans_for_such_a_cluster(found: Sensitivity) -> None:
    whole = resolve_cluster(cluster(memory_bytes=LIMIT))
    (link,) = whole.links
    for shift, spec in zip(
        found.shifts,
        (
            replace(whole, device=replace(whole.device, memory_bytes=30_800)),
            replace(whole, links=(replace(link, bytes_per_s=link.bytes_per_s * 1.1),)),
            replace(whole, device=replace(whole.device, memory_bytes=25_200)),
            replace(whole, links=(replace(link, bytes_per_s=link.bytes_per_s * 0.9),)),
        ),
        strict=True,
    ):
        assert shift.best == planned(spec).plan, shift.what


def test_the_plan_itself_is_priced_anew(found: Sensitivity, compiled: autopar.Compiled) -> None:
    """Memory changes nothing of a step; of communication, what isn't latency goes by bandwidth."""
    step_s = compiled.plan.predicted.step_s
    more_memory, faster, less_memory, slower = found.shifts
    assert more_memory.kept_s == step_s
    assert faster.kept_s is not None and slower.kept_s is not None
    assert faster.kept_s < step_s < slower.kept_s
    # Bytes over bandwidth: 1/1.1 and 1/0.9 of the same seconds.
    assert (slower.kept_s - step_s) / (step_s - faster.kept_s) == pytest.approx(
        (1 / 0.9 - 1) / (1 - 1 / 1.1)
    )
    fits = compiled.plan.predicted.memory_bytes <= 25_200
    assert (less_memory.kept_s is not None) is fits
    for shift in found.shifts:
        if shift.kept_s is not None and shift.best is not None:
            bound = shift.best.certificate.bound_s + shift.best.certificate.difference_s
            assert bound <= shift.kept_s * 1.05, "the plan itself was to be had"


def test_the_table(found: Sensitivity) -> None:
    text = " ".join(str(found).split())
    for shift in found.shifts:
        assert shift.what in text
    assert "what would change (" in text and "chosen then" in text
    assert changes(found.plan, found.plan) == "the same"
    for shift in found.shifts:
        assert shift.best is not None
        kept_s, best_s = shift.kept_s, shift.best.predicted.step_s
        as_good = kept_s is not None and kept_s * (1 - 1e-3) <= best_s
        one = replace(found, shifts=(shift,))
        assert ("this plan is as good as any" in " ".join(str(one).split())) is as_good


def test_where_nothing_would_fit() -> None:
    with pytest.raises(autopar.InfeasibleError) as error:
        planned(cluster(memory_bytes=1000), dp=4)
    need = 1000 + error.value.short_bytes
    less = planned(cluster(memory_bytes=need), dp=4).sensitivity(0.05).shifts[2]
    assert (less.what, less.kept_s, less.best) == ("memory -5%", None, None)
    assert less.why.startswith("nothing fits into ")


@pytest.mark.parametrize("share", [0, 1, -0.1, 10, True, "0.1"])
def test_a_share_is_a_share(compiled: autopar.Compiled, share: Any) -> None:
    with pytest.raises(AutoparError, match=r"share must lie in \(0, 1\)"):
        compiled.sensitivity(share)


def test_what_came_from_outside_was_not_searched(compiled: autopar.Compiled) -> None:
    with pytest.raises(AutoparError, match="only what compile and recipe return"):
        autopar.emit(classifier().model, compiled.plan, loss=classifier().loss).sensitivity()


def test_on_the_command_line(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(str(tmp_path))
    with open("shifted_model.py", "w", encoding="utf-8") as file:
        file.write(
            "import torch\n\ndef job():\n"
            "    batch = (torch.zeros(8, 12), torch.zeros(8, dtype=torch.int64))\n"
            "    loss = lambda out, b: torch.nn.functional.cross_entropy(out, b[1])\n"
            "    return torch.nn.Sequential(torch.nn.Linear(12, 8)), batch, loss\n"
        )
    assert main(["plan", "shifted_model:job", "cpu:4", "--sensitivity", "--pin", '{"dp": 4}']) == 0
    assert "what would change (" in capsys.readouterr().out

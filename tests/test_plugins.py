"""Strangers' plugins: two distributions, built and installed here, with no edit to the core."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import Comparison, run
from models import MODELS, float32_raised
from pool import Pool

import autopar
from autopar.capture import reference_loss

ROOT = Path(__file__).parent.parent
DISTRIBUTIONS = (ROOT / "examples" / "custom_strategy", ROOT / "tests" / "plugins" / "topk")
OFF = {"tensor": False, "sequence": False, "zero": False, "microbatches": 1}
WIDE = {**OFF, "dp": 2, "tp": 2, "wide_batch": True}
TOLERANCE = 1e-9


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with both distributions installed."""
    folder = str(tmp_path_factory.mktemp("plugins"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--target", folder, *map(str, DISTRIBUTIONS)]
    subprocess.run(command, check=True)
    return folder


@contextmanager
def on_path(folder: str) -> Iterator[None]:
    """Makes what is installed in a folder importable and its entry points found."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def plan(model: str, pin: dict[str, Any], **keywords: Any) -> autopar.Compiled:
    """A model planned with every strategy that is installed."""
    job = MODELS[model]()
    return autopar.compile(job.model, "cpu:4", job.batch, loss=job.loss, pin=pin, **keywords)


def compare(folder: str, model: str, pin: dict[str, Any]) -> Comparison:
    """A task for the pool: equality under a pin, with the plugins installed."""
    with on_path(folder), float32_raised():
        job = MODELS[model]()
        return run(job, plan_job(model, pin))


def plan_job(model: str, pin: dict[str, Any]) -> autopar.Compiled:
    """As `plan`, with the optimizer that the comparison runs."""
    import functools

    from equality import CLIP_NORM

    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
    return plan(model, pin, optimizer=optimizer, clip_norm=CLIP_NORM)


@pytest.mark.parametrize("model", ["gpt2", "mlp"])
def test_a_split_that_no_built_in_makes(pool4: Pool, installed: str, model: str) -> None:
    """wide_batch, found by entry point alone, is exact and its bytes are planned."""
    for comparison in pool4.run(compare, installed, model, WIDE):
        assert comparison.worst <= TOLERANCE, comparison
        assert comparison.counted == comparison.planned


def test_topk_of_everything_is_a_sum(pool4: Pool, installed: str) -> None:
    """Compression that keeps every element equals the plain model; its bytes are planned."""
    pin = {**OFF, "dp": 4, "topk": 1.0}
    for comparison in pool4.run(compare, installed, "gpt2", pin):
        assert comparison.worst <= TOLERANCE, comparison
        assert comparison.counted == comparison.planned


def compress(folder: str, fraction: float) -> tuple[float, float, float]:
    """What is sent plus what is kept, against the plain gradient; and the share sent."""
    with on_path(folder):
        job = MODELS["mlp"]()
        parallel = plan_job("mlp", {**OFF, "dp": 4, "topk": fraction}).materialize()
        parallel.forward_backward(parallel.shard_batch(job.batch))
        sent = parallel.full_gradients()
        kept = {key[0]: state.value for key, state in parallel.model.kept_state.items()}
        for value in kept.values():
            torch.distributed.all_reduce(value)
        parallel.close()
    reference_loss(job.model, job.batch, job.loss).backward()
    plain = {n: p.grad for n, p in job.model.named_parameters() if p.grad is not None}
    error = max(float((sent[n] + kept[n] - plain[n]).abs().max()) for n in sent)
    lost = max(float((sent[n] - plain[n]).abs().max()) for n in sent)
    nonzero = sum(int((g != 0).sum()) for g in sent.values())
    return error, lost, nonzero / sum(g.numel() for g in sent.values())


def test_topk_keeps_what_it_does_not_send(pool4: Pool, installed: str) -> None:
    """Error feedback: nothing of the gradient is lost, and little of it is sent."""
    for error, lost, share in pool4.run(compress, installed, 0.05):
        assert error < 1e-12
        assert lost > 1e-4
        assert share < 4 * 0.06


def test_topk_is_used_only_where_pinned(installed: str) -> None:
    """It changes numbers, so a free plan never takes it; pinned, it shows everywhere."""
    with on_path(installed):
        free = plan("mlp", {"dp": 4, "zero": False})
        pinned = plan("mlp", {**OFF, "dp": 4, "topk": 0.1})
    assert all("topk" not in region.strategies for region in free.plan.regions)
    assert any("topk" in region.strategies for region in pinned.plan.regions)
    assert "topk_sum(" in pinned.source
    assert "from autopar_topk.runtime import topk_sum" in pinned.source
    assert "topk" not in free.source
    extra = pinned.plan.predicted.memory["optimizer"] - free.plan.predicted.memory["optimizer"]
    assert extra == sum(p.numel() * 8 for p in MODELS["mlp"]().model.parameters())
    assert {c.op for c in pinned.plan.collectives if c.phase == "grad_sync"} == {"all_gather"}
    assert autopar.Plan.from_json(pinned.plan.to_json()) == pinned.plan


def test_the_order_of_plugins_changes_nothing(installed: str) -> None:
    """Every order of the strategies gives the same plan and the same source."""
    names = ["data", "tensor", "wide_batch", "zero"]
    with on_path(installed):
        results = {
            (compiled.plan.to_json(), compiled.source)
            for order in itertools.islice(itertools.permutations(names), 0, None, 5)
            for compiled in [plan("mlp", {}, strategies=order)]
        }
    assert len(results) == 1


def test_two_strategies_do_not_decide_one_parameter(installed: str) -> None:
    """A gradient that topk sums is no gradient that ZeRO shards: the second pin says why."""
    with on_path(installed), pytest.raises(autopar.AutoparError, match="is already decided"):
        plan("mlp", {**OFF, "zero": 3, "dp": 4, "topk": 0.1})

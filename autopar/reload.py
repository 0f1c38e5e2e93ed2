"""emit() and load(): from a plan, perhaps edited by hand, to a program. Nothing is searched."""

import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from autopar.batch_spec import meta_batch
from autopar.capture import capture
from autopar.capture.reference import Loss
from autopar.cluster import resolve_cluster
from autopar.compiled import Compiled, check_running, device_type_of, headline, warn_of_opaque
from autopar.emit.module import emit_module
from autopar.errors import AutoparError
from autopar.graph.analyse import analyse
from autopar.plan import Plan
from autopar.planning.optimizer_state import state_ratio
from autopar.planning.prices import Prices
from autopar.planning.reprice import reprice
from autopar.planning.verify import verify
from autopar.plugin import CostModel, Strategy
from autopar.registry import select_cost_models, select_strategies
from autopar.runtime import initialise
from autopar.runtime.agree import check_same, from_rank0
from autopar.runtime.training import OptimizerFactory


def emit(
    model: nn.Module,
    plan: Plan,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    clip_norm: float | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    cost_models: Iterable[str | CostModel] | None = None,
) -> Compiled:
    """The program of a plan, which may have been edited by hand.

    `batch` left out is that of the plan, on meta. The keywords are `compile`'s; `loss` must be
    the one that the plan was made with. The plan is checked against the model and the strategies
    and priced anew; what comes back has its own figures, and keeps the certificate only where they
    are the ones that it had. Under torchrun rank 0 emits for all; every rank must call.

    Errors: AutoparError for a plan of another model, batch or loss, and for one that can't run
    (with what and why); InfeasibleError where it needs more memory than its limit.
    """
    if not isinstance(plan, Plan):
        raise AutoparError(f"plan is {type(plan).__name__}, not a Plan: Plan.load reads a file")
    check_running(model, clip_norm)
    cluster = resolve_cluster(plan.cluster)
    chosen, models = select_strategies(strategies), select_cost_models(cost_models)
    device_type = device_type_of(cluster)
    initialise(device_type)
    check_same(plan.to_json(), "plans")
    report: dict[str, float] = {}

    def check_and_emit() -> tuple[str, str]:
        start = time.perf_counter()
        graph = analyse(capture(model, meta_batch(plan.batch) if batch is None else batch, loss))
        report["capture_s"] = time.perf_counter() - start
        program = verify(graph, plan, cluster, chosen)
        ratio = state_ratio(optimizer, graph.capture.params)
        priced = reprice(program, plan, Prices(models, program.setting.mesh, cluster), ratio)
        report["emit_s"] = time.perf_counter() - start - report["capture_s"]
        return priced.to_json(), emit_module(program, headline(priced))

    text, source = from_rank0(check_and_emit)
    priced = Plan.from_json(text)
    warn_of_opaque(priced)
    return Compiled(priced, source, report, model, device_type, optimizer, clip_norm)


def load(
    folder: str | Path,
    model: nn.Module,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    clip_norm: float | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    cost_models: Iterable[str | CostModel] | None = None,
) -> Compiled:
    """What `Compiled.save` wrote to a folder, for the same model; `plan.json` may be edited.

    The program is emitted from plan.json: module.py is code, and is never run. Where it isn't what
    the plan gives, a warning says so. The plan holds the batch's shapes; `loss`, `optimizer` and
    the other keywords of `compile` are in no file and are given again.

    Errors: as `emit`, and AutoparError where plan.json can't be read.
    """
    folder = Path(folder)
    compiled = emit(
        model,
        Plan.load(folder / "plan.json"),
        batch,
        loss=loss,
        optimizer=optimizer,
        clip_norm=clip_norm,
        strategies=strategies,
        cost_models=cost_models,
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        _tell_of_difference(folder / "module.py", compiled.source)
    return compiled


def _tell_of_difference(file: Path, source: str) -> None:
    """Warn where the file is there and isn't the source."""
    if not file.exists():
        return
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    wanted = source.splitlines()
    if lines == wanted:
        return
    same = [a == b for a, b in zip(lines, wanted, strict=False)]
    first = same.index(False) + 1 if False in same else len(same) + 1
    warnings.warn(
        f"{file} isn't what plan.json beside it gives, from line {first} on: one of them was "
        "edited, or another version of autopar wrote it. The file was not used: the program was "
        "emitted from the plan. Compiled.save writes both anew",
        stacklevel=3,
    )

"""compile(): the whole line on one screen."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from autopar.capture import capture
from autopar.cluster import ClusterSpec, resolve_cluster
from autopar.emit.module import emit_module
from autopar.errors import AutoparError
from autopar.graph.analyse import analyse
from autopar.plan import Plan
from autopar.planning.decide import decide
from autopar.planning.optimizer_state import state_ratio
from autopar.planning.pins import read_pins
from autopar.planning.realise import realise
from autopar.planning.search import SearchOptions, search
from autopar.plugin import CostModel, Strategy
from autopar.registry import select_cost_models, select_strategies
from autopar.runtime import TrainingModule, initialise, run_program
from autopar.runtime.agree import from_rank0
from autopar.runtime.training import OptimizerFactory

DEVICE_TYPES = MappingProxyType({"gloo": "cpu", "nccl": "cuda"})
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Compiled:
    """A planned and emitted training program, not yet running."""

    plan: Plan
    source: str
    report: Mapping[str, float]
    """Seconds that each stage of this compile took."""
    model: nn.Module
    device_type: str
    optimizer: OptimizerFactory | None
    clip_norm: float | None

    def save(self, folder: str | Path) -> None:
        """Write plan.json and module.py. Not a collective: call it on one rank."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.plan.save(folder / "plan.json")
        (folder / "module.py").write_text(self.source, encoding="utf-8")

    def materialize(self) -> TrainingModule:
        """This rank's part of the program, with rank 0's weights. A collective under torchrun.

        A model on meta has no weights: its module comes uninitialised, for `load_weights`. Errors:
        AutoparError where the world isn't the plan's.
        """
        module = TrainingModule(
            run_program(self.source),
            optimizer=self.optimizer,
            clip_norm=self.clip_norm,
            device_type=self.device_type,
        )
        if not any(p.is_meta for p in self.model.parameters()):
            module.load_from_rank0(self.model)
        return module


def compile(
    model: nn.Module,
    cluster_spec: ClusterSpec | str | Mapping[str, Any] | Path,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    clip_norm: float | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    cost_models: Iterable[str | CostModel] | None = None,
    pin: Mapping[str, Any] | None = None,
    forbid: Iterable[str] = (),
    memory_fraction: float = 1.0,
    gap: float = 1e-4,
    time_limit_s: float | None = None,
) -> Compiled:
    """Plan and emit the training of `model` on a cluster.

    `model` may live on the meta device. `batch` is what one optimizer step consumes over the whole
    cluster (tensors, meta ones will do; the first dim is the batch). `loss(outputs, batch)` may be
    left out where the model returns a scalar or has `.loss`. `optimizer`: a class or partial of
    torch.optim, or a callable of (name, parameter) pairs; default AdamW. `strategies`,
    `cost_models`: names or instances; left out, all that are installed. `pin` fixes axes
    ("dp": 2), "microbatches", strategies (True, False, or options) and, under "layers", strategies
    by glob of module names; `forbid` names strategies or axes. `memory_fraction` of the device's
    memory may be used. Planning stops at a relative `gap` or after `time_limit_s` a mesh.

    Under torchrun rank 0 plans for all; every rank must call. Errors: AutoparError (and its
    InfeasibleError where nothing fits into memory), with the numbers and what to do.
    """
    cluster = resolve_cluster(cluster_spec)
    if not 0 < memory_fraction <= 1:
        raise AutoparError(f"memory_fraction must lie in (0, 1], not {memory_fraction}")
    chosen = select_strategies(strategies)
    models = select_cost_models(cost_models)
    pins = read_pins(pin, forbid, chosen)
    device_type = DEVICE_TYPES[cluster.device.backend]
    initialise(device_type)
    report: dict[str, float] = {}

    def plan_and_emit() -> tuple[str, str]:
        start = time.perf_counter()
        graph = analyse(capture(model, batch, loss))
        report["capture_s"] = time.perf_counter() - start
        ratio = state_ratio(optimizer, graph.capture.params)
        limit = int(cluster.device.memory_bytes * memory_fraction)
        options = SearchOptions(limit, gap, time_limit_s, ratio)
        found = search(graph, cluster, chosen, models, pins, options)
        plan = decide(graph, found, cluster, options, ())
        report["plan_s"] = time.perf_counter() - start - report["capture_s"]
        source = emit_module(realise(graph, plan), _headline(plan))
        return plan.to_json(), source

    text, source = from_rank0(plan_and_emit)
    return Compiled(Plan.from_json(text), source, report, model, device_type, optimizer, clip_norm)


def _headline(plan: Plan) -> tuple[str, ...]:
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan.axes.items())
    return (
        "",
        f"Plan: {mesh}; a global batch of {plan.batch_size} in {plan.microbatches} "
        f"microbatch{'es' if plan.microbatches > 1 else ''}. Change the plan, not this file.",
    )

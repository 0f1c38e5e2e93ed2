"""compile() and recipe(): the whole line on one screen."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.batch_spec import describe_batch
from autopar.capture import capture
from autopar.cluster import Spec, resolve_cluster
from autopar.compiled import Compiled, check_running, device_type_of, headline, warn_of_opaque
from autopar.default_batch import batch_or_default
from autopar.emit.module import emit_module
from autopar.errors import AutoparError
from autopar.graph.analyse import analyse
from autopar.option_values import is_number
from autopar.plan import Plan
from autopar.planning.limited import plan_in_time
from autopar.planning.optimizer_state import state_ratio
from autopar.planning.pins import read_pins
from autopar.planning.realise import realise
from autopar.planning.recipe import plan_by_recipe
from autopar.planning.request import Request
from autopar.planning.solvers import check_solver
from autopar.planning.tried import SearchOptions
from autopar.planning.watch import Watch
from autopar.plugin import CostModel, Strategy
from autopar.progress import shown
from autopar.registry import select_cost_models, select_strategies
from autopar.runtime import initialise
from autopar.runtime.agree import from_rank0
from autopar.runtime.training import OptimizerFactory

Loss = Callable[[Any, Any], Any]


def compile(
    model: nn.Module,
    cluster_spec: Spec,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    clip_norm: float | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    cost_models: Iterable[str | CostModel] | None = None,
    pin: Mapping[str, Any] | None = None,
    forbid: Iterable[str] = (),
    memory_fraction: float = 1.0,
    gap: float = 1e-3,
    time_limit_s: float | None = None,
    solver: str = "highs",
    progress: bool = True,
) -> Compiled:
    """Plan and emit the training of `model` on a cluster.

    `model` may live on the meta device. `batch` is what one optimizer step consumes over the whole
    cluster (tensors, meta ones will do; the first dim is the batch); left out, it is
    `model.example_input_array`, or derived from a Hugging Face model's config and signature, and
    the plan's assumptions say so. `loss(outputs, batch)` may be left out where the model returns a
    scalar or has `.loss`. `optimizer`: a class or partial of torch.optim, or a callable of (name,
    parameter) pairs; default AdamW. `strategies`, `cost_models`: names or instances; left out, all
    that are installed. `pin` fixes axes ("dp": 2), "microbatches", strategies (True, False, or
    options) and, under "layers", strategies by glob of module names; `forbid` names strategies or
    axes. `memory_fraction` of the device's memory may be used. Planning stops at a relative `gap`
    or, with the best plan so far, after about `time_limit_s` (once there is one; without pins it is
    no slower than the recipe's, which takes up to half of that time): the certificate has the gap
    that is left. `solver`: "highs" or "cbc" (comes with PuLP; several times
    slower). `progress`: a line on stderr while it plans, where that is a terminal.

    Under torchrun rank 0 plans for all; every rank must call. Errors: AutoparError (and its
    InfeasibleError where nothing fits into memory), with the numbers and what to do.
    """
    asked = _Asked(
        *(model, cluster_spec, batch, loss, optimizer, clip_norm, strategies, cost_models),
        *(pin, _listed(forbid), memory_fraction, gap, time_limit_s, solver, progress),
    )
    return _line(asked, plan_in_time)


def recipe(
    model: nn.Module,
    cluster_spec: Spec,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    clip_norm: float | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    cost_models: Iterable[str | CostModel] | None = None,
    forbid: Iterable[str] = (),
    memory_fraction: float = 1.0,
    gap: float = 1e-3,
    time_limit_s: float | None = None,
    solver: str = "highs",
    progress: bool = True,
) -> Compiled:
    """What a practitioner would do by rule of thumb, as a program: to compare plans with.

    Tensor parallelism (of models with experts: expert parallelism) inside the node until the model
    fits; if that doesn't do, layers in stages (1F1B, optimizer state sharded) or ZeRO 3, the faster
    of the first that fit; data parallelism over what is left; and where nothing fits, all of it
    again with every layer recomputed. Each step is a set of pins for the planner's own candidates
    and prices, and no step is tried once one fits. The arguments are `compile`'s, without `pin`;
    `time_limit_s` is of each search, not of the whole: a step takes one or two of them.

    Errors: as `compile`; InfeasibleError where no step of the recipe fits, though a plan may.
    """
    barred = _listed(forbid)
    asked = _Asked(
        *(model, cluster_spec, batch, loss, optimizer, clip_norm, strategies, cost_models),
        *(None, barred, memory_fraction, gap, time_limit_s, solver, progress),
    )
    return _line(asked, lambda request, watch: plan_by_recipe(request, barred, watch))


def _listed(forbid: Iterable[str]) -> tuple[str, ...]:
    """The names, which may come once. Errors: AutoparError for a text, whose letters they'd be, and
    for what is no list."""
    if isinstance(forbid, str) or not isinstance(forbid, Iterable):
        raise AutoparError(f'forbid must be a list of names such as ["tp"], not {forbid!r}')
    return tuple(forbid)


@dataclass(frozen=True)
class _Asked:
    """The arguments of `compile`."""

    model: nn.Module
    cluster_spec: Spec
    batch: Any
    loss: Loss | None
    optimizer: OptimizerFactory | None
    clip_norm: float | None
    strategies: Iterable[str | Strategy] | None
    cost_models: Iterable[str | CostModel] | None
    pin: Mapping[str, Any] | None
    forbid: tuple[str, ...]
    memory_fraction: float
    gap: float
    time_limit_s: float | None
    solver: str
    progress: bool


def _line(asked: _Asked, make: Callable[[Request, Watch], Plan]) -> Compiled:
    """From a model to a program, planned by `make`."""
    _check(asked)
    cluster = resolve_cluster(asked.cluster_spec)
    chosen = select_strategies(asked.strategies)
    models = select_cost_models(asked.cost_models)
    pins = read_pins(asked.pin, asked.forbid, chosen)
    device_type = device_type_of(cluster)
    initialise(device_type)
    report: dict[str, float] = {}
    requests: list[Request] = []  # stays empty but on rank 0

    def plan_and_emit() -> tuple[str, str]:
        start = time.perf_counter()
        batch, assumed = batch_or_default(asked.model, asked.batch, cluster.devices)
        graph = analyse(capture(asked.model, batch, asked.loss))
        report["capture_s"] = time.perf_counter() - start
        ratio = state_ratio(asked.optimizer, graph.capture.params)
        limit = int(cluster.device.memory_bytes * asked.memory_fraction)
        options = SearchOptions(limit, asked.gap, asked.time_limit_s, ratio, asked.solver)
        told = (describe_batch(batch), assumed, asked.cluster_spec)
        request = Request(graph, cluster, chosen, models, pins, options, *told)
        requests.append(request)
        with shown(asked.progress) as watch:
            plan = make(request, watch)
        report["plan_s"] = time.perf_counter() - start - report["capture_s"]
        source = emit_module(realise(graph, plan, chosen), headline(plan))
        return plan.to_json(), source

    text, source = from_rank0(plan_and_emit)
    plan = Plan.from_json(text)
    warn_of_opaque(plan, stacklevel=4)
    given = (asked.model, device_type, asked.optimizer, asked.clip_norm)
    return Compiled(plan, source, report, *given, requests[0] if requests else None)


def _check(asked: _Asked) -> None:
    check_running(asked.model, asked.clip_norm)
    fraction, gap, limit_s = asked.memory_fraction, asked.gap, asked.time_limit_s
    if not (is_number(fraction) and 0 < fraction <= 1):
        raise AutoparError(f"memory_fraction must lie in (0, 1], not {fraction!r}")
    if not (is_number(gap) and 0 <= gap < 1):
        raise AutoparError(f"gap must lie in [0, 1), not {gap!r}")
    if limit_s is not None and not (is_number(limit_s) and limit_s >= 0):
        raise AutoparError(f"time_limit_s must be seconds, 0 or more, or None, not {limit_s!r}")
    check_solver(asked.solver)

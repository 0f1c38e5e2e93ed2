"""Compiled: a planned and emitted training program, not yet running."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import nn

from autopar.cluster import ClusterSpec
from autopar.errors import AutoparError, OpaqueWarning
from autopar.option_values import is_number
from autopar.plan import Plan, ScheduleChoice
from autopar.planning.explain import explained
from autopar.planning.request import Request
from autopar.planning.sensitivity import Sensitivity, sensitivity
from autopar.progress import shown
from autopar.runtime import TrainingModule, run_program
from autopar.runtime.training import OptimizerFactory

DEVICE_TYPES = MappingProxyType({"gloo": "cpu", "nccl": "cuda"})


@dataclass(frozen=True)
class Compiled:
    """A planned and emitted training program, not yet running."""

    plan: Plan
    source: str
    report: Mapping[str, float]
    """Seconds that each stage took."""
    model: nn.Module
    device_type: str
    optimizer: OptimizerFactory | None
    clip_norm: float | None
    request: Request | None = None
    """What `compile` planned, on the rank that did: to plan again with one thing changed."""

    def save(self, folder: str | Path) -> None:
        """Write plan.json and module.py. Not a collective: call it on one rank."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.plan.save(folder / "plan.json")
        (folder / "module.py").write_text(self.source, encoding="utf-8")

    def explained(self, meshes: int = 3, progress: bool = True) -> Plan:
        """The plan with where its seconds go by region, and with what it is compared with: the
        practitioner's recipe (`autopar.recipe`), and the best on each of the next best meshes, so
        many of them. Its summary shows what each takes and what it loses on. Each is planned for
        this, under the same pins (the recipe: without), and each search may take the whole
        `time_limit_s` of the plan's own. `progress` as in `compile`.

        Errors: AutoparError for a wrong number of meshes, and where nothing was planned here: on a
        rank other than 0 under torchrun, and for what `emit` and `load` return.
        """
        if isinstance(meshes, bool) or not isinstance(meshes, int) or meshes < 0:
            raise AutoparError(f"meshes must be a whole number, 0 or more, not {meshes!r}")
        with shown(progress) as watch:
            return explained(self._request(), self.plan, meshes, watch)

    def sensitivity(self, share: float = 0.1, progress: bool = True) -> Sensitivity:
        """What `share` more and less of the devices' memory and of the links' bandwidth would
        change: this plan's step, and the plan that would be chosen, by planning again four times.
        Each time may take the whole `time_limit_s` that this plan was made with.

        Errors: AutoparError for a share outside (0, 1), and as of `explained`.
        """
        if not (is_number(share) and 0 < share < 1):
            raise AutoparError(f"share must lie in (0, 1), 0.1 for ten percent, not {share!r}")
        with shown(progress) as watch:
            return sensitivity(self._request(), self.plan, share, watch)

    def _request(self) -> Request:
        if self.request is None:
            raise AutoparError(
                "only what compile and recipe return can be explained, on rank 0: a plan that came "
                "from outside was not searched for here"
            )
        return self.request

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
            code=self.model,
        )
        if not any(p.is_meta for p in self.model.parameters()):
            module.load_from_rank0(self.model)
        return module


def check_running(model: Any, clip_norm: Any) -> None:
    """Errors: AutoparError for what `Compiled` can't run with."""
    if not isinstance(model, nn.Module):
        raise AutoparError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
        raise AutoparError(
            f"clip_norm must be above 0 (or None for no clipping), not {clip_norm!r}"
        )


def warn_of_opaque(plan: Plan, stacklevel: int = 3) -> None:
    """Name what can't be analysed, on one rank. `stacklevel`: of the user's line; 3 where what the
    user called calls this."""
    if plan.opaque and (not dist.is_initialized() or dist.get_rank() == 0):
        text = "\n  ".join(plan.opaque)
        warnings.warn(
            f"these can't be analysed and are not split by tensor or sequence:\n  {text}",
            OpaqueWarning,
            stacklevel=stacklevel,
        )


def device_type_of(cluster: ClusterSpec) -> str:
    """torch's device type for a cluster's backend. Errors: AutoparError for an unknown backend."""
    if cluster.device.backend not in DEVICE_TYPES:
        raise AutoparError(
            f"device.backend is {cluster.device.backend!r}: autopar runs on "
            f"{' and '.join(DEVICE_TYPES)}"
        )
    return DEVICE_TYPES[cluster.device.backend]


LEGEND = (
    "How to read it: every collective names its axes. In the backward an all_gather is a",
    "reduce_scatter and the reverse, `enter` and `all_reduce_partial` all-reduce, `shard`",
    "all-gathers; all_reduce, unshard, local_part and once communicate nothing. `sums`: axes over",
    "which a parameter's gradient is partial; it is all-reduced over them once a step, in buckets.",
    "The runtime adds per step: one all-reduce of the counts over DATA_AXES, one of the loss over",
    "LOSS_SUMS, one of the gradients' squared norm over all ranks. A comment after an op is its",
    "local shape.",
)


def headline(plan: Plan) -> tuple[str, ...]:
    """The lines that an emitted module's docstring has on its plan."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan.axes.items())
    stages = () if plan.schedule is None else (*_stages(plan.schedule), "")
    return (
        "",
        f"Plan: {mesh}; a global batch of {plan.batch_size} in {plan.microbatches} "
        f"microbatch{'es' if plan.microbatches > 1 else ''}. Change the plan, not this file.",
        "",
        *stages,
        *LEGEND,
        *_balanced(plan),
        *_forms(plan),
    )


def _balanced(plan: Plan) -> tuple[str, ...]:
    if not any(choice.balanced for choice in plan.regions):
        return ()
    return (
        "A `balanced` dim is cut into twice as many chunks as there are ranks: rank i holds",
        "the i-th from the beginning and the i-th from the end, in this order.",
    )


def _forms(plan: Plan) -> Iterator[str]:
    """What functions communicate that run ops in their strategies' ways."""
    forms = {form.function: form for choice in plan.regions for form in choice.forms}
    for function, form in sorted(forms.items()):
        if function:
            yield f"{function.split(':')[1]} communicates over {' · '.join(form.axes)}:"
            for one in form.exchanges:
                what = f"as much as {' and '.join(one.of)}"
                wide = ", in float32 at least" if one.wide else ""
                yield f"- in the {one.phase} {one.times} × {one.op} of {what}{wide}"


def _stages(schedule: ScheduleChoice) -> tuple[str, ...]:
    return (
        f"The layers lie in stages along {schedule.axis}, run by {schedule.name}: see SCHEDULE at "
        "the end. Each",
        "root class is what a stage holds: its forward takes what the one before returned, beside",
        "its own inputs of the batch, and the runtime sends gradients back the same way. A weight",
        "that several stages declare is one: its gradients are summed over them once a step.",
    )

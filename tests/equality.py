"""The emitted program on real processes against the plain model on one."""

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from autopar_wide_batch import WideBatch
from models import MODELS, Job, float32_raised
from wide_ffn import WideFfn

import autopar
from autopar.capture import reference_loss
from autopar.plugin import Strategy
from autopar.runtime import CollectiveCounter

CLIP_NORM = 0.05
STEPS = 3
OFF = {
    "tensor": False,
    "sequence": False,
    "zero": False,
    "recompute": False,
    "wide_batch": False,
    "wide_ffn": False,
    "microbatches": 1,
}

PINS: dict[str, dict[str, Any]] = {
    "dp4": {"dp": 4},
    "dp2_tp2": {"dp": 2, "tp": 2, "tensor": True},
    "tp4": {"tp": 4, "tensor": True},
    "tp4_sequence": {"tp": 4, "tensor": True, "sequence": True},
    "dp2_tp2_sequence": {"dp": 2, "tp": 2, "tensor": True, "sequence": True},
    **{
        f"zero{stage}{name}": {**pins, "zero": stage}
        for stage in (1, 2, 3)
        for name, pins in {
            "": {"dp": 4},
            "_tp2": {"dp": 2, "tp": 2, "tensor": True},
            "_tp2_sequence": {"dp": 2, "tp": 2, "tensor": True, "sequence": True},
            "_microbatches2": {"dp": 4, "microbatches": 2},
        }.items()
    },
    **{
        f"hybrid{stage}": {"dp": 4, "microbatches": 2, "zero": {"stage": stage, "within": 2}}
        for stage in (1, 2, 3)
    },
    "zero_mixed": {
        "dp": 4,
        "microbatches": 2,
        "zero": 3,
        "layers": {
            "*.mlp": {"zero": 1},
            "*attn": {"zero": {"stage": 2, "within": 2}},
            "*l*n*[1m]": {"zero": 3},  # ln_1, input_layernorm: the rest of a layer
        },
    },
    "zero3_layers": {"dp": 4, "layers": {"*.[0-9]*": {"zero": 3}}},  # none in the skeleton
    "dp4_microbatches2": {"dp": 4, "microbatches": 2},
    "wide_batch": {"dp": 2, "tp": 2, "tensor": False, "wide_batch": True},
    "wide_ffn": {"dp": 2, "tp": 2, "data": False, "tensor": False, "wide_ffn": True},
}
TWO: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2, "tensor": True},
    "tp2_sequence": {"tp": 2, "tensor": True, "sequence": True},
}
"""Cases for two processes."""
EIGHT: dict[str, dict[str, Any]] = {
    f"hybrid{stage}_{name}": {**pins, "zero": {"stage": stage, "within": 2}}
    for stage in (1, 2, 3)
    for name, pins in {
        "tp2": {"dp": 4, "tp": 2, "tensor": True},
        "tp2_sequence": {"dp": 4, "tp": 2, "tensor": True, "sequence": True},
    }.items()
}
"""Cases for eight processes: on four, groups inside a data axis of 2 are all of it."""
STAGED: dict[str, dict[str, Any]] = {
    **{
        f"pp4_{schedule}": {"pp": 4, "microbatches": 4, "schedule": schedule}
        for schedule in ("gpipe", "1f1b", "zero_bubble")
    },
    "pp2_dp2_interleaved": {
        "pp": 2,
        "dp": 2,
        "microbatches": 4,
        "schedule": "interleaved",
        "pipeline": {"chunks": 2},
    },
    "pp2": {"pp": 2, "microbatches": 4, "schedule": "1f1b"},
    "pp2_tp2": {"pp": 2, "tp": 2, "microbatches": 4, "schedule": "1f1b"},
    "pp2_tp2_sequence": {
        "pp": 2,
        "tp": 2,
        "sequence": True,
        "microbatches": 2,
        "schedule": "zero_bubble",
    },
    **{
        f"pp2_dp2_zero{stage}_{schedule}": {
            "pp": 2,
            "dp": 2,
            "zero": stage,
            "microbatches": 4,
            "schedule": schedule,
        }
        for stage, schedule in (
            (1, "1f1b"),
            (1, "zero_bubble"),
            (1, "interleaved"),
            (2, "1f1b"),
            (2, "zero_bubble"),
            (3, "1f1b"),
            (3, "gpipe"),
            (3, "interleaved"),
        )
    },
    **{
        f"pp2_dp2_{name}": {
            "pp": 2,
            "dp": 2,
            "microbatches": 4,
            "schedule": schedule,
            "recompute": scope,
            **more,
        }
        for name, schedule, scope, more in (
            ("1f1b_full", "1f1b", "full", {}),
            ("gpipe_selective", "gpipe", "selective", {}),
            ("interleaved_full", "interleaved", "full", {"pipeline": {"chunks": 2}}),
            ("1f1b_groups", "1f1b", {"scope": "full", "together": 2}, {}),
            ("zero2_full", "1f1b", "full", {"zero": 2}),
            ("zero3_full", "1f1b", "full", {"zero": 3}),
            ("zero3_selective", "gpipe", "selective", {"zero": 3}),
        )
    },
    "pp2_tp2_full": {
        "pp": 2,
        "tp": 2,
        "sequence": True,
        "microbatches": 4,
        "schedule": "1f1b",
        "recompute": "full",
    },
}
"""Layers in stages along pp."""
TP2_SEQUENCE: dict[str, Any] = {"dp": 2, "tp": 2, "tensor": True, "sequence": True}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"dp": 4, "recompute": "full"},
    "full_tp2_sequence": {**TP2_SEQUENCE, "recompute": "full"},
    "full_zero3": {"dp": 4, "recompute": "full", "zero": 3},
    "full_zero3_microbatches2": {"dp": 4, "recompute": "full", "zero": 3, "microbatches": 2},
    "full_zero2_microbatches2": {"dp": 4, "recompute": "full", "zero": 2, "microbatches": 2},
    "together": {"dp": 4, "recompute": {"scope": "full", "together": 2}},
    "together_zero1": {"dp": 4, "recompute": {"scope": "full", "together": 2}, "zero": 1},
    "together_tp2_sequence": {**TP2_SEQUENCE, "recompute": {"scope": "full", "together": 2}},
    "some_layers": {
        **TP2_SEQUENCE,
        "layers": {"*.[0-9]*": {"recompute": False}, "*.0.*": {"recompute": "full"}},
    },
    "selective": {"dp": 4, "recompute": "selective"},
    "selective_tp2": {"dp": 2, "tp": 2, "tensor": True, "recompute": "selective"},
    "selective_tp2_sequence": {**TP2_SEQUENCE, "recompute": "selective"},
    "selective_zero3": {"dp": 4, "recompute": "selective", "zero": 3},
    "selective_microbatches2": {"dp": 4, "recompute": "selective", "microbatches": 2},
}
"""Cases for four processes, of models with layers but for `selective`."""
STRATEGIES = ("data", "sequence", "tensor", "zero", "recompute", WideBatch(), WideFfn())


@dataclass(frozen=True)
class Comparison:
    """Errors of one case (relative, the worst), and bytes of one step by (op, axes)."""

    loss: float
    gradients: dict[str, float]
    norm: float
    weights: float
    counted: dict[tuple[str, tuple[str, ...]], int]
    planned: dict[tuple[str, tuple[str, ...]], int]

    @property
    def errors(self) -> dict[str, float]:
        """Each error by part: loss, norm, weights after the steps, and every gradient by its
        parameter's name. Infinite where a number is none (max() would pass over a NaN)."""
        parts = {"loss": self.loss, "norm": self.norm, "weights": self.weights, **self.gradients}
        return {part: math.inf if math.isnan(error) else error for part, error in parts.items()}

    @property
    def worst(self) -> float:
        """The largest error of loss, gradients, norm and the weights after the steps."""
        return max(self.errors.values())


@dataclass(frozen=True)
class Edit:
    """A change of emitted source: a regular expression that occurs `times` times."""

    pattern: str
    new: str
    times: int = 1


def compiled(
    job: Job, case: str, cluster: str | dict[str, Any] = "cpu:4", **keywords: Any
) -> autopar.Compiled:
    """A job planned for four CPU processes under one of PINS (or of EIGHT, for eight)."""
    pins = {**TWO, **PINS, **EIGHT, **STAGED, **RECOMPUTE}[case]
    off = dict(OFF)
    if pins.get("tp", 1) > 1:
        off.pop("tensor")
    strategies = (*STRATEGIES, "pipeline") if case in STAGED else STRATEGIES
    return planned_as(job, cluster, strategies, {**off, **pins}, **keywords)


def planned_as(
    job: Job,
    cluster: str | dict[str, Any],
    strategies: Sequence[str | Strategy],
    pin: Mapping[str, Any],
    **keywords: Any,
) -> autopar.Compiled:
    """A job planned as the pins say, to be trained by the AdamW of these tests."""
    return autopar.compile(
        job.model,
        cluster,
        job.batch,
        loss=job.loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        clip_norm=CLIP_NORM,
        strategies=strategies,
        pin=pin,
        **keywords,
    )


def compare(model: str, case: str) -> Comparison:
    """A task for the pool: one case, on every rank."""
    with float32_raised():
        job = MODELS[model]()
        return run(job, compiled(job, case, "cpu:8" if case in EIGHT else "cpu:4"))


def edited(program: autopar.Compiled, edits: tuple[Edit, ...]) -> autopar.Compiled:
    """A program with its source changed, to see what notices. An edit that no longer matches fails:
    a fault must not get lost where the emitter changes its style."""
    source = program.source
    for edit in edits:
        source, times = re.subn(edit.pattern, edit.new, source)
        assert times == edit.times, f"{edit} matched {times} times in\n{source}"
    return replace(program, source=source)


def run(job: Job, program: autopar.Compiled) -> Comparison:
    """Runs a compiled program and the plain model; all ranks call."""
    parallel = program.materialize()
    local = parallel.shard_batch(job.batch)
    parallel.evaluate(local)  # the first call also compares peers' batches, which isn't a step's
    with CollectiveCounter(parallel.mesh) as counter:
        loss = parallel.forward_backward(local)
    gradients = parallel.full_gradients()
    with counter:
        norm = parallel.optimizer_step()
    for _ in range(STEPS - 1):
        parallel.train_step(local)
    weights = parallel.full_state_dict()
    stages = parallel.program.stages
    stage = 0 if stages is None else parallel.mesh[stages.axis].rank
    parallel.close()

    reference = job.model
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    expected = reference_loss(reference, job.batch, job.loss)
    expected.backward()
    wanted = {n: p.grad.clone() for n, p in reference.named_parameters() if p.grad is not None}
    total = torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP_NORM)
    optimizer.step()
    for _ in range(STEPS - 1):
        optimizer.zero_grad()
        reference_loss(reference, job.batch, job.loss).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP_NORM)
        optimizer.step()

    assert gradients.keys() == wanted.keys(), set(gradients) ^ set(wanted)
    floor = 1e-6 * float(total)
    errors = {
        name: float((gradients[name] - g).norm()) / max(float(g.norm()), floor)
        for name, g in wanted.items()
    }
    state = reference.state_dict()
    assert set(weights) == set(state), set(weights) ^ set(state)
    return Comparison(
        abs(float(loss) - expected.item()) / abs(expected.item()),
        errors,
        abs(float(norm) - float(total)) / float(total),
        max(_error(weights[n].double(), v.double()) for n, v in state.items()),
        dict(counter.bytes),
        planned_bytes(program.plan, stage),
    )


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm()) / max(float(wanted.norm()), 1e-6)


def planned_bytes(plan: autopar.Plan, stage: int = 0) -> dict[tuple[str, tuple[str, ...]], int]:
    """The plan's bytes of one step on a rank of one stage, by (op, axes)."""
    total: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for collective in plan.collectives:
        if collective.stage == stage:
            total[collective.op, collective.axes] += collective.bytes
    return dict(total)

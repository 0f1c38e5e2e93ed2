"""The emitted program on real processes against the plain model on one."""

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from models import MODELS, Job, float32_raised
from wide_batch import WideBatch

import autopar
from autopar.capture import reference_loss
from autopar.runtime import CollectiveCounter

CLIP_NORM = 0.05
STEPS = 3
OFF = {"tensor": False, "sequence": False, "zero": False, "wide_batch": False, "microbatches": 1}

PINS: dict[str, dict[str, Any]] = {
    "dp4": {"dp": 4},
    "dp2_tp2": {"dp": 2, "tp": 2, "tensor": True},
    "tp4": {"tp": 4, "tensor": True},
    "tp4_sequence": {"tp": 4, "tensor": True, "sequence": True},
    "dp2_tp2_sequence": {"dp": 2, "tp": 2, "tensor": True, "sequence": True},
    "zero3": {"dp": 4, "zero": 3},
    "zero3_tp2": {"dp": 2, "tp": 2, "tensor": True, "zero": 3},
    "dp4_microbatches2": {"dp": 4, "microbatches": 2},
    "wide_batch": {"dp": 2, "tp": 2, "wide_batch": True},
}
STRATEGIES = ("data", "sequence", "tensor", "zero", WideBatch())


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
    def worst(self) -> float:
        """The largest error of loss, gradients, norm and the weights after the steps."""
        return max(self.loss, self.norm, self.weights, *self.gradients.values())


def compiled(job: Job, case: str, **keywords: Any) -> autopar.Compiled:
    """A job planned for four CPU processes under one of PINS."""
    return autopar.compile(
        job.model,
        "cpu:4",
        job.batch,
        loss=job.loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        clip_norm=CLIP_NORM,
        strategies=STRATEGIES,
        pin={**OFF, **PINS[case]},
        **keywords,
    )


def compare(model: str, case: str) -> Comparison:
    """A task for the pool: one case, on every rank."""
    with float32_raised():
        job = MODELS[model]()
        return run(job, compiled(job, case))


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
        abs(float(loss) - float(expected)) / abs(float(expected)),
        errors,
        abs(float(norm) - float(total)) / float(total),
        max(float((weights[n] - v).norm()) / max(float(v.norm()), 1e-6) for n, v in state.items()),
        dict(counter.bytes),
        planned_bytes(program.plan),
    )


def planned_bytes(plan: autopar.Plan) -> dict[tuple[str, tuple[str, ...]], int]:
    """The plan's bytes of one step by (op, axes)."""
    total: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for collective in plan.collectives:
        total[collective.op, collective.axes] += collective.bytes
    return dict(total)

"""Buffers that a model changes itself: once a batch, in training alone."""

import torch
from equality import compiled, run
from models import Job
from pool import Pool
from torch import Tensor, nn

import autopar


class Counted(nn.Module):
    """A classifier that scales by, and then changes, buffers of its own."""

    steps: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x))) * (self.scale + 1.0)
        if self.training:
            self.steps += 1
            self.scale.mul_(0.5).add_(0.25)
        return y * (self.scale - 2.0)


def counted() -> Job:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 6, dtype=torch.float64), "y": torch.randint(0, 4, (8,))}
    return Job(Counted().double(), batch, _loss)


def _loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(outputs, batch["y"])


def trained() -> float:
    """A task for the pool: the worst error, buffers among the weights."""
    job = counted()
    return run(job, compiled(job, "dp4")).worst


def test_buffers_change_once_a_batch(pool4: Pool) -> None:
    assert max(pool4.run(trained)) <= 1e-9


def test_only_one_microbatch() -> None:
    job = counted()
    compiled = autopar.compile(job.model, "cpu:4", job.batch, loss=job.loss)
    assert compiled.plan.microbatches == 1
    assert any("changes a buffer, once a batch" in note for note in compiled.plan.assumptions)
    lines = compiled.source.splitlines()
    (where,) = (i for i, line in enumerate(lines) if "self.steps.add_(1)" in line)
    assert lines[where - 1].strip() == "if self.training:"

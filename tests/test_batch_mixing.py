"""Sums over the batch of what needs no gradient: over all ranks and microbatches, or refused."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import Comparison, compiled, run
from models import Job, classifier
from pool import Pool
from torch.nn import functional as F

import autopar

Loss = Callable[[Any, Any], torch.Tensor]


def masked_mean(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """A mean over the samples that a mask keeps."""
    mask: torch.Tensor = batch["mask"]
    return (outputs.pow(2).mean(1) * mask).sum() / mask.sum()


def clamped(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """The same where nothing may be kept, times a mean of inputs."""
    mask: torch.Tensor = batch["mask"]
    total = (outputs.abs().sum(1) * mask).sum()
    return total / mask.sum().clamp(min=1) * batch["x"].mean()  # type: ignore[no-any-return]


def normalised_weights(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """Each sample's weight is its share of all weights."""
    mask: torch.Tensor = batch["mask"]
    return (outputs.sum(1) * (mask / mask.sum())).sum()


def mean_squares(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """Torch's own mean loss, with a target that is broadcast."""
    return F.mse_loss(outputs, batch["mask"].unsqueeze(1).expand_as(outputs))


def plain_mean(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """A mean of everything."""
    huber = F.smooth_l1_loss(outputs, torch.zeros_like(outputs), beta=0.5)
    return huber + outputs.pow(2).mean()


def centred(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """Targets less their mean over the batch: every sample needs all others."""
    mask: torch.Tensor = batch["mask"]
    return (outputs[:, 0] - (mask - mask.mean(0))).pow(2).mean()


def job(loss: Loss) -> Job:
    """The classifier with a mask that keeps unequally many samples of each rank."""
    plain = classifier()
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 3, 1], dtype=torch.float64)
    return dataclasses.replace(plain, batch={**plain.batch, "mask": mask}, loss=loss)


def compare(loss: Loss, case: str) -> Comparison:
    """A task for the pool."""
    one = job(loss)
    return run(one, compiled(one, case))


@pytest.mark.parametrize("case", ["dp4", "dp2_tp2", "dp4_microbatches2"])
@pytest.mark.parametrize(
    "loss", [masked_mean, clamped, normalised_weights, mean_squares, plain_mean]
)
def test_sums_are_global(pool4: Pool, loss: Loss, case: str) -> None:
    for comparison in pool4.run(compare, loss, case):
        assert comparison.worst <= 1e-9, comparison
        assert comparison.counted == comparison.planned


@pytest.mark.parametrize("case", ["dp4", "dp4_microbatches2"])
def test_what_mixes_samples_is_refused(case: str) -> None:
    """By name, where the batch would be split; without a split it runs."""
    with pytest.raises(autopar.AutoparError, match=r"mean \(mean\) mixes the samples"):
        compiled(job(centred), case)
    compiled(job(centred), "tp4")

"""Plain values in a batch, and batches of another structure than the one compiled."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar


class Scaled(nn.Module):
    """A linear, times a number of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        """A number."""
        result: Tensor = (self.linear(x) * scale).mean()
        return result


def program(batch: Any) -> autopar.TrainingModule:
    torch.manual_seed(0)
    return autopar.compile(Scaled(), "cpu:1", batch).materialize()


def test_another_number_is_an_error() -> None:
    x = torch.randn(4, 4)
    parallel = program({"x": x, "scale": 2.0, "mask": None})
    loss = float(parallel.forward_backward({"x": x, "scale": 2.0}))
    assert loss == pytest.approx(float(parallel.evaluate({"x": x, "scale": 2.0, "mask": None})))
    for other in ({"x": x, "scale": 3.0}, {"x": x}, {"x": x, "scale": 2.0, "more": 1}):
        with pytest.raises(autopar.AutoparError, match=r"compiled with \{'scale': 2\.0\}"):
            parallel.train_step(other)


def test_a_tuple_is_no_dict() -> None:
    x = torch.randn(4, 4)
    parallel = program({"x": x})
    for other in ((x,), [x], x):
        with pytest.raises(autopar.AutoparError, match="Pass the same structure"):
            parallel.train_step(other)
    with pytest.raises(autopar.AutoparError, match="Pass the same structure"):
        program((x,)).train_step({"x": x})


def test_what_no_program_can_hold_is_an_error() -> None:
    with pytest.raises(autopar.AutoparError, match="the batch's scale is a complex"):
        program({"x": torch.randn(4, 4), "scale": 1j})


def test_eval_mode_is_noted() -> None:
    compiled = autopar.compile(Scaled().eval(), "cpu:1", {"x": torch.randn(4, 4)})
    assert any("training mode is compiled" in text for text in compiled.plan.assumptions)

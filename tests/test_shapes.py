"""The shapes that ops tell the cost models, whole and split."""

import math

import pytest
import torch
from test_planning import RATIO, Case, cases
from torch import nn

from autopar.capture import capture
from autopar.graph.analyse import analyse
from autopar.layouts.effects import compute_effects
from autopar.layouts.layout import Setting
from autopar.mesh import Mesh
from autopar.planning.program_effects import program_effects
from autopar.plugin import Compute


def products(case: Case, choices: tuple[int, ...]) -> list[Compute]:
    effects = program_effects(case.program(choices), RATIO)
    return [e for _, e in effects if isinstance(e, Compute) and e.flops and e.phase == "forward"]


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_flops_are_the_shape_s(model: str) -> None:
    """However a program is split."""
    seen = set()
    for case in cases(model).values():
        for choices in list(case.random_choices(3)):
            for effect in products(case, choices):
                seen.add(effect.op)
                if effect.op == "attention":
                    heads, queries, keys, inner, outer = effect.shape
                    assert effect.flops == 2 * heads * queries * keys * (inner + outer)
                    assert effect.skipped == 0.5
                else:
                    assert effect.flops == 2 * math.prod(effect.shape)
                    assert effect.skipped == 0.0
    assert seen == {"matmul", "attention"}


class Several(nn.Module):
    """A product of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.linear = nn.Linear(6, 5)
        self.mix = nn.Parameter(torch.empty(5, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pixels = self.linear(self.conv(x).flatten(2).transpose(1, 2))  # [batch, 64, 5]
        scores = pixels @ pixels.transpose(1, 2)
        result: torch.Tensor = ((scores @ pixels) @ self.mix).square().sum()
        return result


def test_kinds_of_products() -> None:
    with torch.device("meta"):
        model, x = Several(), torch.empty(2, 3, 8, 8)
    graph = analyse(capture(model, {"x": x}, lambda outputs, batch: outputs))
    setting = Setting(Mesh((("dp", 1),)), (), 1)
    found = [
        effect.shape
        for _, block in graph.instances()
        for op in block.ops.values()
        if op.node.name in block.values
        for effect in compute_effects(block, op, None, setting)
        if effect.flops and effect.phase == "forward"
    ]
    assert found == [
        (1, 2 * 64, 6, 3 * 9),
        (1, 2 * 64, 5, 6),
        (2, 64, 64, 5),
        (2, 64, 5, 64),
        (1, 2 * 64, 7, 5),
    ]

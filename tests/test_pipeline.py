"""The executor of schedules on four processes against a plain model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool, PoolError
from test_schedules import MAKERS
from torch import Tensor, nn

from autopar.runtime.pipeline import Part, Pipeline, Wire
from autopar.runtime.process_mesh import ProcessMesh
from autopar.runtime.split_backward import Later
from autopar.schedule import Table

HIDDEN, SAMPLES = 5, 3
TOLERANCE = 1e-9


class Layer(nn.Module):
    """Uses what the layer before made, and what the first part made of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.inner = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.outer = nn.Linear(2 * HIDDEN, HIDDEN)
        self.scale = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        outer: Tensor = self.outer(F.silu(self.inner(self.norm(x))))
        return x + outer * mask + memory * self.scale.sin()


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.memory = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.apart = nn.Parameter(torch.randn(HIDDEN))

    def begin(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.first(x), self.memory(x), (x > 0).to(x.dtype)

    def end(self, x: Tensor) -> Tensor:
        return (x.square() * self.apart.exp()).sum() + self.apart.sum()


def plain(model: Model, batches: list[Tensor]) -> float:
    """Loss and gradients on one device."""
    total = 0.0
    for x in batches:
        h, memory, mask = model.begin(x)
        for layer in model.layers:
            h = layer(h, memory, mask)
        loss = model.end(h)
        loss.backward()
        total += loss.item()
    return total


def parts_of(model: Model, cuts: list[int], batches: list[Tensor], mine: range) -> dict[int, Part]:
    """Part p runs layers cuts[p] to cuts[p + 1]."""
    count = len(cuts) - 1

    def make(p: int) -> Part:
        layers = model.layers[cuts[p] : cuts[p + 1]]
        own: list[nn.Module] = [*layers]
        own += [model.first, model.memory] if p == 0 else []

        def run(microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            h, memory, mask = received or model.begin(batches[microbatch])
            for layer in layers:
                h = layer(h, memory, mask)
            return (model.end(h),) if p == count - 1 else (h, memory, mask)

        weights = [w for module in own for w in module.parameters()]
        return Part(run, (*weights, *([model.apart] if p == count - 1 else [])))

    return {p: make(p) for p in mine}


WIRES = (
    Wire((SAMPLES, HIDDEN), torch.float64, True),
    Wire((SAMPLES, HIDDEN), torch.float64, True),
    Wire((SAMPLES, HIDDEN), torch.float64, False),
)


def compare(table: Table, cuts: list[int]) -> float:
    """A task for the pool: the worst relative error of the loss and this rank's gradients."""
    torch.manual_seed(0)
    model, reference = Model(cuts[-1]).double(), Model(cuts[-1]).double()
    reference.load_state_dict(model.state_dict())
    batches = [torch.randn(SAMPLES, HIDDEN).double() for _ in range(table.microbatches)]
    wanted = plain(reference, batches)
    mesh = ProcessMesh((("pp", table.stages), ("dp", 4 // table.stages)))
    group = mesh["pp"]
    loss = Wire((), torch.float64, True)
    pipeline = Pipeline(table, (*(WIRES,) * (table.parts - 1), (loss,)), group)
    parts = parts_of(model, cuts, batches, range(group.rank, table.parts, table.stages))
    before = pipeline.forward(parts, mesh.device)
    total = pipeline.step(parts, mesh.device)
    mesh.close()
    last = (table.parts - 1) % table.stages == group.rank
    assert float(before) == float(total) == pytest.approx(wanted if last else 0.0)
    worst = 0.0
    plainly = dict(reference.named_parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    for part in parts.values():
        for weight in part.weights:
            grad, right = weight.grad, plainly[names[id(weight)]].grad
            assert right is not None
            if grad is None:
                return float("inf")
            worst = max(worst, float((grad - right).norm() / right.norm()))
    return worst


def cuts_of(parts: int) -> list[int]:
    """Uneven: 1, 2, 1, 2 … layers."""
    cuts = [0]
    for part in range(parts):
        cuts.append(cuts[-1] + 1 + part % 2)
    return cuts


@pytest.mark.parametrize("name", MAKERS)
def test_gradients(pool4: Pool, name: str) -> None:
    """Two and four stages; fewer and more microbatches, also unevenly many."""
    for stages, microbatches in ((2, 1), (2, 5), (4, 3), (4, 9)):
        table = MAKERS[name](stages, microbatches)
        errors: list[Any] = pool4.run(compare, table, cuts_of(table.parts))
        assert max(errors) <= TOLERANCE, (stages, microbatches, errors)


def test_a_table_without_its_last_action_is_noticed(pool4: Pool) -> None:
    table = MAKERS["zero_bubble"](4, 6)
    short = replace(table, orders=(*table.orders[:3], table.orders[3][:-1]))
    with pytest.raises(PoolError, match="leaves something undone"):
        pool4.run(compare, short, cuts_of(4))


def test_weights_gradients_that_are_left_out_turn_red(pool4: Pool) -> None:
    errors: list[Any] = pool4.run(compare_without_one_half, MAKERS["zero_bubble"](4, 3))
    assert max(errors) > 1e-3


def compare_without_one_half(table: Table) -> float:
    """A task for the pool: the last stage forgets the weights' half of one backward."""
    whole, left = Later.run, [1]

    def run(self: Later) -> None:
        if left:
            left.pop()
        else:
            whole(self)

    Later.run = run  # type: ignore[method-assign]
    try:
        return compare(table, cuts_of(table.parts))
    finally:
        Later.run = whole  # type: ignore[method-assign]

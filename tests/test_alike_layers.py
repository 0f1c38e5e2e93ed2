"""Layers that differ in sizes alone are traced without torch.export, and as by it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES
from models import Job
from torch import Tensor, nn

from autopar.capture import Capture, alike, capture, program
from autopar.capture.unique import structural_hash


class Layer(nn.Module):
    """A residual MLP that does something else where it is wide."""

    def __init__(self, features: int, inner: int, scale: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, inner), nn.Linear(inner, features)
        self.heads, self.scale = inner // 8, scale

    def forward(self, x: Tensor) -> Tensor:
        """[batch, features], in and out."""
        y = self.up(x).view(x.shape[0], self.heads, 8).softmax(-1).flatten(1)
        if self.heads > 4:
            y = y * self.scale
        z: Tensor = x + self.down(y)
        return z


class Widths(nn.Module):
    """Layers of these widths."""

    def __init__(self, widths: tuple[int, ...], scale: float = 0.5) -> None:
        super().__init__()
        scales = [scale * (1 + (width == 64)) for width in widths]
        self.layers = nn.ModuleList(
            [Layer(16, width, own) for width, own in zip(widths, scales, strict=True)]
        )

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def widths(*sizes: int) -> Callable[[], Job]:
    """A job of layers of these widths."""
    return lambda: Job(Widths(sizes), {"x": torch.randn(4, 16)}, None)


def counted(job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[Capture, list[bool]]:
    """What is captured, and for each layer after its kind's first whether it was traced so."""
    seen: list[bool] = []
    original = alike.traced_as

    def traced(*given: Any) -> Any:
        found = original(*given)
        seen.append(found is not None)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(program, "traced_as", traced)
        return capture(job.model, job.batch, job.loss), seen


def exported(job: Job, monkeypatch: pytest.MonkeyPatch) -> Capture:
    """What is captured by torch.export alone."""
    with monkeypatch.context() as patch:
        patch.setattr(program, "traced_as", lambda *_: None)
        return capture(job.model, job.batch, job.loss)


def nodes(found: Capture) -> list[list[tuple[Any, ...]]]:
    """All that later stages read of the layers' nodes."""

    def described(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.shape, value.stride(), value.dtype, value.requires_grad, type(value)
        return list(map(described, value)) if isinstance(value, (tuple, list)) else value

    return [
        [
            (n.name, n.meta.get("nn_module_stack"), n.stack_trace, described(n.meta.get("val")))
            for n in block.graph.nodes
        ]
        for block in found.blocks
    ]


CASES = {
    "widths": (widths(8, 16, 24, 32), [True, True]),
    "another branch": (widths(8, 16, 24, 40, 48), [True, False, True]),
    "another number": (widths(8, 48, 56, 64), [True, False]),
    **{name: (FAMILIES[name].tiny, None) for name in ("gpt2", "bert", "clip", "unet", "t5")},
}


@pytest.mark.parametrize("name", CASES)
def test_as_torch_export(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, expected = CASES[name]
    torch.manual_seed(0)
    found, seen = counted(make(), monkeypatch)
    torch.manual_seed(0)
    wanted = exported(make(), monkeypatch)
    assert expected is None or seen == expected
    assert [structural_hash(b) for b in found.blocks] == [structural_hash(b) for b in wanted.blocks]
    assert nodes(found) == nodes(wanted)
    assert found.layers == wanted.layers and found.notes == wanted.notes
    for one, other in zip(found.blocks, wanted.blocks, strict=True):
        assert (one.name, one.params, one.buffers) == (other.name, other.params, other.buffers)
        assert one.inputs == other.inputs


class Numbered(nn.Module):
    """A layer that numbers what it has, as layers of experts do with tokens."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, inner)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, features], in and out."""
        numbers = torch.arange(x.numel(), device=x.device).view(x.shape)
        y: Tensor = x + self.up(x).sum(-1, keepdim=True) * numbers.remainder(2)
        return y


def test_what_a_layer_makes_itself_is_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 2 ** 40 values has no place in memory."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Numbered(inner) for inner in (16, 24, 32)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    with torch.device("meta"):
        job = Job(Model(), {"x": torch.empty(2**20, 2**17, 8)}, None)
    _, seen = counted(job, monkeypatch)
    assert seen and all(seen)

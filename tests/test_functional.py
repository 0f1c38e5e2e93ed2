"""Writes in place: captured graphs have none, and compute what the model computes."""

import pytest
import torch
from captured import Mixer, Stack, check_same, cross_entropy, vectors
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.functional import mutates
from autopar.errors import AutoparError


class Writes(Mixer):
    """A mixer whose features are put together in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        whole: Tensor = self.write(y)
        return whole

    def write(self, y: Tensor) -> Tensor:
        """What the subclass does with `y` [4, 8]."""
        raise NotImplementedError


class Slices(Writes):
    def write(self, y: Tensor) -> Tensor:
        z = y.new_empty(4, 8)
        z[:, :3] = y[:, 5:]
        z[:, 3:] = y[:, :5]
        return z


class Select(Writes):
    def write(self, y: Tensor) -> Tensor:
        z = torch.zeros_like(y)
        z[..., 1:] = y[..., :-1].clone()
        z[..., 0] = 2.0
        z[:, 4] += y[:, 0]
        return z


class Views(Writes):
    def write(self, y: Tensor) -> Tensor:
        z = y * 2
        pairs = z.view(4, 4, 2).transpose(1, 2)
        before = pairs.sum()
        pairs[:, 0].mul_(3.0)
        z.sub_(1.0)
        return z + pairs.reshape(4, 8) * before


class Masked(Writes):
    def write(self, y: Tensor) -> Tensor:
        z = y.clone()
        z.masked_fill_(y > 0, 0.5)
        z.unsqueeze(1)[:, 0, 2:4].fill_(1.5)
        return z.clamp_(max=4.0)


class Argument(Writes):
    def forward(self, x: Tensor) -> Tensor:
        x += self.linear.bias  # the caller's tensor
        return super(Writes, self).forward(x)


@pytest.mark.parametrize("kind", [Slices, Select, Views, Masked])
def test_writes_become_new_tensors(kind: type[nn.Module]) -> None:
    captured = check_same(Stack(kind(), kind()), vectors(), cross_entropy)
    for block in captured.blocks:
        assert not any(mutates(node) for node in block.graph.nodes if node.op == "call_function")


def test_a_layer_that_writes_to_its_argument() -> None:
    class Again(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            for block in self.blocks:
                x = x + block(x)  # what the block wrote is read again
            result: Tensor = self.head(x)
            return result

    captured = check_same(Again(Argument(), Argument()), vectors(), cross_entropy)
    assert any("stay inline" in note for note in captured.notes)


def test_a_strided_write_is_refused_with_its_line() -> None:
    class Strided(Writes):
        def write(self, y: Tensor) -> Tensor:
            z = y.clone()
            z[:, ::2] = 0.0
            return z

    with pytest.raises(
        AutoparError, match=r"2-th element is written to in place at .*test_functional.py"
    ):
        capture(Stack(Strided(), Strided()), vectors(), cross_entropy)


def test_memory_shared_with_another_output_is_refused() -> None:
    class Chunks(Writes):
        def write(self, y: Tensor) -> Tensor:
            z = y.clone()
            a, _ = torch.split(z, 4, 1)
            a.mul_(2.0)
            return z

    with pytest.raises(AutoparError):
        capture(Stack(Chunks(), Chunks()), vectors(), cross_entropy)

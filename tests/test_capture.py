"""The captured graphs compute exactly what the model does."""

from collections.abc import Iterator

import pytest
import torch
from captured import (
    SDPA,
    Gated,
    Mixer,
    Stack,
    check_same,
    cross_entropy,
    gpt2,
    llama,
    tokens,
    vectors,
)
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ---------------------------------------------------------------- equality


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gpt2(dropout: float) -> None:
    captured = check_same(gpt2(dropout), tokens())
    assert [layer.path for layer in captured.layers] == [f"transformer.h.{i}" for i in range(3)]
    (block,) = captured.blocks
    assert [(i.node, i.requires_grad) for i in block.inputs] == [("hidden_states", True)]
    assert block.params["p_attn_c_attn_weight"] == "attn.c_attn.weight"
    (attention,) = (node for node in block.graph.nodes if node.target is SDPA)
    assert attention.args[3:] == (None, dropout, True)
    assert any("is_causal" in note for note in captured.notes)
    tied = captured.params[0]
    assert tied.names == ("transformer.wte.weight", "lm_head.weight")
    assert sum(name in tied.names for name in captured.skeleton.params.values()) == 1


def test_llama() -> None:
    captured = check_same(llama(), tokens())
    assert len(captured.blocks) == 1 and len(captured.layers) == 3
    inputs = [(i.node, i.requires_grad) for i in captured.blocks[0].inputs]
    assert inputs[0] == ("hidden_states", True)
    assert inputs[1:] == [("position_embeddings_0", False), ("position_embeddings_1", False)]
    assert captured.buffers["model.rotary_emb.inv_freq"].numel() == 4


def test_sequential_has_no_blocks() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))
    batch = (vectors()["x"], vectors()["y"])
    captured = check_same(model, batch, cross_entropy)
    assert captured.blocks == () and captured.layers == ()
    assert captured.batch_leaves == ("batch_0", "batch_1")
    assert set(captured.skeleton.params.values()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    targets = {str(node.target) for node in captured.skeleton.graph.nodes}
    assert "aten.relu.default" in targets


def test_two_kinds_of_blocks() -> None:
    model = Stack(Mixer(), Gated(), Mixer(), Gated(), Mixer(2.0))
    captured = check_same(model, vectors(), cross_entropy)
    # The first gets an input without a gradient, the last another scale.
    assert [layer.block for layer in captured.layers] == [0, 1, 2, 1, 3]
    assert [b.name for b in captured.blocks] == ["Mixer", "Gated", "Mixer_2", "Mixer_3"]
    (output,) = (node for node in captured.blocks[1].graph.nodes if node.op == "output")
    assert len(output.args[0]) == 1  # the sum that nobody reads is gone


def test_batch_norm_updates_its_buffers() -> None:
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(8 * 36, 4))
    check_same(model, (torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))), cross_entropy)
    assert dict(model.named_buffers())["1.num_batches_tracked"] == 1


class Indexed(Mixer):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx = index

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.layer_idx)


class Detached(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = self.norm(x) * 2
        result: Tensor = self.linear(x) + frozen
        return result


class InPlace(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h.mul_(2.0)
        view = h.view(2, -1)
        view.add_(3.0)  # h sees this
        x = self.norm(x)
        x += 1.0
        result: Tensor = h + x
        return result


def test_layers_that_use_their_index_are_not_merged() -> None:
    captured = check_same(Stack(*map(Indexed, range(3))), vectors(), cross_entropy)
    assert [layer.block for layer in captured.layers] == [0, 1, 2]


def test_no_grad_regions_are_detached() -> None:
    captured = check_same(Stack(Detached(), Detached()), vectors(), cross_entropy)
    assert any("4 trainable parameters get no gradient" in note for note in captured.notes)


def test_in_place_operations() -> None:
    captured = check_same(Stack(InPlace(), InPlace()), vectors(), cross_entropy)
    targets = [str(node.target) for node in captured.blocks[0].graph.nodes]
    assert "aten.add.Tensor" in targets  # nobody else sees x
    assert "aten.add_.Tensor" not in targets  # h, which is seen through its view, is made anew


def test_frozen_layers_are_blocks_of_their_own() -> None:
    model = Stack(Mixer(), Mixer(), Mixer(), Mixer())
    model.blocks[0].requires_grad_(False)
    captured = check_same(model, vectors(), cross_entropy)
    assert [layer.block for layer in captured.layers] == [0, 1, 2, 2]
    assert [block.inputs[0].requires_grad for block in captured.blocks] == [False, False, True]
    frozen = {p.names[0] for p in captured.params if not p.trainable}
    assert frozen == {f"blocks.0.{n}" for n in dict(model.blocks[0].named_parameters())}


# ---------------------------------------------------------------- layers that stay inline


def test_shared_parameters_stay_inline() -> None:
    model = Stack(Mixer(), Mixer(), Mixer())
    first, second = model.blocks[0], model.blocks[1]
    assert isinstance(first, Mixer) and isinstance(second, Mixer)
    second.linear.weight = first.linear.weight
    captured = check_same(model, vectors(), cross_entropy)
    assert [layer.path for layer in captured.layers] == ["blocks.2"]
    assert any("blocks.0 stays inline: it shares parameters" in note for note in captured.notes)


class Outside(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, Mixer)
            x = block.linear(x)
        result: Tensor = self.head(x)
        return result


class Twice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.blocks[0](x))


@pytest.mark.parametrize(
    ("kind", "reason"), [(Outside, "uses its linear from outside"), (Twice, "more than once")]
)
def test_layers_that_are_not_just_called_once(kind: type[Stack], reason: str) -> None:
    captured = check_same(kind(Mixer(), Mixer()), vectors(), cross_entropy)
    assert captured.layers == ()
    assert any(reason in note for note in captured.notes)

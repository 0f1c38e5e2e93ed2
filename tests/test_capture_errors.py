"""What a capture leaves alone, the metadata it carries, and its errors."""

import pytest
import torch
from captured import Mixer, Stack, cross_entropy, gpt2, llama, tokens, vectors
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture import capture, reference_loss
from autopar.errors import AutoparError

# ---------------------------------------------------------------- the model is left alone


def test_meta_model_of_any_size() -> None:
    with torch.device("meta"):
        model = llama(hidden_size=65536, intermediate_size=262144, num_hidden_layers=126)
        batch = tokens(512, 64, "meta")
    captured = capture(model, batch, None)
    assert len(captured.layers) == 126 and len(captured.blocks) == 1
    assert all(p.is_meta for p in model.parameters())
    assert len(captured.skeleton.graph.nodes) < 400


def test_the_model_is_as_before() -> None:
    model = gpt2()
    model.train()
    model.transformer.h[1].eval()
    batch = tokens()
    before = {
        "parameters": {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)},
        "modules": {n: id(m) for n, m in model.named_modules()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "forwards": {n: "forward" in vars(m) for n, m in model.named_modules()},
    }
    weight, ids = model.lm_head.weight.clone(), batch["input_ids"].clone()
    state = torch.get_rng_state()
    model.config.use_cache = True
    capture(model, batch, None)
    assert before == {
        "parameters": {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)},
        "modules": {n: id(m) for n, m in model.named_modules()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "forwards": {n: "forward" in vars(m) for n, m in model.named_modules()},
    }
    assert model.config.use_cache is True
    assert torch.equal(model.lm_head.weight, weight) and torch.equal(batch["input_ids"], ids)
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------- metadata and errors


def test_every_node_has_metadata() -> None:
    captured = capture(gpt2(), tokens(), None)
    for graph in (captured.skeleton.graph, captured.blocks[0].graph):
        for node in graph.nodes:
            if node.op != "output":
                values = pytree.tree_leaves(node.meta["val"])
                assert values and all(v.device.type == "cpu" for v in values), node
    stacks = {n.name: n.meta["nn_module_stack"] for n in captured.blocks[0].graph.nodes if n.args}
    assert list(stacks["addmm"]) == ["", "attn", "attn.c_attn"]


class Narrow(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x[:, :3])
        return result


@pytest.mark.parametrize(
    ("layer", "where", "line", "message"),
    [
        (Narrow, r"blocks\.1\.linear \(Linear\)", r"self\.linear\(x\[:, :3\]\)", "reduction dim"),
    ],
)
def test_errors_name_layer_and_line(
    layer: type[nn.Module], where: str, line: str, message: str
) -> None:
    model = Stack(Mixer(), layer())
    pattern = rf"can't capture {where} at .*test_capture_errors\.py:\d+: .*{line}\n.*{message}"
    with pytest.raises(AutoparError, match=pattern):
        capture(model, vectors(), cross_entropy)
    assert type(model.blocks[1]) is layer and not model.head.weight.is_meta


def test_errors_of_the_skeleton() -> None:
    class Reads(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[: int(x.max())])

    with pytest.raises(AutoparError, match=r"can't capture the model \(Reads\) at .*int\(x\.max"):
        capture(Reads(Mixer()), vectors(), cross_entropy)


def test_errors_about_the_loss() -> None:
    model = Stack(Mixer(), Mixer())
    with pytest.raises(AutoparError, match="pass loss="):
        capture(model, {"x": torch.randn(4, 8)}, None)
    with pytest.raises(AutoparError, match=r"0-d tensor, got shape \(4, 4\)"):
        capture(model, vectors(), lambda outputs, batch: outputs)
    with pytest.raises(AutoparError, match="no trainable parameter"):
        capture(model.requires_grad_(False), vectors(), cross_entropy)


def test_ambiguous_tuple_batches() -> None:
    class Optional(Stack):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x)

    batch = (torch.randn(4, 8), torch.randint(0, 4, (4,)))
    with pytest.raises(AutoparError, match=r"ambiguous.*optionally mask"):
        reference_loss(Optional(Mixer()), batch, cross_entropy)
    reference_loss(Optional(Mixer()), dict(zip("xy", batch, strict=True)), cross_entropy)

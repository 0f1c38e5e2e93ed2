"""Running captured graphs, and small models to capture."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.capture import Capture, CapturedGraph, capture, reference_loss
from autopar.capture.gradients import is_layer

SDPA = torch.ops.aten.scaled_dot_product_attention.default


# ---------------------------------------------------------------- running what was captured


def run_graph(
    captured: CapturedGraph,
    tensors: Mapping[str, Tensor],
    inputs: list[Tensor],
    prefix: str = "",
    layer: Callable[[list[Tensor], str], list[Tensor]] | None = None,
) -> list[Tensor]:
    """Interpret a graph with the model's tensors bound by name."""
    named = {i.node: value for i, value in zip(captured.inputs, inputs, strict=True)}
    named |= {n: tensors[prefix + own] for n, own in captured.params.items()}
    named |= {n: tensors[prefix + own] for n, own in captured.buffers.items()}
    named |= captured.constants
    env: dict[Node, Any] = {}
    for node in captured.graph.nodes:
        args, kwargs = (torch.fx.map_arg(a, env.__getitem__) for a in (node.args, node.kwargs))
        if node.op == "placeholder":
            env[node] = named[node.name]
        elif node.op == "output":
            return list(args[0])
        elif is_layer(node):  # the op exists only once a layer was called
            assert layer is not None and len(args) == 2
            env[node] = layer(*args)
        else:
            env[node] = node.target(*args, **kwargs)
    raise AssertionError("no output")


def run(captured: Capture, model: nn.Module, batch: Any) -> Tensor:
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    blocks = {layer.path: captured.blocks[layer.block] for layer in captured.layers}

    def layer(inputs: list[Tensor], path: str) -> list[Tensor]:
        return run_graph(blocks[path], tensors, inputs, f"{path}.")

    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    (loss,) = run_graph(captured.skeleton, tensors, leaves, layer=layer)
    return loss


def check_same(model: nn.Module, batch: Any, loss: Any = None) -> Capture:
    """Capture, run both, compare loss, gradients and buffers."""
    captured = capture(model, batch, loss)
    model.train()
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = reference_loss(model, batch, loss)
    expected.backward()
    torch.manual_seed(1)
    actual = run(captured, other, batch)
    actual.backward()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-12, msg=name)
    for before, after in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=1e-12)
    return captured


# ---------------------------------------------------------------- models


def gpt2(dropout: float = 0.0, **changes: Any) -> GPT2LMHeadModel:
    sizes = dict(vocab_size=256, n_positions=32, n_embd=32, n_layer=3, n_head=4)
    rates = dict(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    return GPT2LMHeadModel(
        GPT2Config(bos_token_id=0, eos_token_id=0, **{**sizes, **rates, **changes})
    )


def llama(**changes: Any) -> LlamaForCausalLM:
    sizes = dict(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def tokens(b: int = 2, s: int = 16, device: str = "cpu") -> dict[str, Tensor]:
    ids = torch.randint(0, 256, (b, s), device=device)
    return {"input_ids": ids, "labels": ids.clone()}


def cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch["y"] if isinstance(batch, dict) else batch[1])


def vectors() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8), "y": torch.randint(0, 4, (4,))}


class Mixer(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.linear, self.scale = nn.LayerNorm(8), nn.Linear(8, 8), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * F.gelu(self.linear(self.norm(x)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, residual: Tensor) -> dict[str, Any]:
        return {"x": residual + self.up(x) * self.gate(x).sigmoid(), "unused": x.sum(), "n": 1}


class Stack(nn.Module):
    """Blocks of one or two kinds, then a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, residual=x)["x"] if isinstance(block, Gated) else block(x)
        result: Tensor = self.head(x)
        return result

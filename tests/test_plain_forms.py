"""Rewritten graphs compute what the captured ones do."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.graph.normalise import normalise
from autopar.graph.ops import op_name

IDS = torch.tensor([[3, 0, 1, 2], [1, 5, 2, 0]])


def _rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": lambda x: F.glu(x, 1),
    "baddbmm": lambda x: torch.baddbmm(x[:, :, :4], x, x.transpose(1, 2), beta=0.5, alpha=2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.unsqueeze(-1), 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.unsqueeze(1), 2),
    "narrow": lambda x: x.narrow(1, -2, 2),
    "reshape_as": lambda x: x.reshape_as(x.flatten(1)),
    "broadcast_to": lambda x: x * x[:, :1, :1].broadcast_to(2, 4, 6),
    "meshgrid": lambda x: torch.stack(torch.meshgrid(x[0, 0], x[1, :, 2], indexing="ij")),
    "meshgrid of x and y": lambda x: torch.stack(torch.meshgrid(x[0, 0], x[1, 0], indexing="xy")),
    "outer": lambda x: torch.outer(x[0, 0], x[1, 1]),
    "operators": lambda x: x * ((x > 0.2) & (x < 0.8) | (x > 0.9) ^ (x > 0.5)).type_as(x),
    "weight norm": lambda x: torch._weight_norm(x, x[:, :1, :1], 0),
    "argmax index": lambda x: x[_rows(x), IDS.argmax(-1)],
    "negative index": lambda x: x[_rows(x), IDS[:, 0] - 4],
    "index of all rows": lambda x: x[_rows(x)[:, None, None], torch.arange(4)[None, None, :]],
    "index in the middle": lambda x: x[_rows(x)[:, None], IDS % 4],
}  # fmt: skip


class Squares(nn.Module):
    """The sum of squares of a function of weighted inputs."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """[2, 4, 6] → 0-d."""
        return (self.function(x * self.weight) ** 2).sum()


@pytest.mark.parametrize("form", FORMS)
def test_a_rewritten_graph_computes_the_same(form: str) -> None:
    """The loss and the weight's gradient, exactly where nothing is added up in another order."""
    model = Squares(FORMS[form])
    x = torch.rand(2, 4, 6, dtype=torch.float64)
    captured = capture(model, {"x": x}).skeleton
    graph, _ = normalise(captured.graph)
    values = {**captured.constants, captured.inputs[0].node: x}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    args = [values.get(n.name, model.weight) for n in placeholders]
    (ours,) = torch.fx.Interpreter(nn.Module(), graph=graph).run(*args)
    wanted = model(x)
    torch.testing.assert_close(ours, wanted)
    (gradient,) = torch.autograd.grad(ours, model.weight)
    (expected,) = torch.autograd.grad(wanted, model.weight)
    torch.testing.assert_close(gradient, expected)
    if form.endswith("index"):
        assert "index" not in {op_name(n) for n in graph.nodes if n.op == "call_function"}


class Shared(nn.Module):
    """Attention in which two queries share a head of keys, as Hugging Face repeats them."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.weight = nn.Parameter(torch.rand(8, dtype=torch.float64))

    def forward(self, x: Tensor, hide: Tensor) -> Tensor:
        """[2, 3, 4, 8], [2, 1, 1, 3] → 0-d."""
        q = (x * self.weight).transpose(1, 2)
        keys, values = q[:, :2], q[:, 2:]
        k, v = (y.unsqueeze(2).expand(2, 2, 2, 3, 8).reshape(2, 4, 3, 8) for y in (keys, values))
        mask = None if self.causal else hide > 0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return (out**2).sum()


@pytest.mark.parametrize("causal", [True, False])
def test_keys_that_queries_share_are_taken_once(causal: bool) -> None:
    """But where a mask hides some: fused kernels that take masks share none."""
    torch.manual_seed(0)
    model = Shared(causal)
    batch = {
        "x": torch.rand(2, 3, 4, 8, dtype=torch.float64),
        "hide": torch.ones(2, 1, 1, 3, dtype=torch.float64),
    }
    captured = capture(model, batch).skeleton
    graph, _ = normalise(captured.graph)
    values = dict(captured.constants)
    values |= {i.node: batch["hide" if "hide" in i.node else "x"] for i in captured.inputs}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    args = [values.get(n.name, model.weight) for n in placeholders]
    (ours,) = torch.fx.Interpreter(nn.Module(), graph=graph).run(*args)
    torch.testing.assert_close(ours, model(**batch))
    (attention,) = [n for n in graph.nodes if op_name_of(n) == "scaled_dot_product_attention"]
    heads = attention.args[1].meta["val"].shape[1]
    assert heads == (2 if causal else 4)


def op_name_of(node: torch.fx.Node) -> str:
    return op_name(node) if node.op == "call_function" else ""

"""Figures of a model against closed forms, and `autopar inspect`."""

import pytest
import torch
from families import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.cli import main
from autopar.inspection import BlockFigures, figures

SAMPLES, LENGTH, HIDDEN, HEADS = 4, 128, 64, 4
"""b, s, h, a of Korthikanti et al. 2022."""


class Attention(nn.Module):
    """Attention by a fused kernel, or by products of matrices."""

    def __init__(self, fused: bool, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.fused, self.causal = fused, causal

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        parts = self.qkv(x).split(h, -1)
        q, k, v = (p.view(b, s, HEADS, h // HEADS).transpose(1, 2) for p in parts)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=self.causal)
        else:
            scores = (q @ k.transpose(-2, -1)) * (h // HEADS) ** -0.5
            y = F.dropout(scores.softmax(-1), 0.1) @ v
        result: Tensor = self.out(y.transpose(1, 2).reshape(b, s, h))
        return result


class Layer(nn.Module):
    """A GPT block with a fused GELU and dropout 0.1."""

    def __init__(self, fused: bool, causal: bool = False) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention(fused, causal)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.ln_1(x)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln_2(x)))), 0.1)


class Model(nn.Module):
    """Two such blocks behind a table, before a head."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(32, HIDDEN)
        self.layers = nn.ModuleList(Layer(fused) for _ in range(2))
        self.head = nn.Linear(HIDDEN, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x)
        return scores


def token_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def block_figures(fused: bool) -> BlockFigures:
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    model = Model(fused).to(torch.bfloat16)
    found = figures(autopar.inspect(model, {"ids": ids, "labels": ids}, token_loss))
    (layer,) = (b for b in found.blocks if b.name == "Layer")
    assert layer.count == 2
    return layer


@pytest.mark.parametrize("fused", [False, True])
def test_flops_of_a_block(fused: bool) -> None:
    b, s, h = SAMPLES, LENGTH, HIDDEN
    expected = 24 * b * s * h**2 + 4 * b * s**2 * h  # Narayanan et al. 2021, equation 2, forward
    layer = block_figures(fused)
    assert sum(r.forward_flops for r in layer.regions) == expected
    assert sum(r.backward_flops for r in layer.regions) == 2 * expected


@pytest.mark.parametrize("fused", [False, True])
def test_saved_bytes_of_a_block(fused: bool) -> None:
    sbh, as2b = SAMPLES * LENGTH * HIDDEN, HEADS * LENGTH**2 * SAMPLES
    # Korthikanti et al. 2022, section 4.1; a fused kernel keeps no scores (section 5).
    expected = 34 * sbh if fused else 34 * sbh + 5 * as2b
    saved = sum(r.saved_bytes for r in block_figures(fused).regions)
    # What the formulas leave out: statistics of norms and rows' sums of attention, 4 bytes each.
    extra = (2 * 2 + HEADS * fused) * SAMPLES * LENGTH * 4
    assert saved - extra == pytest.approx(expected, rel=0.01)


def test_saved_bytes_are_products_of_named_dims() -> None:
    layer = block_figures(True)
    (ffn,) = (r for r in layer.regions if r.name == "ffn")
    # Before and after the GELU, two bytes each; what goes in is the region's as well.
    assert ffn.saved["batch", "ffn", "sequence"] == 2 + 2
    assert ffn.saved["batch", "hidden", "sequence"] == 2


def test_summary_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    job = FAMILIES["gpt2"].tiny()
    text = autopar.inspect(job.model, job.batch).summary()
    assert "2 × GPT2Block" in text
    assert "tied: transformer.wte.weight = lm_head.weight" in text
    assert "heads* 4" in text and "ffn* 128" in text and "vocab* 64" in text
    assert main(["inspect", "wide_ffn:no_such"]) == 2
    assert "no callable 'no_such'" in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.cli.load_model", lambda _: (Model(True), *_batch(), token_loss))
    assert main(["inspect", "some:model"]) == 0
    assert "2 × Layer" in capsys.readouterr().out


def _batch() -> tuple[dict[str, Tensor]]:
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    return ({"ids": ids, "labels": ids},)

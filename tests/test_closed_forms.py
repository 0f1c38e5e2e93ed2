"""What papers give as formulas, out of capture, pinned plans and their account at full size."""

import functools
import math
from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.capture import capture
from autopar.cluster import resolve_cluster
from autopar.graph.analyse import analyse
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.state_ratio import StateRatio
from autopar.plan import Predicted
from autopar.planning.account import account
from autopar.planning.decide import tokens_of
from autopar.planning.pinned import pinned_program
from autopar.planning.pins import read_pins
from autopar.planning.prices import Prices
from autopar.registry import select_cost_models, select_strategies

STATES = ("parameter", "gradient", "optimizer", "master")
MIXED = StateRatio(2.0, item_bytes=4, master_bytes=4)
"""fp16 values and gradients, a master copy, two moments: 16 bytes an element."""


@functools.cache
def gpt(layers: int, hidden: int, heads: int, samples: int, length: int) -> ModelGraph:
    config = GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, n_positions=length, vocab_size=50257
    )
    return graph_of(GPT2LMHeadModel, config, samples, length)


@functools.cache
def llama() -> ModelGraph:
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return graph_of(LlamaForCausalLM, config, 8, 2048)


def graph_of(kind: type[nn.Module], config: Any, samples: int, length: int) -> ModelGraph:
    with torch.device("meta"):
        model = kind(config).to(torch.bfloat16)
    ids = torch.empty(samples, length, dtype=torch.int64, device="meta")
    return analyse(capture(model, {"input_ids": ids, "labels": ids.clone()}, None))


def predicted(
    graph: ModelGraph, spec: str, ratio: StateRatio, microbatches: int, **pins: Any
) -> Predicted:
    off = {"pp": 1, "cp": 1, "ep": 1, "tp": 1, "sequence": False, "recompute": False}
    cluster, strategies = resolve_cluster(spec), select_strategies()
    given = {**off, "microbatches": microbatches, **pins}
    program = pinned_program(graph, cluster, strategies, read_pins(given, (), strategies))
    prices = Prices(select_cost_models(), program.setting.mesh, cluster)
    return account(program, prices, ratio, tokens_of(graph)).predicted


def states_gb(found: Predicted) -> float:
    return sum(found.memory.get(kind, 0) for kind in STATES) / 1e9


@pytest.mark.parametrize(
    ("zero", "expected"), [(False, 120), (1, 31.4), (2, 16.6), (3, 1.9)], ids=str
)
def test_zero_of_7_5_billion_on_64(zero: Any, expected: float) -> None:
    """Rajbhandari et al. 2020, figure 1; this model has 7.55 billion parameters."""
    graph = gpt(36, 4096, 32, 128, 1024)
    found = predicted(graph, "a100:64", MIXED, 2, dp=64, zero=zero)
    assert states_gb(found) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("zero", "expected"), [(False, 160), (1, 64), (2, 52), (3, 40)], ids=str)
def test_llama_3_8b_on_4(zero: Any, expected: float) -> None:
    """With 16 bytes of optimizer state for each 2-byte parameter and gradient."""
    ratio = StateRatio(4.0, item_bytes=4)
    found = predicted(llama(), "h100:4", ratio, 2, dp=4, zero=zero)
    assert states_gb(found) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (MIXED, 16),
        (StateRatio(2.0, item_bytes=4, master_bytes=4, gradient_bytes=4), 18),
        (StateRatio(3.0, item_bytes=4, master_bytes=4), 20),  # fp32 gradients beside fp16 ones
    ],
)
def test_bytes_an_element_of_the_usual_recipes(ratio: StateRatio, expected: int) -> None:
    found = predicted(gpt(2, 256, 4, 4, 64), "a100:1", ratio, 1, dp=1)
    parameters = 12 * 2 * 256**2 + 13 * 2 * 256 + (50257 + 64) * 256 + 2 * 256
    buffers = 2 * 64 * 64  # causal masks, where the model has them
    assert states_gb(found) * 1e9 == pytest.approx(expected * parameters, abs=buffers)


def test_gpt_3() -> None:
    """Parameters 12Lh² (1 + 13/(12h)) + (V + s)h (Narayanan et al. 2021 without the final norm) and
    6ND flops (Brown et al. 2020: 3.14e23 for 300 billion tokens); attention adds s/(6h) to it."""
    layers, hidden, length = 96, 12288, 2048
    graph = gpt(layers, hidden, 96, 1, length)
    counted = sum(math.prod(p.shape) for p in graph.capture.params)
    formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden)) + (50257 + length) * hidden
    assert counted == formula + 2 * hidden
    assert counted == pytest.approx(175e9, rel=0.01)
    found = predicted(graph, "a100:1", MIXED, 1, dp=1)
    total = found.model_flops / length * 300e9
    assert total == pytest.approx(6 * counted * 300e9 * (1 + length / (6 * hidden)), rel=0.01)
    assert total == pytest.approx(3.14e23, rel=0.04)


def test_model_flops_count_convolutions_and_experts() -> None:
    """ResNet-50: 4.09 billion multiply-adds an image (He et al. 2016 say 3.8 with the stride in
    another place; torchvision's has it here), three times for a step. Mixtral-like: 6 flops for
    each weight that a token meets, two of four experts among them, and attention's own."""
    job = FAMILIES["resnet"].full["resnet-50"]()
    found = predicted(analyse(capture(job.model, job.batch, job.loss)), "a100:1", MIXED, 1)
    images = next(iter(job.batch.values())).shape[0]
    # The first layer's input needs no gradient: counted all the same, as is usual.
    assert found.model_flops / images / 6 == pytest.approx(4.09e9, rel=0.01)
    job = FAMILIES["mixtral"].tiny()
    graph = analyse(capture(job.model, job.batch, job.loss))
    config: Any = job.model.config
    met = sum(
        p.numel() * (config.num_experts_per_tok / config.num_local_experts if p.dim() == 3 else 1)
        for name, p in job.model.named_parameters()
        if p.dim() > 1 and "embed" not in name
    )
    samples, length = job.batch["input_ids"].shape
    width = config.hidden_size
    attention = 12 * config.num_hidden_layers * length * width / 2
    flops = predicted(graph, "cpu:1", StateRatio(2.0), 1).model_flops
    assert flops / (samples * length) == pytest.approx(6 * met + attention, rel=0.05)

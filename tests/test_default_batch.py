"""The two-argument compile: which batch is planned for where none is given."""

from typing import Any

import pytest
import torch
import transformers
from models import classifier_loss
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
)

import autopar
from autopar.batch_spec import describe_batch
from autopar.default_batch import batch_or_default

transformers.logging.set_verbosity_error()
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}
TEXT: dict[str, Any] = {**SMALL, **SPECIAL, "intermediate_size": 48, "vocab_size": 64}
IMAGE: dict[str, Any] = {**SMALL, "intermediate_size": 48, "patch_size": 8}


def meta(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """A model without memory."""
    with torch.device("meta"):
        return kind(config)


def gpt2(kind: type[PreTrainedModel] = GPT2LMHeadModel, **fields: Any) -> PreTrainedModel:
    """GPT-2, small."""
    size: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64}
    off: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return meta(kind, GPT2Config(**size, **off, bos_token_id=0, eos_token_id=0, **fields))


def shapes(model: nn.Module, devices: int = 4) -> dict[str, tuple[str, list[int]]]:
    """The derived batch by name: dtype and shape. All of it lies on meta."""
    batch, _ = batch_or_default(model, None, devices)
    assert all(tensor.is_meta for tensor in batch.values())
    return {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in batch.items()}


# ---------------------------------------------------------------- Hugging Face models


def test_gpt2_in_two_arguments() -> None:
    plan = autopar.compile(gpt2(n_positions=64), "cpu:4").plan
    assert plan.batch_size == 4
    assert plan.tokens == 4 * 64
    assert plan.assumptions[0] == (
        "no batch was given: input_ids int64 [4, 64], labels int64 [4, 64], one sample a device, "
        "sequence 64 of max_position_embeddings 64 from GPT2Config"
    )
    assert "Assumed: no batch was given: input_ids int64 [4, 64]" in plan.summary()


def test_llama_in_two_arguments_takes_2048_tokens_at_most() -> None:
    config = LlamaConfig(**TEXT, num_key_value_heads=2, max_position_embeddings=4096)
    model = meta(LlamaForCausalLM, config)
    plan = autopar.compile(model, "cpu:4").plan
    assert plan.tokens == 4 * 2048
    assert "sequence 2048 of max_position_embeddings 4096 from LlamaConfig" in plan.assumptions[0]
    assert autopar.emit(model, plan).plan == plan


def test_a_users_subclass_counts_as_its_base() -> None:
    class Mine(GPT2LMHeadModel):
        pass

    assert shapes(gpt2(Mine, n_positions=32))["labels"] == ("int64", [4, 32])


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        (BertForMaskedLM, [8, 32]),
        (BertForTokenClassification, [8, 32]),
        (BertForSequenceClassification, [8]),
    ],
)
def test_encoders(kind: type[PreTrainedModel], labels: list[int]) -> None:
    model = meta(kind, BertConfig(**TEXT, max_position_embeddings=32))
    assert shapes(model, 8) == {"input_ids": ("int64", [8, 32]), "labels": ("int64", labels)}


def test_positions_that_are_reserved_for_padding_are_not_used() -> None:
    config = RobertaConfig(**TEXT, max_position_embeddings=34, pad_token_id=1)
    assert shapes(meta(RobertaForMaskedLM, config))["input_ids"] == ("int64", [4, 32])


@pytest.mark.parametrize(("size", "sides"), [(32, [32, 32]), ([16, 24], [16, 24])])
def test_images(size: Any, sides: list[int]) -> None:
    model: nn.Module = meta(
        ViTForImageClassification, ViTConfig(**IMAGE, image_size=size, num_channels=1)
    )
    wanted = {"pixel_values": ("bfloat16", [4, 1, *sides]), "labels": ("int64", [4])}
    assert shapes(model.to(torch.bfloat16)) == wanted


@pytest.mark.parametrize("config", [
    BertConfig(**{**TEXT, "num_labels": 1}),
    BertConfig(**TEXT, problem_type="multi_label_classification"),
])  # fmt: skip
def test_labels_that_are_not_classes(config: Any) -> None:
    with pytest.raises(autopar.AutoparError, match=r"nobody can tell what a label is\. Pass batch"):
        batch_or_default(meta(BertForSequenceClassification, config), None, 4)


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        (GPT2Model, GPT2Config(n_embd=32, n_layer=1, n_head=4),
         "GPT2Model: its class's name ends in none of LMHeadModel, ForCausalLM, "),
        (BloomForCausalLM, BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64),
         "BloomForCausalLM: BloomConfig has no max_position_embeddings"),
        (BartForConditionalGeneration, BartConfig(d_model=32, encoder_layers=1, decoder_layers=1),
         "BartForConditionalGeneration: its class's name ends in none of"),
        (ViTForMaskedImageModeling, ViTConfig(**IMAGE, image_size=32),
         "ViTForMaskedImageModeling: its class's name ends in none of"),
    ],
)  # fmt: skip
def test_no_batch_can_be_derived(kind: type[PreTrainedModel], config: Any, why: str) -> None:
    with pytest.raises(autopar.AutoparError) as error:
        autopar.compile(meta(kind, config), "cpu:4")
    assert str(error.value).startswith("no batch was given and none can be derived for " + why)
    assert str(error.value).endswith("meta tensors will do")


# ---------------------------------------------------------------- other models


class WithExample(nn.Module):
    """A model that brings its own example, as Lightning's do."""

    example_input_array: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.net(x))


def test_the_models_own_example() -> None:
    model = WithExample()
    model.example_input_array = {"x": torch.zeros(8, 12), "y": torch.zeros(8, dtype=torch.int64)}
    compiled = autopar.compile(model, "cpu:4", loss=classifier_loss)
    assert compiled.plan.batch == describe_batch(model.example_input_array)
    assert compiled.plan.assumptions[0] == (
        "no batch was given: x float32 [8, 12], y int64 [8], the model's example_input_array"
    )


def test_a_given_batch_comes_first() -> None:
    model = WithExample()
    model.example_input_array = torch.zeros(2, 12)
    mine = torch.zeros(8, 12)
    assert batch_or_default(model, mine, 4) == (mine, ())


def test_no_example() -> None:
    with pytest.raises(autopar.AutoparError, match="for WithExample: it has no example_input_arr"):
        autopar.compile(WithExample(), "cpu:4", loss=classifier_loss)

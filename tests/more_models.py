"""Further Hugging Face models, tiny: a padding mask, and a loss over labelled pairs of samples."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from models import Job
from torch import nn

LAYER: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
SIZES: dict[str, Any] = {**LAYER, "intermediate_size": 48}


def _job(model: nn.Module, batch: dict[str, Any]) -> Job:
    for name, parameter in model.double().named_parameters():
        if parameter.dim() > 1 or "norm" not in name.lower():
            nn.init.normal_(parameter, std=0.2)
    return Job(model, batch, None)


def padded_bert() -> Job:
    """BERT whose every other sample ends in padding."""
    torch.manual_seed(4)
    config = transformers.BertConfig(
        vocab_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **SIZES,
    )
    ids, mask = torch.randint(3, 64, (8, 16)), torch.ones(8, 16, dtype=torch.int64)
    mask[::2, 10:] = 0
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    return _job(transformers.BertForMaskedLM(config), batch)


def siglip() -> Job:
    """SigLIP: a sigmoid for each pair of a text and an image."""
    torch.manual_seed(4)
    text = {**SIZES, "vocab_size": 64, "max_position_embeddings": 16, "projection_size": 32}
    vision = {**SIZES, "image_size": 16, "patch_size": 4}
    config = transformers.SiglipConfig(text_config=text, vision_config=vision)
    batch: dict[str, Any] = {
        "input_ids": torch.randint(3, 64, (8, 16)),
        "pixel_values": torch.randn(8, 3, 16, 16, dtype=torch.float64),
        "return_loss": True,
    }
    return _job(transformers.SiglipModel(config), batch)


def _odd(kind: str, vocab: int, **sizes: Any) -> Callable[[], Job]:
    """A language model of odd sizes, labels ignored unevenly over samples."""

    def build() -> Job:
        torch.manual_seed(5)
        transformers.logging.set_verbosity_error()
        model_class = getattr(transformers, kind)
        model = model_class(model_class.config_class(vocab_size=vocab, **sizes))
        ids = torch.randint(0, vocab, (8, 16))
        ids[0, 0], ids[1, :2] = vocab - 1, 0  # the last word lies before the padding
        labels = ids.clone()
        for sample in range(8):
            labels[sample, : (sample * 5) % 16] = -100
        return _job(model, {"input_ids": ids, "labels": labels})

    return build


GPT2: dict[str, Any] = {
    "n_embd": 40,
    "n_layer": 2,
    "n_head": 5,
    "n_inner": 37,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
QWEN3: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 45,
}
ODD: dict[str, Callable[[], Job]] = {
    "odd_gpt2": _odd("GPT2LMHeadModel", 127, **GPT2),
    "five_words": _odd("GPT2LMHeadModel", 5, **GPT2),  # over four ranks: 2, 2, 1 and none
    "odd_llama": _odd("LlamaForCausalLM", 61, **{**SIZES, "num_hidden_layers": 2}),
    "odd_qwen3": _odd("Qwen3ForCausalLM", 61, **QWEN3),  # its heads have norms
    "odd_bert": _odd(  # its words have a bias
        "BertForMaskedLM",
        65,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **{**SIZES, "num_hidden_layers": 2},
    ),
}
"""Vocabularies, heads and widths that 2 and 4 don't divide."""
MORE: dict[str, Callable[[], Job]] = {"padded_bert": padded_bert, "siglip": siglip, **ODD}

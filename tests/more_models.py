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


MORE: dict[str, Callable[[], Job]] = {"padded_bert": padded_bert, "siglip": siglip}

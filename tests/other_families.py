"""Hugging Face families beside those of `families`: tiny, with real weights, unmodified."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from models import Job
from torch import nn

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
BERT: dict[str, Any] = {
    **SIZES,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
IMAGES: dict[str, Any] = {
    "image_size": 32,
    "drop_path_rate": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
NO_DROPOUT: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
FALCON: dict[str, Any] = {**SIZES, **ENDS, "hidden_dropout": 0.0, "attention_dropout": 0.0}
TWO_STACKS: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    **NO_DROPOUT,
}


def _model(kind: str, **config: Any) -> nn.Module:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    model: nn.Module = model_class(model_class.config_class(**config))
    for name, parameter in model.double().named_parameters():
        if parameter.dim() > 1 or "norm" not in name.lower():
            nn.init.normal_(parameter, std=0.2)
    return model


def _text(kind: str, **config: Any) -> Callable[[], Job]:
    """A language model; labels are ignored unevenly over samples."""

    def build() -> Job:
        model = _model(kind, vocab_size=64, **config)
        ids = torch.randint(5, 64, (8, 16))
        labels = ids.clone()
        for sample in range(8):
            labels[sample, : (sample * 5) % 16] = -100
        return Job(model, {"input_ids": ids, "labels": labels}, None)

    return build


def _images(kind: str, **config: Any) -> Callable[[], Job]:
    def build() -> Job:
        model = _model(kind, num_labels=4, **config)
        pixels = torch.randn(8, 3, 32, 32, dtype=torch.float64)
        return Job(model, {"pixel_values": pixels, "labels": torch.randint(0, 4, (8,))}, None)

    return build


def _whisper() -> Job:
    model = _model(
        "WhisperForConditionalGeneration",
        vocab_size=64,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        decoder_start_token_id=4,
        **TWO_STACKS,
        **ENDS,
    )
    sound = torch.randn(8, 8, 32, dtype=torch.float64)
    return Job(model, {"input_features": sound, "labels": torch.randint(5, 64, (8, 16))}, None)


OTHERS: dict[str, Callable[[], Job]] = {
    "opt": _text(
        "OPTForCausalLM",
        **{**SIZES, **ENDS, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
    "falcon": _text("FalconForCausalLM", **FALCON),
    "falcon_grouped": _text(
        "FalconForCausalLM", **FALCON, num_kv_heads=2, new_decoder_architecture=True
    ),
    "gemma2": _text(
        "Gemma2ForCausalLM", **SIZES, **ENDS, num_key_value_heads=2, head_dim=8, sliding_window=8
    ),
    "bloom": _text("BloomForCausalLM", **FALCON, n_layer=2, n_head=4),
    "gpt_neox": _text("GPTNeoXForCausalLM", **SIZES, **ENDS),
    "distilbert": _text(
        "DistilBertForMaskedLM", dim=32, n_layers=2, n_heads=4, hidden_dim=48, **NO_DROPOUT
    ),
    "roberta": _text("RobertaForMaskedLM", **BERT),
    "albert": _text("AlbertForMaskedLM", **BERT, embedding_size=16),
    "deberta": _text(
        "DebertaV2ForMaskedLM",
        **BERT,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    "electra": _text("ElectraForMaskedLM", **BERT, embedding_size=16),
    "mpnet": _text("MPNetForMaskedLM", **BERT),
    "gptj": _text(
        "GPTJForCausalLM",
        **ENDS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        rotary_dim=8,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "phi": _text("PhiForCausalLM", **SIZES),
    "cohere": _text("CohereForCausalLM", **SIZES, **ENDS, num_key_value_heads=2),
    "olmo2": _text("Olmo2ForCausalLM", **SIZES, num_key_value_heads=2),
    "gpt_oss": _text(
        "GptOssForCausalLM",
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        experts_implementation="batched_mm",
    ),
    "mamba": _text(
        "MambaForCausalLM", hidden_size=32, num_hidden_layers=2, state_size=4, conv_kernel=4
    ),
    "whisper": _whisper,
    "bart": _text("BartForConditionalGeneration", **TWO_STACKS, max_position_embeddings=64),
    "swin": _images(
        "SwinForImageClassification",
        **IMAGES,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "convnext": _images(
        "ConvNextForImageClassification",
        image_size=32,
        drop_path_rate=0.0,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        num_stages=2,
    ),
    "beit": _images(
        "BeitForImageClassification",
        **{**SIZES, **IMAGES, "patch_size": 8, "use_relative_position_bias": True},
    ),
}
"""A builder for each. BLOOM makes its slopes in float32 by a power of two tensors, which is the one
op where `float32_raised` mixes precisions: it is run as it is."""
AS_IT_IS = ("bloom",)

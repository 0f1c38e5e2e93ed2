"""The model families that capture must hold for, unmodified: tiny with real weights, and at full
size on the meta device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from models import IGNORED, Job
from torch import Tensor, nn
from vision import ResNet, UNet, classification_loss, pixel_loss


@dataclass(frozen=True)
class Family:
    """How to build a model and its batch: `tiny()` with real float64 weights, `full` sizes by name
    on meta (`full[name](samples)`). `sequence`: whether it has one that attention runs over."""

    tiny: Callable[[], Job]
    full: Mapping[str, Callable[..., Job]]
    sequence: bool = True


def _hugging_face(kind: str, batch: Callable[[Any, int], dict[str, Tensor]], **config: Any) -> Any:
    """A builder of one Hugging Face model; its `samples` and `meta` come later."""

    def build(samples: int, meta: bool) -> Job:
        transformers.logging.set_verbosity_error()
        model_class = getattr(transformers, kind)
        settings = model_class.config_class(**config)
        with torch.device("meta" if meta else "cpu"):
            model = model_class(settings)
        return Job(model, batch(settings, samples), None)

    return build


def _tiny(build: Callable[[int, bool], Job], samples: int = 8) -> Callable[[], Job]:
    def tiny() -> Job:
        torch.manual_seed(3)
        job = build(samples, False)
        job.model.to(torch.float64)
        for name, parameter in job.model.named_parameters():
            if parameter.dim() > 1 or "norm" not in name:
                nn.init.normal_(parameter, std=0.2)
        batch = {
            name: value.double() if _floating(value) else value for name, value in job.batch.items()
        }
        return Job(job.model, batch, job.loss)

    return tiny


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _full(build: Callable[[int, bool], Job], samples: int = 8) -> Callable[..., Job]:
    def full(samples: int = samples) -> Job:
        return build(samples, True)

    return full


# ---------------------------------------------------------------- batches


def _tokens(length: int, **extra: Any) -> Callable[[Any, int], dict[str, Tensor]]:
    def batch(config: Any, samples: int) -> dict[str, Tensor]:
        ids = torch.randint(0, config.vocab_size, (samples, length))
        labels = ids.clone()
        for sample in range(samples):  # unevenly ignored
            labels[sample, : IGNORED[sample % len(IGNORED)] % length] = -100
        return {"input_ids": ids, "labels": labels, **extra}

    return batch


def _pixels(config: Any, samples: int) -> dict[str, Tensor]:
    size = config.image_size
    return {
        "pixel_values": torch.randn(samples, 3, size, size),
        "labels": torch.randint(0, 2, (samples,)),
    }


def _pairs(config: Any, samples: int) -> dict[str, Tensor]:
    text, size = config.text_config, config.vision_config.image_size
    ids = torch.randint(3, text.vocab_size - 1, (samples, text.max_position_embeddings))
    ids[:, -1] = text.eos_token_id
    return {"input_ids": ids, "pixel_values": torch.randn(samples, 3, size, size)}


# ---------------------------------------------------------------- language models


def _llama(hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int, length: int) -> Any:
    return _hugging_face(
        "LlamaForCausalLM",
        _tokens(length),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=max(length, 32),
    )


def llama_405b(samples: int = 8, layers: int = 126) -> Job:
    """Llama-3-405B on meta, with so many layers."""
    build = _llama(16384, layers, 128, 8, 53248, 128256, 8192)
    return _full(build)(samples)


def _gpt2(hidden: int, layers: int, heads: int, vocab: int, length: int, dropout: float) -> Any:
    return _hugging_face(
        "GPT2LMHeadModel",
        _tokens(length),
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        vocab_size=vocab,
        n_positions=max(length, 32),
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )


def _qwen3(hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int, length: int) -> Any:
    return _hugging_face(
        "Qwen3ForCausalLM",
        _tokens(length),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=max(8, hidden // heads),
        intermediate_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=max(length, 32),
    )


def _phi3(hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int, length: int) -> Any:
    return _hugging_face(
        "Phi3ForCausalLM",
        _tokens(length),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=max(length, 32),
        original_max_position_embeddings=max(length, 32),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def _mixtral(
    hidden: int,
    layers: int,
    heads: int,
    kv: int,
    ffn: int,
    experts: int,
    vocab: int,
    length: int,
    implementation: str | None = None,
) -> Any:
    return _hugging_face(
        "MixtralForCausalLM",
        _tokens(length),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=ffn,
        num_local_experts=experts,
        vocab_size=vocab,
        max_position_embeddings=max(length, 32),
        experts_implementation=implementation,
    )


def _qwen3_moe(
    hidden: int,
    layers: int,
    heads: int,
    kv: int,
    ffn: int,
    experts: int,
    chosen: int,
    vocab: int,
    length: int,
    implementation: str | None = None,
) -> Any:
    return _hugging_face(
        "Qwen3MoeForCausalLM",
        _tokens(length),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=128 if hidden >= 1024 else hidden // heads,
        moe_intermediate_size=ffn,
        intermediate_size=3 * hidden,
        num_experts=experts,
        num_experts_per_tok=chosen,
        vocab_size=vocab,
        max_position_embeddings=max(length, 32),
        experts_implementation=implementation,
    )


def _deepseek_v3(length: int, implementation: str | None = None, **config: Any) -> Any:
    return _hugging_face(
        "DeepseekV3ForCausalLM",
        _tokens(length),
        experts_implementation=implementation,
        **config,
    )


_DEEPSEEK_TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "vocab_size": 64,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 32,
}


def _bert(hidden: int, layers: int, heads: int, ffn: int, vocab: int, length: int) -> Any:
    return _hugging_face(
        "BertForMaskedLM",
        _tokens(length),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=max(length, 32),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _t5(hidden: int, layers: int, heads: int, head_dim: int, ffn: int, vocab: int, n: int) -> Any:
    return _hugging_face(
        "T5ForConditionalGeneration",
        _tokens(n),
        d_model=hidden,
        num_layers=layers,
        num_heads=heads,
        d_kv=head_dim,
        d_ff=ffn,
        vocab_size=vocab,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )


# ---------------------------------------------------------------- vision


def _vit(hidden: int, layers: int, heads: int, ffn: int, image: int, patch: int) -> Any:
    return _hugging_face(
        "ViTForImageClassification",
        _pixels,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=ffn,
        image_size=image,
        patch_size=patch,
        num_labels=4,
    )


def _clip(hidden: int, layers: int, heads: int, image: int, patch: int, **text: Any) -> Any:
    def build(samples: int, meta: bool) -> Job:
        shared = {"hidden_size": hidden, "num_hidden_layers": layers}
        shared |= {"num_attention_heads": heads, "intermediate_size": 4 * hidden}
        config = transformers.CLIPConfig(
            text_config={**shared, **text},
            vision_config={**shared, "image_size": image, "patch_size": patch},
            projection_dim=hidden,
        )
        with torch.device("meta" if meta else "cpu"):
            model = transformers.CLIPModel(config)
        return Job(model, {**_pairs(config, samples), "return_loss": True}, None)  # type: ignore[dict-item]

    return build


def _resnet(layers: tuple[int, ...], width: int, base: int, image: int, classes: int) -> Any:
    def build(samples: int, meta: bool) -> Job:
        with torch.device("meta" if meta else "cpu"):
            model = ResNet(layers, width, base, classes)
        x, y = torch.randn(samples, 3, image, image), torch.randint(0, classes, (samples,))
        return Job(model, {"x": x, "y": y}, classification_loss)

    return build


def _unet(channels: tuple[int, ...], image: int) -> Any:
    def build(samples: int, meta: bool) -> Job:
        with torch.device("meta" if meta else "cpu"):
            model = UNet(channels)
        x, y = torch.randn(samples, 3, image, image), torch.randn(samples, 3, image, image)
        return Job(model, {"x": x, "y": y}, pixel_loss)

    return build


# ---------------------------------------------------------------- torch.nn


class Sequence(nn.Module):
    """Features through a torch.nn transformer to a target."""

    def __init__(self, inner: nn.Module, width: int, two: bool) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(width, width)
        self.two = two

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """[batch, sequence, width], the context that a decoder attends to likewise."""
        y = self.inner(context, x) if self.two else self.inner(x)
        out: Tensor = self.head(y)
        return out


def regression_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error against `y`."""
    return nn.functional.mse_loss(outputs, batch["y"])


def _torch_layers(width: int, layers: int, heads: int, ffn: int, length: int, two: bool) -> Any:
    def build(samples: int, meta: bool) -> Job:
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
        with torch.device("meta" if meta else "cpu"):
            if two:
                inner: nn.Module = nn.Transformer(width, heads, layers, layers, ffn, **options)
            else:
                layer = nn.TransformerEncoderLayer(width, heads, ffn, **options)
                inner = nn.TransformerEncoder(layer, layers)
            model = Sequence(inner, width, two)
        batch = {"x": torch.randn(samples, length, width), "y": torch.randn(samples, length, width)}
        if two:
            context = torch.randn(samples, length + 4, width)
            batch = {"x": batch["x"], "context": context, "y": batch["y"]}
        return Job(model, batch, regression_loss)

    return build


def _mlp(width: int, layers: int) -> Any:
    def build(samples: int, meta: bool) -> Job:
        with torch.device("meta" if meta else "cpu"):
            steps = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]
            model = nn.Sequential(*steps)
        batch = {"input": torch.randn(samples, width), "y": torch.randn(samples, width)}
        return Job(model, batch, regression_loss)

    return build


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        _tiny(_gpt2(32, 2, 4, 64, 16, 0.0)),
        {
            "gpt2-124M": _full(_gpt2(768, 12, 12, 50257, 1024, 0.1)),
            "gpt2-xl": _full(_gpt2(1600, 48, 25, 50257, 1024, 0.1)),
        },
    ),
    "llama": Family(
        _tiny(_llama(32, 2, 4, 2, 48, 64, 16)),
        {
            "llama3-8B": _full(_llama(4096, 32, 32, 8, 14336, 128256, 8192)),
            "llama3-70B": _full(_llama(8192, 80, 64, 8, 28672, 128256, 8192)),
            "llama3-405B": llama_405b,
        },
    ),
    "qwen3": Family(
        _tiny(_qwen3(32, 2, 4, 2, 48, 64, 16)),
        {"qwen3-8B": _full(_qwen3(4096, 36, 32, 8, 12288, 151936, 4096))},
    ),
    "phi3": Family(
        _tiny(_phi3(32, 2, 4, 2, 48, 64, 16)),
        {"phi3-mini": _full(_phi3(3072, 32, 32, 32, 8192, 32064, 4096))},
    ),
    "mixtral": Family(
        _tiny(_mixtral(32, 2, 4, 2, 48, 4, 64, 16, "batched_mm")),
        {
            "mixtral-8x7B": _full(_mixtral(4096, 32, 32, 8, 14336, 8, 32000, 4096)),
            "mixtral-8x22B": _full(_mixtral(6144, 56, 48, 8, 16384, 8, 32000, 4096)),
        },
    ),
    "qwen3_moe": Family(
        _tiny(_qwen3_moe(32, 2, 4, 2, 16, 8, 2, 64, 16, "batched_mm")),
        {"qwen3-235B-A22B": _full(_qwen3_moe(4096, 94, 64, 4, 1536, 128, 8, 151936, 4096))},
    ),
    "deepseek_v3": Family(
        _tiny(_deepseek_v3(16, "batched_mm", **_DEEPSEEK_TINY)),
        {"deepseek-v3-671B": _full(_deepseek_v3(4096, None, num_hidden_layers=61))},
    ),
    "bert": Family(
        _tiny(_bert(32, 2, 4, 48, 64, 16)),
        {"bert-large": _full(_bert(1024, 24, 16, 4096, 30522, 512))},
    ),
    "t5": Family(
        _tiny(_t5(32, 2, 4, 8, 48, 64, 16)),
        {"t5-11B": _full(_t5(1024, 24, 128, 128, 65536, 32128, 512))},
    ),
    "vit": Family(
        _tiny(_vit(32, 2, 4, 48, 16, 4)),
        {"vit-large": _full(_vit(1024, 24, 16, 4096, 224, 16), 32)},
    ),
    "clip": Family(
        _tiny(
            _clip(
                32,
                2,
                4,
                16,
                4,
                vocab_size=64,
                max_position_embeddings=16,
                eos_token_id=63,
                bos_token_id=62,
                pad_token_id=61,
            )
        ),
        {"clip-large": _full(_clip(1024, 24, 16, 224, 14), 32)},
    ),
    "transformer": Family(
        _tiny(_torch_layers(32, 2, 4, 48, 16, True)),
        {"transformer-6+6": _full(_torch_layers(512, 6, 8, 2048, 512, True))},
    ),
    "encoder": Family(
        _tiny(_torch_layers(32, 2, 4, 48, 16, False)),
        {"encoder-12": _full(_torch_layers(1024, 12, 16, 4096, 512, False))},
    ),
    "mlp": Family(_tiny(_mlp(32, 4)), {"mlp-24x4096": _full(_mlp(4096, 24), 64)}, sequence=False),
    "resnet": Family(
        _tiny(_resnet((2, 1), 8, 8, 16, 4)),
        {
            "resnet-50": _full(_resnet((3, 4, 6, 3), 64, 64, 224, 1000), 32),
            "wide-resnet-101": _full(_resnet((3, 4, 23, 3), 64, 128, 224, 1000), 32),
        },
        sequence=False,
    ),
    "unet": Family(
        _tiny(_unet((8, 16, 16), 16)), {"unet": _full(_unet((64, 128, 256, 512), 128))}, False
    ),
}

"""Models at full size, on meta, with a global batch of any size: those of tests/families.py, and
some whose training is published, beside what was trained there."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parent.parent / "tests"


@dataclass(frozen=True)
class Decoder:
    """A Hugging Face decoder at its published figures. `kind`: its class; `length`: positions of a
    sample."""

    kind: str
    length: int
    config: Mapping[str, int]


def _config(
    hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int, **more: int
) -> Mapping[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        **more,
    }


DECODERS: Mapping[str, Decoder] = {
    # Groeneveld et al. 2024 (OLMo), table 1; its embedding has 50,304 rows
    "olmo-7B": Decoder("Olmo", 2048, _config(4096, 32, 32, 32, 11008, 50304)),
    # 01.AI 2024 (Yi), table 1
    "yi-34B": Decoder("Llama", 4096, _config(7168, 60, 56, 8, 20480, 64000)),
    # Gemma Team 2024 (Gemma 2), table 1: its 27B, with the first Gemma's layers, whose attention
    # is torch's own: no soft cap of logits, no windows, no norms after blocks
    "gemma-27B-like": Decoder(
        "Gemma", 8192, _config(4608, 46, 32, 16, 36864, 256128, head_dim=128)
    ),
    # Llama Team 2024 (Llama 3), table 3, in its stage of long contexts
    "llama3-405B-131072": Decoder("Llama", 131072, _config(16384, 126, 128, 8, 53248, 128256)),
}


def job_of(name: str, cluster: str, samples: int) -> Any:
    """A model in 16 bits (float16 on V100, else bfloat16) with its loss and a batch of meta
    tensors."""
    sys.path.insert(0, str(TESTS))
    from families import FAMILIES
    from models import Job

    half = torch.float16 if cluster.startswith("v100") else torch.bfloat16
    if name in DECODERS:
        return Job(*_decoder(DECODERS[name], samples, half), None)
    full = {key: build for family in FAMILIES.values() for key, build in family.full.items()}
    job = full[name]()
    batch = {
        key: torch.empty(
            (samples, *value.shape[1:]),
            dtype=half if value.is_floating_point() else value.dtype,
            device="meta",
        )
        for key, value in job.batch.items()
    }
    return Job(job.model.to(half), batch, job.loss)


def _decoder(of: Decoder, samples: int, half: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    import transformers

    transformers.logging.set_verbosity_error()
    model_class = getattr(transformers, f"{of.kind}ForCausalLM")
    with torch.device("meta"):
        model = model_class(
            model_class.config_class(**of.config, max_position_embeddings=of.length)
        )
        ids = torch.empty(samples, of.length, dtype=torch.int64)
    return model.to(half), {"input_ids": ids, "labels": ids.clone()}

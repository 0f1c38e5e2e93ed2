"""The models, batches and losses that tests run, small and in float64."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Job:
    """A model, its global batch and its loss callable (None: the model's own)."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    loss: Callable[[Any, Any], torch.Tensor] | None


class Classifier(nn.Module):
    """A plain MLP: two hidden layers."""

    def __init__(self, features: int = 12, hidden: int = 16, classes: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(features, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 2 * hidden),
            nn.Tanh(),
            nn.Linear(2 * hidden, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores [batch, classes]."""
        scores: torch.Tensor = self.net(x)
        return scores


class Residual(nn.Module):
    """A layer of `DeepClassifier`."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.up = nn.Linear(features, 2 * features)
        self.down = nn.Linear(2 * features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        return x + torch.tanh(self.down(torch.relu(self.up(x))))


class DeepClassifier(nn.Module):
    """An MLP of repeated layers."""

    def __init__(self, layers: int, features: int = 12, classes: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual(features) for _ in range(layers)])
        self.head = nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores [batch, classes]."""
        for layer in self.layers:
            x = layer(x)
        scores: torch.Tensor = self.head(x)
        return scores


def classifier_loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy over the labels that aren't ignored."""
    return nn.functional.cross_entropy(outputs, batch["y"])


def classifier(dtype: torch.dtype = torch.float64) -> Job:
    """The MLP classifier; labels of some samples are ignored, unevenly over ranks."""
    torch.manual_seed(1)
    model = Classifier().to(dtype)
    x, y = torch.randn(8, 12, dtype=dtype), torch.randint(0, 8, (8,))
    y[torch.tensor([0, 1, 4])] = -100
    return Job(model, {"x": x, "y": y}, classifier_loss)


def deep_classifier(dtype: torch.dtype = torch.float64, layers: int = 5) -> Job:
    """The classifier's batch on an MLP of repeated layers."""
    torch.manual_seed(3)
    return Job(DeepClassifier(layers).to(dtype), classifier(dtype).batch, classifier_loss)


def gpt2(dtype: torch.dtype = torch.float64, layers: int = 2, dropout: float = 0.0) -> Job:
    """GPT-2 as Hugging Face ships it, tiny; labels are ignored unevenly over samples."""
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    model.to(dtype)
    for parameter in model.parameters():  # biases start at zero, norms at one: hide nothing
        nn.init.normal_(parameter, std=0.2)
    return Job(model, _language_batch(), None)


IGNORED = (0, 3, 15, 9, 1, 0, 12, 5)
"""Labels ignored at the beginning of each of eight samples: no half has as many as the other, no
quarter as another."""


def _language_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (8, 16))
    labels = ids.clone()
    for sample, ignored in enumerate(IGNORED):
        labels[sample, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def llama(dtype: torch.dtype = torch.float64, kv_heads: int = 2, layers: int = 2) -> Job:
    """Llama with grouped-query attention: 4 heads over 2 kv heads."""
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    logging.set_verbosity_error()
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = LlamaForCausalLM(config)
    model.to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return Job(model, _language_batch(), None)


MODELS: dict[str, Callable[[], Job]] = {"gpt2": gpt2, "llama": llama, "mlp": classifier}


@contextlib.contextmanager
def float32_raised() -> Iterator[None]:
    """Casts to float32 go to float64 instead, so that what models compute in float32 (losses,
    norms, routers) doesn't hide an error below 1e-7."""

    def raised(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            both = torch.utils._pytree.tree_map(_raised, (args, kwargs))
            return function(*both[0], **both[1])

        return call

    plain = (torch.Tensor.float, torch.Tensor.to, nn.functional.softmax, torch.Tensor.type)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.Tensor.to = raised(plain[1])  # type: ignore[method-assign]
    nn.functional.softmax = raised(plain[2])
    torch.Tensor.type = raised(plain[3])  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.float = plain[0]  # type: ignore[method-assign]
        torch.Tensor.to = plain[1]  # type: ignore[method-assign]
        nn.functional.softmax = plain[2]
        torch.Tensor.type = plain[3]  # type: ignore[method-assign]


def _raised(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value

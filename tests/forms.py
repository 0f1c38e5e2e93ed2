"""Models of every form that users write: masks, ties, shared and frozen parts, adapters, and the
structures of their batches and outputs. Small, in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from models import Job, gpt2
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

WIDTH, LENGTH, VOCAB, SAMPLES = 16, 8, 32, 8


def _filled(model: nn.Module) -> nn.Module:
    """In float64, every parameter random: zeros and ones would hide errors."""
    model.double()
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def _ids() -> dict[str, Tensor]:
    torch.manual_seed(6)
    ids = torch.randint(3, VOCAB, (SAMPLES, LENGTH))
    labels = ids.clone()
    for sample in range(SAMPLES):
        labels[sample, : sample % 5] = -100
    return {"ids": ids, "labels": labels}


# ---------------------------------------------------------------- a small language model


class Layer(nn.Module):
    """A transformer layer with attention of its own, four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, sequence, width] to the same."""
        y = self.norm1(x)
        q, k, v = (self.heads(p(y)) for p in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out

    def heads(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] to [batch, heads, sequence, width of a head]."""
        y: Tensor = x.view(*x.shape[:2], 4, WIDTH // 4).transpose(1, 2)
        return y


class Language(nn.Module):
    """Embedding, layers, head; the output and the embedding are tied where `tied`."""

    def __init__(self, layers: int = 2, tied: bool = False, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([layer() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, sequence] to scores [batch, sequence, vocabulary]."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def language_loss(outputs: Tensor, batch: Any) -> Tensor:
    """Mean cross-entropy of each position, labels -100 ignored."""
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def _language(model: nn.Module) -> Job:
    return Job(_filled(model), _ids(), language_loss)


# ---------------------------------------------------------------- masks and positions


def _padded() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, a mask and positions of samples that start with padding, of unequal lengths."""
    ids, mask = torch.randint(3, 64, (8, 16)), torch.ones(8, 16, dtype=torch.int64)
    for sample in range(8):
        mask[sample, : sample % 4] = 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def masked_gpt2() -> Job:
    """GPT-2 with padding on the left, positions that start after it, and token types."""
    model = gpt2().model
    ids, mask, positions = _padded()
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    batch |= {"token_type_ids": (positions > 6).long(), "labels": ids.masked_fill(mask == 0, -100)}
    return Job(model, batch, None)


def masked_bert() -> Job:
    """BERT with padding, positions and token types of the batch."""
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids, mask, positions = _padded()
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    batch |= {"token_type_ids": (positions > 6).long(), "labels": ids.masked_fill(mask == 0, -100)}
    return Job(_filled(transformers.BertForMaskedLM(config)), batch, None)


class MaskedLanguage(Language):
    """The mask [batch, sequence] of the batch, made causal, is given to every layer."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        """Scores [batch, sequence, vocabulary]."""
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        allowed = causal & mask.bool()[:, None, None, :]
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, allowed)
        scores: Tensor = self.head(self.norm(x))
        return scores


def masked() -> Job:
    """A causal mask and one for padding on the right, joined."""
    job = _language(MaskedLanguage())
    mask = torch.ones(SAMPLES, LENGTH, dtype=torch.int64)
    mask[1::2, 5:] = 0
    job.batch["labels"][mask == 0] = -100
    return Job(job.model, {**job.batch, "mask": mask}, job.loss)


class RotaryLayer(Layer):
    """Rotates queries and keys by tables that no checkpoint holds."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        rates = 1.0 / 100 ** (torch.arange(0, 4, 2, dtype=torch.float64) / 4)
        angles = torch.outer(torch.arange(2 * LENGTH, dtype=torch.float64), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def heads(self, x: Tensor) -> Tensor:
        """Heads, rotated by position."""
        y = super().heads(x)
        n = y.shape[2]
        half = torch.cat([-y[..., 2:], y[..., :2]], dim=-1)
        return y * self.cos[:n] + half * self.sin[:n]


# ---------------------------------------------------------------- ties and shared blocks


class ReadingLayer(Layer):
    """Adds what the embedding's own weight says about the input, a layer's use of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, sequence, width] to the same."""
        y = super().forward(x, mask)
        return y + F.linear(self.words(y).softmax(-1), self.words.weight.t())


def tied_thrice() -> Job:
    """One weight: the embedding's, the head's, and one inside a layer."""
    model = Language(tied=True)
    model.layers.append(ReadingLayer())
    model.layers[-1].words.weight = model.embed.weight  # type: ignore[union-attr]
    return _language(model)


class Albert(Language):
    """One layer, called three times."""

    def forward(self, ids: Tensor) -> Tensor:
        """Scores [batch, sequence, vocabulary]."""
        x = self.embed(ids)
        for _ in range(3):
            x = self.layers[0](x)
        scores: Tensor = self.head(self.norm(x))
        return scores


class Aliased(Language):
    """One layer, three times in the list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * 3)


def hugging_face_albert() -> Job:
    """ALBERT: one layer called twice, a factorised and tied embedding."""
    config = transformers.AlbertConfig(
        vocab_size=64,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids, mask, _ = _padded()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return Job(_filled(transformers.AlbertForMaskedLM(config)), batch, None)


# ---------------------------------------------------------------- frozen parts


class Adapter(nn.Module):
    """A frozen linear and a trained one of low rank beside it (LoRA, Hu et al. 2021)."""

    def __init__(self, linear: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.empty(rank, linear.in_features))
        self.b = nn.Parameter(torch.empty(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] to […, out]."""
        out: Tensor = self.linear(x) + 0.5 * F.linear(F.linear(x, self.a), self.b)
        return out


def frozen_embedding() -> Job:
    """A frozen embedding; the layers are trained."""
    model = Language()
    model.embed.requires_grad_(False)
    return _language(model)


def frozen_layers() -> Job:
    """Embedding and first two of three layers frozen."""
    model = Language(3)
    for part in (model.embed, *model.layers[:2]):
        part.requires_grad_(False)
    return _language(model)


def adapters() -> Job:
    """Adapters beside every linear of the layers; all else is frozen."""
    model = Language().requires_grad_(False)
    for layer in model.layers:
        for name in ("q", "v", "o", "up", "down"):
            setattr(layer, name, Adapter(getattr(layer, name)))
    return _language(model)


# ---------------------------------------------------------------- batches and outputs


class Features(nn.Module):
    """Two layers on [batch, features]; subclasses take and give them in other forms."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def scores(self, x: Tensor) -> Tensor:
        """[batch, 6] to [batch, 4]."""
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class OneTensor(Features):
    """Takes a tensor, returns its loss."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the scores."""
        return self.scores(x).square().mean()


class Positional(Features):
    """Takes one tensor by position, returns a tuple."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The scores, and those of what is half as large."""
        return self.scores(x), self.scores(x / 2)


class KeywordOnly(Features):
    """Takes keywords only, an optional one among them; returns a dict in a dict."""

    def forward(self, *, x: Tensor, scale: Tensor, shift: Tensor | None = None) -> dict[str, Any]:
        """The scaled scores."""
        assert shift is None
        return {"out": {"scores": self.scores(x) * scale[:, None]}, "n": 2, "none": None}


class Nested(Features):
    """Takes a dict of a dict and a list."""

    def forward(self, inputs: dict[str, Any]) -> list[Tensor]:
        """The scores of what is inside."""
        first, (second, third) = inputs["first"]["x"], inputs["others"]
        return [self.scores(first + second), self.scores(third)]


@dataclass
class Scores:
    """What a model of dataclasses returns."""

    scores: Tensor
    loss: Tensor | None = None


class Dataclass(Features):
    """Returns a dataclass, its loss within."""

    def forward(self, x: Tensor, y: Tensor) -> Scores:
        """Scores and their cross-entropy."""
        scores = self.scores(x)
        return Scores(scores, F.cross_entropy(scores, y))


@dataclass
class Output(ModelOutput):
    """Hugging Face's kind of output."""

    loss: Tensor | None = None
    scores: Tensor | None = None


class ReturnsModelOutput(Features):
    """Returns Hugging Face's kind of output."""

    def forward(self, x: Tensor, y: Tensor) -> Output:
        """Scores and their cross-entropy."""
        scores = self.scores(x)
        return Output(loss=F.cross_entropy(scores, y), scores=scores)


class Pair(NamedTuple):
    """What a model of named tuples returns."""

    scores: Tensor
    hidden: Tensor


class ReturnsNamed(Features):
    """Returns a named tuple."""

    def forward(self, x: Tensor) -> Pair:
        """Scores and what they come from."""
        hidden = torch.tanh(self.up(x))
        return Pair(self.down(hidden), hidden)


def _cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores, y)


def tuple_loss(outputs: Any, batch: Any) -> Tensor:
    """Of a tuple's two scores against the batch's last element."""
    return _cross_entropy(outputs[0], batch[-1]) + 0.5 * _cross_entropy(outputs[1], batch[-1])


def keyword_loss(outputs: Any, batch: Any) -> Tensor:
    """Of a dict in a dict."""
    return _cross_entropy(outputs["out"]["scores"], batch["y"])


def nested_loss(outputs: Any, batch: Any) -> Tensor:
    """Of a list."""
    target = batch["targets"]["y"]
    return _cross_entropy(outputs[0], target) + _cross_entropy(outputs[1], target)


def attribute_loss(outputs: Any, batch: Any) -> Tensor:
    """Of an object with scores."""
    return _cross_entropy(outputs.scores, batch["y"])


def _features(model: nn.Module, form: Callable[[Tensor, Tensor], Any], loss: Any = None) -> Job:
    torch.manual_seed(7)
    x, y = torch.randn(SAMPLES, 6, dtype=torch.float64), torch.randint(0, 4, (SAMPLES,))
    return Job(_filled(model), form(x, y), loss)


def _pair(x: Tensor, y: Tensor) -> Any:
    return {"x": x, "y": y}


def _nested(x: Tensor, y: Tensor) -> Any:
    inner = {"first": {"x": x}, "others": [x * 2, x + 1]}
    return {"inputs": inner, "targets": {"y": y}}


BATCHES: dict[str, Callable[[], Job]] = {
    "one_tensor": lambda: _features(OneTensor(), lambda x, y: x),
    "tuple": lambda: _features(Positional(), lambda x, y: (x, y), tuple_loss),
    "list": lambda: _features(Positional(), lambda x, y: [x, y], tuple_loss),
    "keyword_only": lambda: _features(
        KeywordOnly(), lambda x, y: {"x": x, "scale": x[:, 0], "shift": None, "y": y}, keyword_loss
    ),
    "nested": lambda: _features(Nested(), _nested, nested_loss),
    "dataclass": lambda: _features(Dataclass(), _pair),
    "dataclass_and_loss": lambda: _features(Dataclass(), _pair, attribute_loss),
    "model_output": lambda: _features(ReturnsModelOutput(), _pair),
    "model_output_and_loss": lambda: _features(ReturnsModelOutput(), _pair, attribute_loss),
    "named_tuple": lambda: _features(ReturnsNamed(), _pair, attribute_loss),
}
"""Forms of batches and outputs."""
FROZEN: dict[str, Callable[[], Job]] = {
    "frozen_embedding": frozen_embedding,
    "frozen_layers": frozen_layers,
    "adapters": adapters,
}
LANGUAGE: dict[str, Callable[[], Job]] = {
    "masked": masked,
    "masked_gpt2": masked_gpt2,
    "masked_bert": masked_bert,
    "rotary": lambda: _language(Language(layer=RotaryLayer)),
    "tied": lambda: _language(Language(tied=True)),
    "tied_thrice": tied_thrice,
    "albert": lambda: _language(Albert()),
    "aliased": lambda: _language(Aliased()),
    "hugging_face_albert": hugging_face_albert,
}

"""The batch to plan for where the user gives none: the model's own example, or one derived from a
Hugging Face model's config and forward signature."""

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from autopar.batch_spec import batch_text, describe_batch
from autopar.errors import AutoparError

LONGEST = 2048
"""Tokens of a sequence at most, where the config allows more."""

Labels = Literal["token", "sample"]
HEADS: Mapping[str, tuple[str, Labels]] = MappingProxyType(
    {
        "LMHeadModel": ("input_ids", "token"),
        "ForCausalLM": ("input_ids", "token"),
        "ForMaskedLM": ("input_ids", "token"),
        "ForTokenClassification": ("input_ids", "token"),
        "ForSequenceClassification": ("input_ids", "sample"),
        "ForImageClassification": ("pixel_values", "sample"),
    }
)
"""How a Hugging Face class's name ends → its input, and whether a label belongs to each token or
to each sample. The signature says only that there are labels, not which shape they have."""


def batch_or_default(model: nn.Module, batch: Any, devices: int) -> tuple[Any, tuple[str, ...]]:
    """The batch that was given, or a derived one with what was assumed.

    Errors: AutoparError where none was given and none can be derived.
    """
    if batch is not None:
        return batch, ()
    example = getattr(model, "example_input_array", None)
    if example is not None:
        text = batch_text(describe_batch(example))
        return example, (f"no batch was given: {text}, the model's example_input_array",)
    config = getattr(model, "config", None)
    if not isinstance(getattr(config, "model_type", None), str):
        raise _underivable(model, "it has no example_input_array and no Hugging Face config")
    return _from_config(model, config, devices)


def _underivable(model: nn.Module, why: str) -> AutoparError:
    return AutoparError(
        f"no batch was given and none can be derived for {type(model).__name__}: {why}. Pass "
        "batch, what one optimizer step takes over the whole cluster; meta tensors will do"
    )


def _from_config(model: nn.Module, config: Any, devices: int) -> tuple[Any, tuple[str, ...]]:
    taken, labels = _head(model)
    if taken == "input_ids":
        length, source = _sequence(model, config)
        main = torch.empty((devices, length), dtype=torch.int64, device="meta")
    else:
        main, source = _image(model, config, devices)
    if labels == "sample":
        _check_classes(model, config)
    shape = tuple(main.shape) if labels == "token" else (devices,)
    batch = {taken: main, "labels": torch.empty(shape, dtype=torch.int64, device="meta")}
    text = batch_text(describe_batch(batch))
    return batch, (
        f"no batch was given: {text}, one sample a device, {source} from {type(config).__name__}",
    )


def _head(model: nn.Module) -> tuple[str, Labels]:
    """The model's input and the kind of its labels."""
    parameters = inspect.signature(model.forward).parameters
    names = [cls.__name__ for cls in type(model).__mro__]
    head = next((HEADS[end] for name in names for end in HEADS if name.endswith(end)), None)
    if head is None:
        raise _underivable(model, f"its class's name ends in none of {', '.join(HEADS)}")
    for needed in (head[0], "labels"):
        if needed not in parameters:
            raise _underivable(model, f"its forward takes no {needed}")
    others = [n for n in ("input_ids", "pixel_values", "decoder_input_ids") if n in parameters]
    if others != [head[0]]:
        raise _underivable(model, f"its forward takes {' and '.join(others)}")
    return head


def _sequence(model: nn.Module, config: Any) -> tuple[int, str]:
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        kind = type(config).__name__
        raise _underivable(
            model, f"{kind} has no max_position_embeddings, which would say how long a text is"
        )
    length = min(longest, LONGEST, *_usable_positions(model))
    return length, f"sequence {length} of max_position_embeddings {longest}"


def _usable_positions(model: nn.Module) -> list[int]:
    """Positions of tables that reserve their first rows up to padding (RoBERTa's)."""
    return [
        module.num_embeddings - module.padding_idx - 1
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and name.endswith("position_embeddings")
        and module.padding_idx is not None
    ]


def _image(model: nn.Module, config: Any, devices: int) -> tuple[torch.Tensor, str]:
    side, channels = (getattr(config, key, None) for key in ("image_size", "num_channels"))
    sides = (side, side) if isinstance(side, int) else tuple(side or ())
    if len(sides) != 2 or not all(isinstance(x, int) for x in (*sides, channels)):
        kind = type(config).__name__
        raise _underivable(
            model, f"{kind} has image_size {side!r} and num_channels {channels!r}, no sizes"
        )
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    image = torch.empty((devices, int(channels or 0), *sides), dtype=dtype, device="meta")
    return image, "image_size and num_channels"


def _check_classes(model: nn.Module, config: Any) -> None:
    problem, classes = getattr(config, "problem_type", None), getattr(config, "num_labels", None)
    single = problem in (None, "single_label_classification")
    if not single or not isinstance(classes, int) or classes < 2:
        given = f"problem_type {problem!r} and num_labels {classes!r}"
        raise _underivable(model, f"with {given} nobody can tell what a label is")

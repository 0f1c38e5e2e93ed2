"""What a training step computes in plain PyTorch: the meaning that a capture must keep."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError

Loss = Callable[[Any, Any], Tensor]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def plain_batch(batch: Any) -> Any:
    """The batch with a mapping of another class (a Hugging Face `BatchEncoding`) as a dict."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def reference_loss(model: nn.Module, batch: Any, loss: Loss | None = None) -> Tensor:
    """The loss of one batch (a 0-d tensor): what autopar parallelises.

    A dict is passed by keyword, a tuple or list by position, a tensor as the one argument. With
    `loss`, the model gets only what its forward takes (a dict's keys that it names, as many leading
    elements of a tuple as it has positional parameters) and `loss(outputs, batch)` sees everything.
    Without it, the outputs must be a 0-d tensor or carry one as `.loss` or `["loss"]`.

    Raises AutoparError where there is no such loss, or where it can't be told what the model takes.
    """
    batch = plain_batch(batch)
    outputs = _call(model, batch, limited=loss is not None)
    result = _own_loss(model, outputs) if loss is None else loss(outputs, batch)
    if not isinstance(result, Tensor) or result.dim() != 0:
        what = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else _kind(result)
        source = "loss(outputs, batch)" if loss is not None else f"{_kind(model)}'s loss"
        raise AutoparError(f"{source} must be a 0-d tensor, got {what}: reduce it to one number")
    return result


def _call(model: nn.Module, batch: Any, limited: bool) -> Any:
    if isinstance(batch, dict):
        return model(**(_accepted(model, batch) if limited else batch))
    if isinstance(batch, (tuple, list)):
        return model(*(_leading(model, batch) if limited else batch))
    if isinstance(batch, Tensor):
        return model(batch)
    raise AutoparError(f"a batch is a tensor, a tuple or a dict of tensors, got {_kind(batch)}")


def _accepted(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return batch
    return {name: value for name, value in batch.items() if name in parameters}


def _leading(model: nn.Module, batch: tuple[Any, ...] | list[Any]) -> list[Any]:
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return list(batch)
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    optional = [p for p in positional if p.default is not inspect.Parameter.empty]
    required = len(positional) - len(optional)
    # With optional parameters nobody can tell a label from a mask: guessing would train on garbage.
    if optional and len(batch) > required:
        raise AutoparError(
            f"a batch of {len(batch)} elements is ambiguous: {_kind(model)}.forward takes"
            f" {required} and optionally {', '.join(p.name for p in optional)}: pass a dict"
        )
    return list(batch[: len(positional)])


def _own_loss(model: nn.Module, outputs: Any) -> Any:
    if isinstance(outputs, Tensor) and outputs.dim() == 0:
        return outputs
    found = getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, Mapping):
        found = outputs.get("loss")
    if found is None:
        what = f"{_kind(outputs)} {tuple(getattr(outputs, 'shape', ()))}".removesuffix(" ()")
        raise AutoparError(
            f"{_kind(model)} returns {what} without a loss: pass loss=, a callable of (outputs,"
            " batch), or let the batch carry the labels that make the model return one"
        )
    return found


def _kind(value: object) -> str:
    return "a tensor" if isinstance(value, Tensor) else type(value).__name__


def tensor_leaves(batch: Any) -> tuple[list[tuple[str, Tensor]], list[Any], Any]:
    """(names and tensors, all leaves, spec) of a batch in pytree order.

    A tensor is named after its keys: `input_ids` in a dict, `batch_0` in a tuple, `batch` alone.
    """
    paths, spec = pytree.tree_flatten_with_path(plain_batch(batch))
    named: list[tuple[str, Tensor]] = []
    for path, leaf in paths:
        if not isinstance(leaf, Tensor):
            continue
        name = "_".join(key_text(key) for key in path) or "batch"
        named.append((name if name.isidentifier() else f"batch_{name}", leaf))
    return named, [leaf for _, leaf in paths], spec


def plain_values(batch: Any) -> dict[str, bool | int | float | str]:
    """What a batch holds beside tensors, by the names that tensors would have; None is nothing.

    Raises AutoparError for values that can't be part of a program.
    """
    found = {}
    for path, leaf in pytree.tree_flatten_with_path(plain_batch(batch))[0]:
        if leaf is None or isinstance(leaf, Tensor):
            continue
        name = "_".join(key_text(key) for key in path) or "batch"
        if type(leaf) not in (bool, int, float, str):
            raise AutoparError(
                f"the batch's {name} is a {type(leaf).__name__}: a batch holds tensors, and bools,"
                " numbers and strings, which become part of the program"
            )
        found[name if name.isidentifier() else f"batch_{name}"] = leaf
    return found


def key_text(key: Any) -> str:
    """One step of a pytree path as text: a dict's key, an index or an attribute."""
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", ""))))

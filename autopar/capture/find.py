"""Where a model repeats itself: its blocks."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
# Counters of layers: they differ without making the layers different. Where one does, the graphs
# that are compared later tell.
_POSITIONS = ("layer_idx", "layer_id", "idx", "index", "layer_number")


@dataclass(frozen=True)
class Candidate:
    """A module that may become a block. Equal signatures: most likely the same computation."""

    path: str
    module: nn.Module
    signature: str


def find_candidates(model: nn.Module) -> tuple[Candidate, ...]:
    """The children of ModuleList and Sequential that have children of their own, in order.

    Of nested ones the outer are taken, unless only the inner repeat (stages made of blocks).
    """
    return _inside(model, "")[0]


def _inside(module: nn.Module, path: str) -> tuple[tuple[Candidate, ...], bool]:
    """The candidates below a module, and whether two of them are alike."""
    children = [(f"{path}.{name}" if path else name, c) for name, c in module.named_children()]
    below = [_inside(child, child_path) for child_path, child in children]
    if not isinstance(module, _CONTAINERS):
        return sum((inner for inner, _ in below), ()), any(repeats for _, repeats in below)
    own = [
        _candidate(*child, bool(inner)) for child, (inner, _) in zip(children, below, strict=True)
    ]
    counts = Counter(candidate.signature for candidate in own if candidate)
    repeats = any(n > 1 for n in counts.values())
    found: tuple[Candidate, ...] = ()
    for candidate, (inner, inner_repeats) in zip(own, below, strict=True):
        if candidate is None or (not repeats and inner_repeats):
            found += inner
        else:
            found += (candidate,)
    return found, repeats or any(inner_repeats for _, inner_repeats in below)


def _candidate(path: str, module: nn.Module, has_inner: bool) -> Candidate | None:
    leaf = not any(True for _ in module.children())
    if leaf or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return None
    if type(module) is nn.Sequential and has_inner:
        return None
    return as_candidate(path, module)


def as_candidate(path: str, module: nn.Module) -> Candidate:
    """A module as a candidate, whatever it is."""
    return Candidate(path, module, _signature(module))


def _signature(module: nn.Module) -> str:
    return repr([(name, *_own_signature(child)) for name, child in module.named_modules()])


def _own_signature(module: nn.Module) -> tuple[Any, ...]:
    kind = type(module)
    tensors = [
        (name, tuple(t.shape), str(t.dtype), t.requires_grad)
        for store in (module._parameters, module._buffers)
        for name, t in store.items()
        if t is not None
    ]
    values = sorted(
        (name, _text(value))
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _POSITIONS and _text(value) is not None
    )
    own_text = "" if isinstance(module, _CONTAINERS) else module.extra_repr()
    return f"{kind.__module__}.{kind.__qualname__}", own_text, tensors, values


def _text(value: Any) -> str | None:
    """A plain value or a function as text; None for what can't be compared."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (tuple, list)):
        items = [_text(item) for item in value]
        return None if None in items else repr(items)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    return None


def without_shared(
    model: nn.Module, candidates: tuple[Candidate, ...]
) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """The candidates that own all their parameters, and a note on those that don't.

    A parameter that two layers share, or a layer and the rest, has uses in two graphs: its layers
    stay in the skeleton, where it has one.
    """
    owner: dict[int, set[str]] = {}
    prefixes = {candidate.path for candidate in candidates}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner.setdefault(id(parameter), set()).add(_owner(name, prefixes))
    kept, notes = [], []
    for candidate in candidates:
        others = {o for p in candidate.module.parameters() for o in owner[id(p)]} - {candidate.path}
        if others:
            with_whom = ", ".join(sorted(o or "the rest of the model" for o in others))
            notes.append(f"{candidate.path} stays inline: it shares parameters with {with_whom}")
        else:
            kept.append(candidate)
    return tuple(kept), tuple(notes)


def _owner(name: str, prefixes: set[str]) -> str:
    parts = name.split(".")
    paths = (".".join(parts[:i]) for i in range(1, len(parts)))
    return next((path for path in paths if path in prefixes), "")

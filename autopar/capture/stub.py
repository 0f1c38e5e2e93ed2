"""Standing in for layers while the skeleton is traced, and recording how each was called."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.utils import _pytree as pytree

from autopar.capture.find import Candidate
from autopar.capture.layer_op import TensorMeta, encode, layer_op
from autopar.capture.reference import key_text

_CONSTANTS = (int, float, str, bool, type(None), torch.dtype, torch.device)


class NotStubbedError(Exception):
    """A layer that is used in a way that a call of one op can't stand for."""


@dataclass(frozen=True)
class LayerCall:
    """One layer's call. `leaves` are those of (args, kwargs), tensors as TensorMeta; `names` are
    the tensors' names in the layer's forward; `needs_grad` is aligned with them."""

    candidate: Candidate
    leaves: tuple[Any, ...]
    spec: Any
    names: tuple[str, ...]
    needs_grad: tuple[bool, ...]
    signature: str
    """Equal for calls that (most likely) run the same graph."""

    @property
    def inputs(self) -> tuple[TensorMeta, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorMeta))

    def arguments(self, tensors: tuple[Tensor, ...]) -> tuple[Any, Any]:
        """(args, kwargs) with these tensors in the places of the recorded ones."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, TensorMeta) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(frozen=True)
class Result:
    """What a layer returned: its leaves, tensors as (TensorMeta, requires_grad), and their tree."""

    leaves: tuple[Any, ...]
    spec: Any


@dataclass
class Recorder:
    """What one trace of the skeleton sees of its layers.

    `refused`: layers that can't be stubbed, and why. `touched`: layers of which the model reads
    more than the result; that is harmless unless it computes with their weights. `known`: results
    of layers that can't run on fake tensors. `real`: how to run those instead of looking them up.
    `failed`: the layer that raised, with the error.
    """

    known: Mapping[str, Result] = field(default_factory=dict)
    real: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    failed: tuple[Candidate, Exception] | None = None

    calls: dict[str, LayerCall] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    touched: dict[str, str] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    _names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _results: dict[tuple[str, tuple[bool, ...]], Result] = field(default_factory=dict)

    def refuse(self, candidate: Candidate, reason: str) -> NotStubbedError:
        self.refused[candidate.path] = reason
        return NotStubbedError(f"{candidate.path}: {reason}")

    def call(self, candidate: Candidate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call; one node in the trace; outputs as the real layer's."""
        # Function modes would look at every attribute of a tensor that is read here.
        with torch._C.DisableTorchFunction():
            return self._call(candidate, args, kwargs)

    def _call(self, candidate: Candidate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if candidate.path in self.calls:
            raise self.refuse(candidate, "it is called more than once in a step")
        values, spec = pytree.tree_flatten((args, kwargs))
        leaves = tuple(self._described(candidate, value) for value in values)
        signature = repr((candidate.signature, leaves, str(spec)))
        if signature not in self._names:
            self._names[signature] = _argument_names(candidate.module, args, kwargs)
        needs_grad = tuple(v.requires_grad for v in values if isinstance(v, Tensor))
        call = LayerCall(candidate, leaves, spec, self._names[signature], needs_grad, signature)
        key = (signature, needs_grad)
        if key not in self._results:
            self._results[key] = self._run(candidate, args, kwargs)
        self.calls[candidate.path] = call
        self.results[candidate.path] = self._results[key]
        tensors = [value for value in values if isinstance(value, Tensor)]
        return _replay(self._results[key], tensors, candidate.path)

    def _described(self, candidate: Candidate, value: Any) -> Any:
        if isinstance(value, Tensor):
            return TensorMeta.of(value)
        if not isinstance(value, _CONSTANTS):
            raise self.refuse(candidate, f"it takes or returns a {type(value).__name__}")
        return value

    def _run(self, candidate: Candidate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        """The real layer, run once beside the trace to learn its outputs."""
        if candidate.path in self.known:
            return self.known[candidate.path]
        tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        versions = [tensor._version for tensor in tensors]
        run = self.real.get(candidate.path, lambda args, kwargs: candidate.module(*args, **kwargs))
        try:
            with disable_proxy_modes_tracing():
                outputs = run(args, kwargs)
            _check_shapes(outputs)
        except Exception as error:
            self.failed = (candidate, error)
            raise
        if versions != [tensor._version for tensor in tensors]:
            raise self.refuse(candidate, "it changes its inputs in place")
        values, spec = pytree.tree_flatten(outputs)
        leaves = tuple(
            (self._described(candidate, v), v.requires_grad)
            if isinstance(v, Tensor)
            else self._described(candidate, v)
            for v in values
        )
        return Result(leaves, spec)


def _check_shapes(outputs: Any) -> None:
    """A layer's results have sizes, not symbols for them."""
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor) and any(not isinstance(n, int) for n in leaf.shape):
            raise RuntimeError(f"data-dependent: it returns a tensor of shape {tuple(leaf.shape)}")
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise RuntimeError("data-dependent: it returns a number that depends on values")


def _replay(result: Result, tensors: list[Tensor], path: str) -> Any:
    described = [leaf for leaf in result.leaves if isinstance(leaf, tuple)]
    with _without_stack_traces():
        outputs = iter(layer_op()(tensors, path, encode([meta for meta, _ in described])))
    leaves = []
    for leaf in result.leaves:
        if not isinstance(leaf, tuple):
            leaves.append(leaf)
            continue
        output = next(outputs)
        # The op knows no gradients; later layers must still see that their inputs need one.
        leaves.append(output.requires_grad_() if leaf[1] else output)
    return pytree.tree_unflatten(leaves, result.spec)


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Nobody reads from which line a layer was called, and telling takes as long as the call."""
    mode = get_proxy_mode()
    tracer: Any = None if mode is None else mode.tracer
    before = tracer is not None and tracer.record_stack_traces
    if before:
        tracer.record_stack_traces = False
    try:
        yield
    finally:
        if before:
            tracer.record_stack_traces = True


def _argument_names(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, ...]:
    """Readable names for the tensors of a call: the parameter's, with the path inside a tuple."""
    positional = list(inspect.signature(module.forward).parameters)
    names = []
    for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, Tensor):
            first = key_text(path[1])
            if first.isdigit():
                place = int(first)
                first = positional[place] if place < len(positional) else f"arg_{first}"
            names.append("_".join([first, *map(key_text, path[2:])]))
    return tuple(names)


class _Stub(nn.Module):
    """A module without parameters in a layer's place. Plain attributes are the layer's."""

    def __init__(self, candidate: Candidate, recorder: Recorder) -> None:
        nn.Module.__init__(self)  # and not the layer's, which comes next in the MRO
        self.__dict__["_candidate"] = candidate
        self.__dict__["_recorder"] = recorder
        self.__dict__["training"] = candidate.module.training

    @classmethod
    def of(cls, candidate: Candidate, recorder: Recorder) -> "_Stub":
        """A stub that is an instance of the layer's class too: models branch on isinstance."""
        kind = type(candidate.module)
        both = type(kind.__name__, (cls, kind), {"__module__": kind.__module__})
        stub: _Stub = both(candidate, recorder)
        return stub

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.__call__(self, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorder.call(self._candidate, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_candidate"].module, name)
        if isinstance(value, (Tensor, nn.Module)) or inspect.ismethod(value):
            self._touch(f"the model uses its {name} from outside")
        return value

    def __iter__(self) -> Any:
        self._touch("the model iterates over it")
        return iter(self._candidate.module)

    def __len__(self) -> int:
        return len(self._candidate.module)

    def __getitem__(self, index: Any) -> Any:
        self._touch("the model indexes it")
        return self._candidate.module[index]

    def __bool__(self) -> bool:
        return True

    def _touch(self, how: str) -> None:
        self._recorder.touched.setdefault(self._candidate.path, how)


@contextmanager
def stubbed(
    model: nn.Module, candidates: tuple[Candidate, ...], recorder: Recorder
) -> Iterator[None]:
    """The model with a stub in each candidate's place; the real layers are back afterwards.

    Attributes and hooks that its first forward adds go too: it would believe that it has hooked
    layers which weren't there.
    """
    saved: list[tuple[dict[str, Any], str, nn.Module]] = []
    before = [(m, set(vars(m)), dict(m._forward_hooks)) for m in model.modules()]
    try:
        for candidate in candidates:
            parent, _, name = candidate.path.rpartition(".")
            modules = model.get_submodule(parent)._modules
            saved.append((modules, name, candidate.module))
            modules[name] = _Stub.of(candidate, recorder)
        yield
    finally:
        for modules, name, module in saved:
            modules[name] = module
        for module, names, hooks in before:
            for name in set(vars(module)) - names:
                delattr(module, name)
            for key in set(module._forward_hooks) - set(hooks):
                del module._forward_hooks[key]

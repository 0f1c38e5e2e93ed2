"""Layers that do what one before them did, with other sizes: traced without torch.export.

`torch.export` takes some ten milliseconds of each layer, most of it for what doesn't depend on
sizes. A layer of the same classes as one that was exported is therefore run once on fake tensors
while its ops are recorded. Where they are the exported ones, one for one (the same ops on the same
values, the same arguments but for whole numbers), its graph is the exported one with its own
numbers and shapes. Where anything differs, it is exported.
"""

import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _compiling_state_context
from torch._guards import detect_fake_mode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.export import ExportedProgram
from torch.export._trace import _ignore_backend_decomps
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.fake import fake_like
from autopar.capture.stub import LayerCall

_PIECES = (list, tuple)


@dataclass(frozen=True)
class Traced:
    """What `to_graph` reads of an exported program."""

    graph_module: Any
    graph_signature: Any
    state_dict: Mapping[str, Any]
    constants: Mapping[str, Any]


@dataclass(frozen=True)
class _Holder:
    graph: Graph


def kind_of(call: LayerCall) -> str:
    """Equal for calls that may do the same with other sizes."""
    module = call.candidate.module
    classes = [
        (name, type(m).__qualname__, type(m).__module__) for name, m in module.named_modules()
    ]
    weights = [
        (name, str(t.dtype), t.dim(), t.requires_grad)
        for name, t in (*module.named_parameters(), *module.named_buffers())
    ]
    inputs = [(str(meta.dtype), len(meta.shape)) for meta in call.inputs]
    return repr((classes, weights, inputs, call.names, call.needs_grad, str(call.spec)))


def traced_as(
    exported: ExportedProgram, program: nn.Module, tensors: Sequence[Tensor]
) -> Traced | None:
    """The program, which does the same as the exported one; None where it doesn't."""
    outputs, calls = _recorded(program, tensors)
    walk = _Walk(iter(calls), outputs)
    graph = walk.copied(exported, program, tensors)
    if graph is None or next(walk.calls, None) is not None:
        return None
    state = {**program.state_dict(keep_vars=True)}
    return Traced(_Holder(graph), exported.graph_signature, state, {})


# ---------------------------------------------------------------- recording


@dataclass(frozen=True)
class _Call:
    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    with_grad: bool


class _Recorder(SchemaCheckMode):
    """Records ops as torch.export sees them, before autograd and before they are decomposed.

    Of the few modes that torch lets see ops there this is the one that others may derive from."""

    def __init__(self) -> None:
        given = torch._C.DispatchKey.PreDispatch
        TorchDispatchMode.__init__(self, _dispatch_key=given)
        self.calls: list[_Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append(_Call(func, args, kwargs or {}, result, torch.is_grad_enabled()))
        return result


def _recorded(program: nn.Module, tensors: Sequence[Tensor]) -> tuple[Any, list[_Call]]:
    recorder = _Recorder()
    # Tensors that a program makes itself are fake only while the mode is on.
    mode = detect_fake_mode(list(tensors)) or nullcontext()
    # What torch.export sets, too.
    with (
        mode,
        _compiling_state_context(),
        _ignore_backend_decomps(),
        enable_python_dispatcher(),
        recorder,
    ):
        outputs = program(*tensors)
    return outputs, recorder.calls


# ---------------------------------------------------------------- comparing


class _DiffersError(Exception):
    """The layer doesn't do what the exported one does."""


@dataclass
class _Walk:
    """Goes through an exported graph and the recorded calls at once."""

    calls: Any
    outputs: Any

    def copied(
        self, exported: ExportedProgram, program: nn.Module, tensors: Sequence[Tensor]
    ) -> Graph | None:
        """The exported graph with the recorded numbers and values; None where they differ."""
        own = _inputs(exported, program, tensors)
        if own is None:
            return None
        graph, values, copies = Graph(), dict[Node, Any](), dict[Node, Node]()
        try:
            for node in exported.graph.nodes:
                if node.op == "output":
                    self._check_outputs(node, values)
                    graph.output(torch.fx.map_arg(node.args[0], lambda n: copies[n]))
                    return graph
                args, kwargs = node.args, node.kwargs
                if node.op == "placeholder":
                    values[node] = own[node.name]
                elif node.target is operator.getitem:
                    values[node] = values[node.args[0]][node.args[1]]
                elif isinstance(node.target, torch._ops.OpOverload):
                    call = next(self.calls, None)
                    if call is None or call.op is not node.target or not call.with_grad:
                        return None
                    args, kwargs = _arguments(node, call, values)
                    values[node] = call.result
                else:
                    return None  # a region of its own
                args, kwargs = torch.fx.map_arg((args, kwargs), lambda n: copies[n])
                copy = graph.create_node(node.op, node.target, args, kwargs, node.name)
                copy.meta = {**node.meta, "val": _described(values[node], node.meta["val"])}
                copy.meta.pop("tensor_meta", None)
                copies[node] = copy
        except _DiffersError:
            return None
        raise AssertionError("a graph without an output")

    def _check_outputs(self, node: Node, values: Mapping[Node, Any]) -> None:
        given = pytree.tree_leaves(self.outputs)
        wanted = node.args[0]
        assert isinstance(wanted, _PIECES)
        if len(given) != len(wanted):
            raise _DiffersError
        for one, other in zip(wanted, given, strict=True):
            if not isinstance(one, Node) or not _is(values[one], other):
                raise _DiffersError


def _inputs(
    exported: ExportedProgram, program: nn.Module, tensors: Sequence[Tensor]
) -> dict[str, Tensor] | None:
    """The program's tensors by the exported placeholders' names; None where it has others."""
    own: dict[str, Tensor] = {
        **dict(program.named_parameters(remove_duplicate=False)),
        **dict(program.named_buffers(remove_duplicate=False)),
    }
    rest, found = iter(tensors), {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            tensor = next(rest, None)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            tensor = own.get(str(spec.target))
        else:
            return None  # a constant may depend on sizes
        if tensor is None:
            return None
        found[spec.arg.name] = tensor
    return found


def _arguments(
    node: Node, call: _Call, values: Mapping[Node, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The exported op's arguments with the call's whole numbers. Errors: _DiffersError."""
    schema = call.op._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    given |= dict(zip((a.name for a in schema), call.args, strict=False)) | dict(call.kwargs)
    names = [a.name for a in schema][: len(node.args)]
    if given.keys() - {*names, *node.kwargs} - {a.name for a in schema if a.has_default_value()}:
        raise _DiffersError
    wanted = dict(zip(names, node.args, strict=True)) | dict(node.kwargs)
    for a in schema:
        if a.name not in wanted and given.get(a.name) != a.default_value:
            raise _DiffersError
    found = {name: _same(value, given.get(name), values) for name, value in wanted.items()}
    args = tuple(found.pop(name) for name in names)
    return args, found


def _same(node: Any, given: Any, values: Mapping[Node, Any]) -> Any:
    """The exported arguments with the given whole numbers. Errors: _DiffersError."""
    if isinstance(node, Node):
        if not _is(values[node], given):
            raise _DiffersError
        return node
    if isinstance(node, _PIECES) and isinstance(given, _PIECES):
        if len(node) != len(given):
            raise _DiffersError
        pieces = [_same(a, b, values) for a, b in zip(node, given, strict=True)]
        return tuple(pieces) if isinstance(node, tuple) else pieces
    if isinstance(node, dict):
        if node.keys() != given.keys():
            raise _DiffersError
        return {key: _same(node[key], given[key], values) for key in node}
    if type(node) is not type(given) or isinstance(given, Tensor):
        raise _DiffersError
    if type(node) is not int and node != given:
        raise _DiffersError
    return given


def _is(ours: Any, given: Any) -> bool:
    """Whether it is the same value. Torch hands on another object for a tensor that an op makes of
    no other (`arange`) if somebody holds the first: it shares its storage."""
    if ours is given or not (isinstance(ours, Tensor) and isinstance(given, Tensor)):
        return ours is given
    alike = ours.shape == given.shape and ours.stride() == given.stride()
    alike &= ours.dtype == given.dtype and ours.storage_offset() == given.storage_offset()
    return alike and ours.untyped_storage()._cdata == given.untyped_storage()._cdata


def _described(value: Any, before: Any) -> Any:
    """A fake tensor for the graph, which needs a gradient where the exported one does."""
    if isinstance(value, Tensor):
        mode = value.fake_mode  # type: ignore[attr-defined]
        return fake_like(value.detach(), mode).requires_grad_(before.requires_grad)
    if isinstance(value, _PIECES):
        return tuple(_described(a, b) for a, b in zip(value, before, strict=True))
    return value

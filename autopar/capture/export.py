"""From `torch.export` to a captured graph."""

import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from autopar.capture.alike import Traced
from autopar.capture.captured import CapturedGraph, GraphInput
from autopar.capture.clean import clean
from autopar.capture.flatten import flattened
from autopar.capture.reference import Loss, reference_loss
from autopar.capture.stub import LayerCall
from autopar.errors import AutoparError


class SkeletonProgram(nn.Module):
    """The batch's tensors in, the loss out."""

    def __init__(self, model: nn.Module, leaves: list[Any], spec: Any, loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        # Not as attributes of their own: a loss that is a module is no part of the model.
        self.__dict__["_batch"] = (leaves, spec, loss)

    def forward(self, *tensors: Tensor) -> tuple[Tensor]:
        leaves, spec, loss = self.__dict__["_batch"]
        rest = iter(tensors)
        filled = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return (reference_loss(self.model, pytree.tree_unflatten(filled, spec), loss),)


class BlockProgram(nn.Module):
    """A layer as a function of flat tensors."""

    def __init__(self, call: LayerCall) -> None:
        super().__init__()
        self.model = call.candidate.module
        self.__dict__["_call"] = call

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self.__dict__["_call"].arguments(tensors)
        outputs = self.model(*args, **kwargs)
        return tuple(leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor))


def export(program: nn.Module, tensors: tuple[Tensor, ...]) -> ExportedProgram:
    """`torch.export.export`, non-strict."""
    with warnings.catch_warnings():
        # nn.LSTM and its like follow their weights by an attribute; export sees it change.
        warnings.filterwarnings("ignore", r"The tensor attributes? \S*_flat_weights", UserWarning)
        return torch.export.export(program, tensors, strict=False)


def to_graph(
    name: str, program: ExportedProgram | Traced, inputs: tuple[GraphInput, ...]
) -> CapturedGraph:
    """The cleaned graph of a SkeletonProgram or BlockProgram. `inputs` are named as wanted and
    aligned with the program's tensors; parameters get the names that they have in its `model`,
    of tied ones the first."""
    graph = flattened(program.graph_module)
    owners = _owners(program)
    kinds = {s.arg.name: (s.kind, s.target) for s in program.graph_signature.input_specs}
    params: dict[Node, str] = {}
    buffers: dict[Node, str] = {}
    constants: dict[Node, Tensor] = {}
    users: list[Node] = []
    for node in list(graph.nodes):
        if node.op != "placeholder":
            _set_stack(node)
            continue
        kind, target = kinds[node.name]
        if kind is InputKind.USER_INPUT:
            users.append(node)
        elif kind is InputKind.PARAMETER:
            _merge(params, node, owners[target])
        elif kind is InputKind.BUFFER:
            _merge(buffers, node, target.removeprefix("model."))
        else:
            constants[node] = _constant(name, target, program)
    clean(graph, users)
    assert len(users) == len(inputs), f"{name}: {len(users)} inputs traced, {len(inputs)} given"
    wanted = {node: given.node for node, given in zip(users, inputs, strict=True)}
    for store, prefix in ((params, "p"), (buffers, "b")):
        wanted |= {node: f"{prefix}_{_identifier(own)}" for node, own in store.items()}
    graph, names = renamed(graph, wanted)
    return CapturedGraph(
        name=name,
        graph=graph,
        params={names[n]: own for n, own in params.items() if n in names},
        buffers={names[n]: own for n, own in buffers.items() if n in names},
        constants={names[n]: value for n, value in constants.items() if n in names},
        inputs=tuple(
            GraphInput(names[n], i.requires_grad) for n, i in zip(users, inputs, strict=True)
        ),
    )


def _owners(program: ExportedProgram | Traced) -> dict[str, str]:
    """For each parameter of the program the first name in its model of what it is tied to."""
    first: dict[int, str] = {}
    owners: dict[str, str] = {}
    for name, parameter in program.state_dict.items():
        own = first.setdefault(id(parameter), name.removeprefix("model."))
        owners[name] = own
    return owners


def _merge(store: dict[Node, str], node: Node, own: str) -> None:
    """Keep one placeholder for each owner."""
    for other, name in store.items():
        if name == own:
            node.replace_all_uses_with(other)
    store[node] = own


def foreign_weights(program: ExportedProgram) -> bool:
    """Whether the program computes with weights that are not its model's."""
    return any(_is_weight(value) for value in program.constants.values())


def _is_weight(value: Any) -> bool:
    return isinstance(value, (FakeTensor, nn.Parameter))


def _constant(name: str, target: str, program: ExportedProgram | Traced) -> Tensor:
    value = program.constants.get(target)
    if not isinstance(value, Tensor) or _is_weight(value):
        kind = f"a {type(value).__name__}"
        raise AutoparError(
            f"{name} uses {kind} ({target.removeprefix('model.')}) that is neither an argument nor"
            " a parameter or buffer of its own: register it as a buffer or pass it to forward"
        )
    return value


def _set_stack(node: Node) -> None:
    """`nn_module_stack` relative to the model: {path: (path, class)}, the model at ""."""
    stack = node.meta.get("nn_module_stack")
    entries = list(stack.values()) if stack else []
    node.meta["nn_module_stack"] = {
        path.removeprefix("model").removeprefix("."): (
            path.removeprefix("model").removeprefix("."),
            kind,
        )
        for path, kind in entries
        if path
    }


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def renamed(graph: Graph, wanted: Mapping[Node, str]) -> tuple[Graph, dict[Node, str]]:
    """A copy with nodes numbered afresh (`view`, `view_1`, …) and placeholders as `wanted`;
    placeholders that are neither wanted inputs nor used are left out."""
    copy = Graph()
    env: dict[Node, Node] = {}
    names: dict[Node, str] = {}
    for node in graph.nodes:
        is_weight = node.op == "placeholder" and node.name[:2] in ("p_", "b_", "c_")
        if is_weight and not node.users:
            continue
        base = wanted.get(node) or re.sub(r"(_\d+)+$", "", node.name) or node.name
        if node.op == "placeholder":
            base = wanted.get(node, node.name)
            new = copy.placeholder(base)
            new.target = new.name
        else:
            args = torch.fx.map_arg(node.args, lambda n: env[n])
            kwargs = torch.fx.map_arg(node.kwargs, lambda n: env[n])
            new = copy.create_node(node.op, node.target, args, kwargs, name=base)
        new.meta = dict(node.meta)
        env[node], names[node] = new, new.name
    copy.lint()
    return copy, names

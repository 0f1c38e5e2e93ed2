"""What autograd keeps, and what is a view of what: a graph's ops run on fake tensors.

Run once on the unsplit graph; the bytes of a split candidate follow by division. Two ops are
recorded as the kernels of accelerators keep them, whatever the CPU does: attention keeps q, k, v,
its output and the logarithms of the rows' sums (Dao et al. 2022), and dropout a mask of one byte.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

Record = tuple[str, str | None, tuple[int, ...], int]


@dataclass(frozen=True)
class Storages:
    """Of a graph that has run. `records`: (op, which of its inputs or results it keeps, or None for
    what it makes for itself, shape, element bytes). `views`: value → the input of its op that it is
    a view of. `strides`: of every value."""

    records: tuple[Record, ...]
    views: Mapping[str, str]
    strides: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Place":
        storage = int(tensor.untyped_storage()._cdata)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(storage, shape, stride, int(tensor.storage_offset()))

    def likeness(self, other: "_Place") -> int:
        """0 for another storage; the same tensor, one of as many elements, another part."""
        if self.storage != other.storage:
            return 0
        same = math.prod(self.shape) == math.prod(other.shape)
        return 3 if self == other else 2 if same else 1


class _Recorder(torch.fx.Interpreter):
    def __init__(self, graph: torch.fx.Graph) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self.current: torch.fx.Node | None = None
        self.places: dict[torch.fx.Node, _Place] = {}
        self.keep: list[Any] = []
        self.saved: dict[tuple[torch.fx.Node, _Place], int] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        self.current = n
        result = _layer_outputs(n) if _is_layer(n) else super().run_node(n)
        self.keep.append(result)
        if isinstance(result, torch.Tensor):
            self.places[n] = _Place.of(result)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packet = getattr(target, "overloadpacket", None)
        if packet is torch.ops.aten.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            return FusedAttention.apply(*args[:3], mask)  # type: ignore[no-untyped-call]
        if packet is torch.ops.aten.dropout and args[1] > 0 and args[2]:
            return torch.native_dropout(args[0], args[1], True)[0]
        return super().call_function(target, args, kwargs)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.keep.append(tensor)
        assert self.current is not None
        self.saved.setdefault((self.current, _Place.of(tensor)), tensor.element_size())
        return tensor

    def found(self) -> Storages:
        """Which values were kept is known at the end, since an op may keep what it returns."""
        records: dict[tuple[str, str | int], Record] = {}
        for (op, place), item_bytes in self.saved.items():
            value = self._value(op, place)
            record = (op.name, value, place.shape, item_bytes)
            records.setdefault((op.name, value or place.storage), record)
        views = {}
        for node, place in self.places.items():
            source = _most_like(place, self._places(_inputs(node)))
            if source is not None:
                views[node.name] = source.name
        strides = {node.name: place.stride for node, place in self.places.items()}
        return Storages(tuple(records.values()), views, strides)

    def _value(self, op: torch.fx.Node, place: _Place) -> str | None:
        """The op's input or result that lies there; of several results the getitems are values."""
        given = _most_like(place, self._places(op.all_input_nodes))
        made = _most_like(place, self._places([op, *op.users]))
        found = given or made
        return None if found is None else found.name

    def _places(self, nodes: list[torch.fx.Node]) -> dict[torch.fx.Node, _Place]:
        return {node: self.places[node] for node in nodes if node in self.places}


def _inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """An op's inputs; of one result among several those of the op that made it."""
    sources = node.all_input_nodes
    if len(sources) == 1 and not isinstance(sources[0].meta["val"], torch.Tensor):
        return list(sources[0].all_input_nodes)
    return list(sources)


def _most_like(place: _Place, others: Mapping[torch.fx.Node, _Place]) -> torch.fx.Node | None:
    """The node whose tensor is this one, or shares its storage; the first of equals."""
    best = max(others, key=lambda n: place.likeness(others[n]), default=None)
    return best if best is not None and place.likeness(others[best]) else None


class FusedAttention(torch.autograd.Function):
    """The shapes of a fused attention kernel and what it keeps; it computes nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        *lead, heads, length, _ = query.shape
        # As kernels lay it out: [batch, sequence, heads, head_dim], so merging heads is a view.
        out = query.new_empty((*lead, length, heads, value.shape[-1])).transpose(-2, -3)
        sums = torch.float64 if query.dtype is torch.float64 else torch.float32
        rows = query.new_empty(query.shape[:-1], dtype=sums)
        kept = [query, key, value, out, rows]
        ctx.save_for_backward(*kept, *([] if mask is None else [mask]))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("only recorded")


def _is_layer(node: torch.fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "autopar"


def _layer_outputs(node: torch.fx.Node) -> list[torch.Tensor]:
    """A layer call runs nothing here: what it saves is recorded on the layer's own graph."""
    return [
        torch.empty_like(v).requires_grad_(v.is_floating_point() or v.is_complex())
        for v in node.meta["val"]
    ]


def storages(graph: torch.fx.Graph) -> Storages:
    """What autograd keeps of a graph, and how its values share storages.

    Placeholders keep the `requires_grad` of their metadata; layer calls save their inputs.
    """
    recorder = _Recorder(graph)
    args = []
    mode = None
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            mode = value.fake_mode
            with mode:
                fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            args.append(fresh.requires_grad_(value.requires_grad and fresh.is_floating_point()))
    assert mode is not None, "a graph without inputs"
    hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda t: t)
    with mode, hooks, torch.enable_grad():
        recorder.run(*args)
    return recorder.found()

"""What autograd keeps: a graph's ops run on fake tensors, with every saved tensor recorded.

Run once on the unsplit graph; the bytes of a split candidate follow by division.
"""

from typing import Any

import torch
import torch.fx

Record = tuple[str, str | None, tuple[int, ...], int]


class _Recorder(torch.fx.Interpreter):
    def __init__(self, graph: torch.fx.Graph) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self.current = ""
        self.owner: dict[int, str] = {}
        self.keep: list[Any] = []
        self.records: dict[tuple[str, int], Record] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        self.current = n.name
        result = _layer_outputs(n) if _is_layer(n) else super().run_node(n)
        self.keep.append(result)
        if isinstance(result, torch.Tensor):  # of several outputs the getitems are the owners
            self.owner.setdefault(_storage(result), n.name)
        return result

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.keep.append(tensor)
        key = _storage(tensor)
        record = (self.current, self.owner.get(key), tuple(tensor.shape), tensor.element_size())
        self.records.setdefault((self.current, key), record)
        return tensor


def _is_layer(node: torch.fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "autopar"


def _layer_outputs(node: torch.fx.Node) -> list[torch.Tensor]:
    """A layer call runs nothing here: what it saves is recorded on the layer's own graph."""
    return [
        torch.empty_like(v).requires_grad_(v.is_floating_point() or v.is_complex())
        for v in node.meta["val"]
    ]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def saved_tensors(graph: torch.fx.Graph) -> tuple[Record, ...]:
    """(op, value that owns the storage or None, shape, element bytes) of each saved tensor.

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
    return tuple(recorder.records.values())

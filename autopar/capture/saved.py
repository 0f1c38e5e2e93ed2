"""What autograd keeps: a graph's ops run on fake tensors, with every saved tensor recorded.

Run once on the unsplit graph; the bytes of a split candidate follow by division. Two ops are
recorded as the kernels of accelerators keep them, whatever the CPU does: attention keeps q, k, v,
its output and the logarithms of the rows' sums (Dao et al. 2022), and dropout a mask of one byte.
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
        self.records: dict[tuple[str, int], tuple[tuple[int, ...], int]] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        self.current = n.name
        result = _layer_outputs(n) if _is_layer(n) else super().run_node(n)
        self.keep.append(result)
        if isinstance(result, torch.Tensor):  # of several outputs the getitems are the owners
            self.owner.setdefault(_storage(result), n.name)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packet = getattr(target, "overloadpacket", None)
        if packet is torch.ops.aten.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            return _Attention.apply(*args[:3], mask)  # type: ignore[no-untyped-call]
        if packet is torch.ops.aten.dropout and args[1] > 0 and args[2]:
            return torch.native_dropout(args[0], args[1], True)[0]
        return super().call_function(target, args, kwargs)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.keep.append(tensor)
        key = _storage(tensor)
        record = (tuple(tensor.shape), tensor.element_size())
        self.records.setdefault((self.current, key), record)
        return tensor

    def found(self) -> tuple[Record, ...]:
        """The records, with owners: known at the end, since an op may keep what it returns."""
        return tuple(
            (op, self.owner.get(key), shape, item_bytes)
            for (op, key), (shape, item_bytes) in self.records.items()
        )


class _Attention(torch.autograd.Function):
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
    return recorder.found()

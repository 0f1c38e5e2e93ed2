"""Counts the collectives that a program issues: operation, axes, bytes."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.process_mesh import ProcessMesh

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")

_KINDS: Mapping[str, str] = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::send": "send",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_out": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "_c10d_functional::broadcast": "broadcast",
    "_c10d_functional::broadcast_": "broadcast",
}

_NO_DATA = frozenset({"_c10d_functional::wait_tensor", "c10d::barrier", "c10d::recv_"})
"""What sends nothing; a receive is counted where it is sent."""

CollectiveKey = tuple[str, tuple[str, ...]]


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives inside a `with`, those of backward and of FSDP2 included.

    `bytes` and `calls` are by (operation, axes): axes of size 1 left out, in mesh order. Bytes are
    those of one rank, the larger of input and output. A collective that it doesn't know, or over a
    group that isn't the mesh's, fails.
    """

    def __init__(self, mesh: ProcessMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[CollectiveKey] = Counter()
        self.calls: Counter[CollectiveKey] = Counter()
        self._mesh = mesh

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if func.namespace in _NAMESPACES and name not in _NO_DATA:
            assert name in _KINDS, f"no rule to count the collective {name}"
            key = _KINDS[name], self._axes_of(func, args, kwargs or {})
            self.calls[key] += 1
            self.bytes[key] += _bytes(func, args, kwargs or {}, result)
        return result

    def _axes_of(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, ...]:
        given = _by_name(func, args, kwargs)
        if "process_group" in given:
            name = str(dist.ProcessGroup.unbox(given["process_group"]).group_name)
        else:
            group = given["group_name"]
            name = str(getattr(group, "group_name", group))
        axes = {one.name: one.axes for one in self._mesh.groups if one.size > 1}
        assert name in axes, f"{func._schema.name} over a group that is not the mesh's"
        return axes[name]


def _by_name(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _bytes(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> int:
    """The larger of what goes in and what comes out on this rank.

    In the c10d namespace outputs are arguments too, so the arguments are taken one by one.
    """
    sides = [*_by_name(func, args, kwargs).values(), result]
    return max(
        sum(leaf.nbytes for leaf in pytree.tree_leaves(side) if isinstance(leaf, Tensor))
        for side in sides
    )

"""ZeRO stages 1 and 2: whole parameters, sharded gradients and optimizer state.

Parameters are ordinary ones, and each rank's optimizer steps its rows of them. Those that one
`shard_state` names are a unit: one collective for all of them, in a flat buffer.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.fsdp import open_shards
from autopar.runtime.leaves import Leaf
from autopar.runtime.parameters import Container
from autopar.runtime.process_mesh import Group

_ops = torch.ops._c10d_functional


def shard_state(
    module: Container, stage: Literal[1, 2], axes: Sequence[str], names: Sequence[str]
) -> None:
    """Shards the optimizer state of parameters that `module` declared, on dim 0 over the group of
    `axes`; at stage 2 the gradients that accumulate over microbatches as well.

    They are all-gathered before the module's first forward of a step, and their gradients
    reduce-scattered, as a sum: at stage 1 in the step's last backward, at stage 2 in every one.
    Several times a module for different parameters. A collective.
    """
    open_shards(module, stage, axes, names)


class ShardedState:
    """Runs the collectives of every `shard_state` of a program.

    The next unit's all-gather is under way while one is used, and a unit's reduce-scatter while
    the backward goes on, so that at most two units' buffers exist at a time.
    """

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        self.units = _units(leaves)
        self._last = True
        self._scattering: _Unit | None = None
        for index, unit in enumerate(self.units):
            following = self.units[index + 1] if index + 1 < len(self.units) else None
            before: Any = partial(self._before_forward, unit, following)
            unit.module.register_forward_pre_hook(before)
            for leaf in unit.leaves:
                arrived = _weakly(self._arrived, unit)
                leaf.registered.register_post_accumulate_grad_hook(arrived)

    def begin(self) -> None:
        """Before a step's (or an evaluation's) first forward: parameters may have changed."""
        for unit in self.units:
            unit.expire()
        self._scattering = None

    def begin_backward(self, last: bool) -> None:
        """Before the backward of a microbatch; `last`: of the step's last one."""
        self._last = last
        for unit in self.units:
            unit.missing = len(unit.leaves)

    def end_backward(self) -> None:
        """After it: all that is due is done."""
        for unit in self.units:
            if unit.missing and self._due(unit):  # some of its parameters had no gradient
                self._scatter(unit)
        self._wait()

    def _due(self, unit: "_Unit") -> bool:
        return unit.stage == 2 or self._last

    def _before_forward(
        self, unit: "_Unit", following: "_Unit | None", module: nn.Module, inputs: Any
    ) -> None:
        if unit.stale:
            unit.start_gather()
            if following is not None and following.stale:
                following.start_gather()
            unit.end_gather()

    def _arrived(self, unit: "_Unit", parameter: Tensor) -> None:
        unit.missing -= 1
        if not unit.missing and self._due(unit):
            self._scatter(unit)

    def _scatter(self, unit: "_Unit") -> None:
        self._wait()
        unit.start_scatter()
        self._scattering = unit

    def _wait(self) -> None:
        if self._scattering is not None:
            self._scattering.end_scatter()
        self._scattering = None


class _Unit:
    """Parameters of one module, sharded alike and of one dtype."""

    def __init__(self, leaves: Sequence[Leaf], group: Group) -> None:
        self.leaves, self.group = tuple(leaves), group
        self.module, self.stage = leaves[0].module, leaves[0].stage
        self.stale = True
        """Whether other ranks' optimizers may have stepped their rows since the last all-gather."""
        self.missing = 0
        """How many gradients the backward under way has yet to give."""
        self._gather: Tensor | None = None
        self._scatter: tuple[list[Leaf], Tensor] | None = None

    def expire(self) -> None:
        self.stale = True
        if self._gather is not None:  # a forward that failed left it
            _ops.wait_tensor(self._gather)
        if self._scatter is not None:  # a backward
            _ops.wait_tensor(self._scatter[1])
        self._gather = self._scatter = None

    def start_gather(self) -> None:
        if self._gather is None:
            pieces = [F.pad(flat, (0, size - len(flat))) for flat, size in self._flat_values()]
            mine = torch.cat(pieces)
            self._gather = _ops.all_gather_into_tensor(mine, self.group.size, self.group.name)

    def end_gather(self) -> None:
        assert self._gather is not None
        rows = _ops.wait_tensor(self._gather).view(self.group.size, -1)
        with torch.no_grad():
            parts = rows.split(_sizes(self.leaves, self.group), dim=1)
            for leaf, part in zip(self.leaves, parts, strict=True):
                whole = leaf.registered
                if len(whole) % self.group.size == 0:
                    whole.view(part.shape).copy_(part)
                else:
                    whole.copy_(part.reshape(-1, *whole.shape[1:])[: len(whole)])
        self._gather, self.stale = None, False

    def _flat_values(self) -> Iterable[tuple[Tensor, int]]:
        flat = (leaf.value.detach().flatten() for leaf in self.leaves)
        return zip(flat, _sizes(self.leaves, self.group), strict=True)

    def start_scatter(self) -> None:
        """Takes the parameters' gradients away."""
        found = [(leaf, leaf.registered.grad) for leaf in self.leaves]
        grads = {leaf: grad for leaf, grad in found if grad is not None}
        if grads:
            rows = torch.cat([_rows(grad, self.group.size) for grad in grads.values()], dim=1)
            for leaf in grads:
                leaf.registered.grad = None
            mine = _ops.reduce_scatter_tensor(
                rows.view(-1), "sum", self.group.size, self.group.name
            )
            self._scatter = list(grads), mine

    def end_scatter(self) -> None:
        """Adds this rank's rows of the sum to the gradients of the leaves' values."""
        if self._scatter is None:
            return
        leaves, mine = self._scatter
        parts = _ops.wait_tensor(mine).split(_sizes(leaves, self.group))
        for leaf, part in zip(leaves, parts, strict=True):
            grad = part.view(-1, *leaf.value.shape[1:])[: len(leaf.value)]
            if leaf.value.grad is None:
                leaf.value.grad = grad
            else:
                leaf.value.grad += grad
        self._scatter = None


def _weakly(method: Callable[["_Unit", Tensor], None], unit: "_Unit") -> Any:
    """The method as a hook that keeps nothing alive: the garbage collector doesn't see into a
    parameter's hooks, so that one which held its own parameter would hold it for ever."""
    known, owner = weakref.WeakMethod(method), weakref.ref(unit)

    def call(parameter: Tensor) -> None:
        found, its = known(), owner()
        assert found is not None and its is not None, "the program is gone, its weights are used"
        found(its, parameter)

    return call


def _units(leaves: Iterable[Leaf]) -> tuple[_Unit, ...]:
    """In the order of declaration, which is about that of the forward."""
    together: dict[tuple[Any, ...], list[Leaf]] = {}
    for leaf in leaves:
        if leaf.stage in (1, 2) and leaf.shard is not None:
            key = (leaf.module, leaf.stage, leaf.shard, leaf.value.dtype)
            together.setdefault(key, []).append(leaf)
    return tuple(_Unit(found, shard) for (_, _, shard, _), found in together.items())


def _sizes(leaves: Iterable[Leaf], group: Group) -> list[int]:
    """The elements of each leaf's largest shard."""
    shapes = [leaf.registered.shape for leaf in leaves]
    return [-(-shape[0] // group.size) * math.prod(shape[1:]) for shape in shapes]


def _rows(whole: Tensor, pieces: int) -> Tensor:
    """[pieces, elements of a shard]: what each rank gets of `whole`, zeros where it gets less."""
    missing = -len(whole) % pieces
    if missing:
        whole = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
    return whole.reshape(pieces, -1)

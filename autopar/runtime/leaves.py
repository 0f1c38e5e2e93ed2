"""Tensors of this rank, one record each: what forward, optimizer and checkpoints share."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.collectives import all_gather
from autopar.runtime.layout import local_shape, put, take
from autopar.runtime.parameters import Container, Declaration, declared
from autopar.runtime.process_mesh import Group, ProcessMesh


@dataclass(frozen=True, eq=False)
class Leaf:
    """One declared parameter or buffer on this rank.

    `name` and `also` are the plain model's. `value` is the plain local tensor, FSDP2's shard of it
    where FSDP2 manages it; it shares memory with what forward uses, and the optimizer steps it.
    """

    name: str
    also: tuple[str, ...]
    declaration: Declaration
    shard: Group | None
    """The group that FSDP2 shards it over."""
    value: Tensor
    module: Container
    key: str

    @property
    def registered(self) -> Tensor:
        """The parameter or buffer as it stands in the module."""
        if self.declaration.buffer:
            return self.module.get_buffer(self.key)
        return self.module.get_parameter(self.key)

    @property
    def split_axes(self) -> frozenset[str]:
        """The axes along which ranks hold different parts of it."""
        return self.declaration.axes | frozenset(self.shard.axes if self.shard else ())

    @property
    def grad(self) -> Tensor | None:
        """The plain local gradient of `value`, or None where backward gave none."""
        grad = self.registered.grad
        return None if grad is None else local_tensor(grad)

    def whole(self, mesh: ProcessMesh, tensor: Tensor) -> Tensor:
        """The whole tensor, of the registered tensor or of its gradient: a collective."""
        with torch.no_grad():
            part = local_tensor(tensor).detach()
            if self.shard is not None:
                part = self._unsharded(part, mesh)
            group = mesh[tuple(self.declaration.axes)]
            if group.size == 1:
                return part.clone()
            whole = part.new_empty(self.declaration.shape)
            parts = all_gather(part, dim=0, axis=group).chunk(group.size)
            for rank, piece in zip(group.ranks, parts, strict=True):
                coordinate = mesh.layout.coordinate(rank)
                put(whole, piece, self.declaration.dims, mesh.layout, coordinate)
            return whole

    def _unsharded(self, shard: Tensor, mesh: ProcessMesh) -> Tensor:
        """FSDP2's padded shards of dim 0 put together again."""
        assert self.shard is not None
        rows = local_shape(self.declaration.dims, mesh.layout)[0]
        most = -(-rows // self.shard.size)
        padded = shard.new_zeros((most, *shard.shape[1:]))
        padded[: len(shard)] = shard
        return all_gather(padded, dim=0, axis=self.shard)[:rows]

    def store(self, mesh: ProcessMesh, whole: Tensor) -> None:
        """Takes this rank's part of a whole tensor, cast to the declared dtype."""
        if tuple(whole.shape) != self.declaration.shape:
            raise AutoparError(
                f"{self.name} has shape {tuple(whole.shape)} in the weights given; the program's "
                f"is {self.declaration.shape}"
            )
        with torch.no_grad():
            part = take(whole, self.declaration.dims, mesh.layout, mesh.coordinate)
            if self.shard is not None:
                # FSDP2 pads: later ranks may hold less, or nothing.
                chunks = part.chunk(self.shard.size)
                part = chunks[self.shard.rank] if self.shard.rank < len(chunks) else part[:0]
            self.value.copy_(part)


def local_tensor(tensor: Tensor) -> Tensor:
    """FSDP2's shard as a plain tensor; a plain tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def leaves_of(model: Container, mesh: ProcessMesh) -> tuple[Leaf, ...]:
    """All that `model` declared, in order of declaration; call it after `model.shard()`."""
    leaves = []
    for name, module, key, declaration in declared(model):
        prefix = name.removesuffix(key)
        axes = module.fully_sharded.get(key)
        registered = module.get_buffer(key) if declaration.buffer else module.get_parameter(key)
        value = registered
        if isinstance(registered, DTensor):
            local = local_tensor(registered).detach()
            value = nn.Parameter(local, requires_grad=registered.requires_grad)
        assert isinstance(registered, DTensor) == (axes is not None), name
        leaves.append(
            Leaf(
                name,
                tuple(prefix + other for other in declaration.also),
                declaration,
                None if axes is None else mesh[axes],
                value,
                module,
                key,
            )
        )
    return tuple(leaves)

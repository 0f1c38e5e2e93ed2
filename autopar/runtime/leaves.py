"""Tensors of this rank, one record each: what forward, optimizer and checkpoints share."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.collectives import all_gather
from autopar.runtime.layout import local_shape, put, take
from autopar.runtime.parameters import Container, Declaration, declared
from autopar.runtime.process_mesh import Group, ProcessMesh


@dataclass(frozen=True)
class Place:
    """Which stages along an axis hold a tensor, whether this rank's does, and is the first."""

    axis: str
    stages: tuple[int, ...]
    here: bool
    first: bool


@dataclass(frozen=True, eq=False)
class Leaf:
    """One declared parameter or buffer on this rank.

    `name` and `also` are the plain model's. `value` is the plain local tensor, or this rank's shard
    of it where ZeRO shards it: the optimizer steps it, checkpoints hold it. It shares memory with
    what forward uses, which under ZeRO 1 and 2 takes the other ranks' shards before a step's first
    forward.
    """

    name: str
    also: tuple[str, ...]
    declaration: Declaration
    shard: Group | None
    """The group that ZeRO shards it over, on dim 0."""
    value: Tensor
    module: Container
    key: str
    place: Place | None = None
    """Where layers lie in stages. A leaf of another stage has a name and a declaration; its value
    is on meta."""

    @property
    def here(self) -> bool:
        """Whether this rank holds (a part of) it."""
        return self.place is None or self.place.here

    @property
    def registered(self) -> Tensor:
        """The parameter or buffer as it stands in the module."""
        if self.declaration.buffer:
            return self.module.get_buffer(self.key)
        return self.module.get_parameter(self.key)

    @property
    def split_axes(self) -> frozenset[str]:
        """The axes along which ranks hold different parts of it, or different tensors."""
        stages = {self.place.axis} if self.place else set()
        return self.declaration.axes | frozenset(self.shard.axes if self.shard else ()) | stages

    @property
    def stage(self) -> int:
        """ZeRO's stage, 0 where it isn't sharded."""
        sharded = self.module.sharded.get(self.key)
        return 0 if sharded is None else sharded.stage

    @property
    def grad(self) -> Tensor | None:
        """The plain local gradient of `value`, or None where backward gave none."""
        grad = self.value.grad if self.stage in (1, 2) else self.registered.grad
        return None if grad is None else local_tensor(grad)

    def whole(self, mesh: ProcessMesh, tensor: Tensor | None) -> Tensor:
        """The whole tensor, of `value` or of `grad` (or FSDP2's form of them): a collective. Of a
        leaf that isn't here, None."""
        if self.place is None:
            assert tensor is not None, self.name
            return self._whole(mesh, tensor)
        group, source = mesh[self.place.axis], self.place.stages[0]
        if group.rank == source:
            assert tensor is not None, self.name
            whole = self._whole(mesh, tensor).contiguous()
        else:
            shape, dtype = self.declaration.shape, self.declaration.dtype
            whole = torch.empty(shape, dtype=dtype, device=mesh.device)
        dist.broadcast(whole, src=group.ranks[source], group=group.process_group)
        return whole

    def _whole(self, mesh: ProcessMesh, tensor: Tensor) -> Tensor:
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
        """The shards of dim 0 put together again, padded to equal size on the way."""
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
            self.value.copy_(part if self.shard is None else _shard(part, self.shard))


def _shard(part: Tensor, group: Group) -> Tensor:
    """This rank's rows, as a view: ranks later in the group may hold less than others, or none."""
    chunks = part.chunk(group.size)
    return chunks[group.rank] if group.rank < len(chunks) else part[:0]


def local_tensor(tensor: Tensor) -> Tensor:
    """FSDP2's shard as a plain tensor; a plain tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def leaves_of(model: Container, mesh: ProcessMesh) -> tuple[Leaf, ...]:
    """All that `model` declared, in order of declaration; call it after `model.shard()`."""
    leaves = []
    for name, module, key, declaration in declared(model):
        prefix = name.removesuffix(key)
        sharded = module.sharded.get(key)
        group = None if sharded is None else mesh[sharded.axes]
        registered = module.get_buffer(key) if declaration.buffer else module.get_parameter(key)
        value = registered
        if sharded is not None and group is not None:
            assert isinstance(registered, DTensor) == (sharded.stage == 3), name
            local = local_tensor(registered).detach()
            local = local if sharded.stage == 3 else _shard(local, group)
            value = nn.Parameter(local, requires_grad=registered.requires_grad)
        leaves.append(
            Leaf(
                name,
                tuple(prefix + other for other in declaration.also),
                declaration,
                group,
                value,
                module,
                key,
            )
        )
    return tuple(leaves)

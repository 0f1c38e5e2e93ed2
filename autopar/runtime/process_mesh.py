"""The mesh at run time: one process group per set of axes that communicates."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError
from autopar.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks that differ from this one along `axes` only, and their process group.

    `axes` are in mesh order, those of size 1 left out; `ranks` are global ranks, the outermost axis
    slowest; `rank` is this process's index in them. A group of one rank has no process group:
    collectives over it are identities.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    rank: int
    device_type: str
    process_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    @property
    def name(self) -> str:
        """The process group's name, by which functional collectives find it."""
        assert self.process_group is not None, f"the group over {self.axes} has one rank"
        return self.process_group.group_name

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """A 1-D device mesh over the same ranks, for FSDP2 and checkpoints."""
        assert self.process_group is not None, f"the group over {self.axes} has one rank"
        with unset_fake_temporarily():  # it reads its ranks, also where a program is simulated
            return DeviceMesh.from_group(
                self.process_group, self.device_type, mesh_dim_names=("_".join(self.axes),)
            )


class ProcessMesh:
    """Named axes over the ranks of the default process group, and groups along them.

    `mesh["tp"]` and `mesh["dp", "tp"]` are groups; several axes make one flattened group in rank
    order, in whatever order they are named. Groups along no axis, along single axes and along all
    always exist, those in `groups` are opened at construction; opening is a collective, so looking
    a group up never opens one. Axes of size 1 change no group.

    Errors: AutoparError when the world has another size than the mesh.
    """

    def __init__(
        self,
        axes: Iterable[tuple[str, int]],
        groups: Iterable[tuple[str, ...]] = (),
        device_type: str = "cpu",
    ) -> None:
        self.layout = Mesh(tuple((name, int(size)) for name, size in axes))
        self.device_type = device_type
        self.device = _device(device_type)
        """Where this rank's tensors live."""
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        check_world(self.layout, dist.get_world_size() if dist.is_initialized() else 1)
        self._groups: dict[tuple[str, ...], Group] = {}
        self._among: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._opened: list[dist.ProcessGroup] = []
        self._subgroups_made = False
        """Whether any rank opened groups of its own: the same on every rank."""
        self.open([(), *((name,) for name in self.axes), self.axes, *groups])

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes' names, outermost first."""
        return tuple(name for name, _ in self.layout.axes)

    @property
    def coordinate(self) -> dict[str, int]:
        """Where this rank lies: its index along each axis."""
        return self.layout.coordinate(self.rank)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups that are open."""
        return (*self._groups.values(), *self._among.values())

    @property
    def world(self) -> Group:
        """The group of all ranks."""
        return self[self.axes]

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        key = self._key((axes,) if isinstance(axes, str) else axes)
        assert key in self._groups, (
            f"no group over the axes {key}: name it in ProcessMesh(groups=...), since opening one "
            "later is a collective"
        )
        return self._groups[key]

    def open(self, groups: Iterable[tuple[str, ...]]) -> None:
        """Opens groups that are not yet open. A collective: every rank passes the same list."""
        for axes in groups:
            key = self._key(axes)
            if key not in self._groups:
                ranks = next(row for row in self._rows(key) if self.rank in row)
                self._groups[key] = Group(
                    key, ranks, ranks.index(self.rank), self.device_type, self._process_group(key)
                )

    def open_among(self, axis: str, every: Iterable[tuple[int, ...]]) -> None:
        """Opens groups of some coordinates along an axis, for `among`. A collective."""
        for coordinates in every:
            rows = [tuple(row[i] for i in coordinates) for row in self._rows((axis,))]
            mine = next((row for row in rows if self.rank in row), None)
            if len(coordinates) == self.layout.size(axis):
                group = self[axis]
            else:
                process_group = self._subgroups(rows)
                if mine is None:
                    continue
                group = Group((axis,), mine, mine.index(self.rank), self.device_type, process_group)
            self._among[axis, coordinates] = group

    def among(self, axis: str, coordinates: tuple[int, ...]) -> Group:
        """The group of the ranks with these coordinates along an axis, this one among them."""
        return self._among[axis, coordinates]

    def open_together(self, wanted: Iterable[tuple[str, ...]]) -> None:
        """Opens what any rank wants, where ranks want different groups. A collective."""
        mine = sorted({self._key(axes) for axes in wanted})
        every: list[list[tuple[str, ...]]] = [mine]
        if self.world.size > 1:
            every = [[] for _ in range(self.world.size)]
            dist.all_gather_object(every, mine, group=self.world.process_group)
        self.open(sorted({axes for some in every for axes in some}))

    def close(self) -> None:
        """Destroys the process groups that this mesh opened. A collective; needed only where many
        meshes follow each other in one process.
        """
        if self._subgroups_made:
            # A peer that closes its connections too early fails a collective still under way here.
            dist.barrier()
        for process_group in self._opened:
            dist.destroy_process_group(process_group)
        self._opened.clear()
        self._subgroups_made = False
        self._groups.clear()
        self._among.clear()

    def _key(self, axes: Iterable[str]) -> tuple[str, ...]:
        named = set(axes)
        assert named <= set(self.axes), f"the mesh {self.layout} has no axes {named}"
        return tuple(name for name, size in self.layout.axes if name in named and size > 1)

    def _rows(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """The ranks of every group along `axes`, in rank order."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.layout.world):
            coordinate = self.layout.coordinate(rank)
            others = tuple(index for name, index in coordinate.items() if name not in axes)
            rows.setdefault(others, []).append(rank)
        return [tuple(row) for row in rows.values()]

    def _process_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        if not axes:
            return None
        if axes == self._key(self.axes):
            return dist.group.WORLD
        mine = self._subgroups(self._rows(axes))
        assert mine is not None, f"rank {self.rank} is in no group along {axes}"
        return mine

    def _subgroups(self, rows: Iterable[tuple[int, ...]]) -> dist.ProcessGroup | None:
        """This rank's of these groups, if it is in one."""
        self._subgroups_made = True
        made: Any = dist.new_subgroups_by_enumeration  # untyped in torch
        mine: dist.ProcessGroup | None = made([list(row) for row in rows])[0]
        if mine is not None:
            self._opened.append(mine)
        return mine


def _device(device_type: str) -> torch.device:
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)


def check_world(mesh: Mesh, world: int) -> None:
    """Errors: AutoparError when `world` processes run a program for another number."""
    if world == mesh.world:
        return
    per_node = math.gcd(mesh.world, 8)
    nodes = f"--nnodes {mesh.world // per_node} " if mesh.world > per_node else ""
    raise AutoparError(
        f"The program is for {mesh.world} processes ({mesh}), but {world} "
        f"{'is' if world == 1 else 'are'} running. Start it with: "
        f"torchrun {nodes}--nproc-per-node {per_node} your_script.py"
    )

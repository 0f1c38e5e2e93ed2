"""Each collective and its backward on four processes, against autograd on one."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, PoolError
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.errors import AutoparError
from autopar.runtime import (
    CollectiveCounter,
    Group,
    ProcessMesh,
    all_gather,
    all_reduce,
    all_reduce_partial,
    all_to_all,
    collectives,
    enter,
    local_part,
    once,
    reduce_scatter,
    ring,
    shard,
    unshard,
)

MESHES = {
    "tp4": ((("tp", 4),), ("tp",)),
    "tp of dp2 tp2": ((("dp", 2), ("tp", 2)), ("tp",)),
    "dp of dp2 tp2": ((("dp", 2), ("tp", 2)), ("dp",)),
    "dp tp of dp2 cp1 tp2": ((("dp", 2), ("cp", 1), ("tp", 2)), ("tp", "dp")),
}
SHAPE = (8, 4, 12)


@dataclass(frozen=True)
class Case:
    """A collective, and what it does on a list of all ranks' tensors.

    `one_in`: type I, all ranks hold the same tensor; `one_out`: the loss counts the output once.
    """

    run: Callable[[Tensor, Group], Tensor]
    reference: Callable[[list[Tensor]], list[Tensor]]
    one_in: bool = False
    one_out: bool = False


def summed(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


def exchanged(xs: list[Tensor]) -> list[Tensor]:
    pieces = [x.chunk(len(xs), 2) for x in xs]
    return [torch.cat([row[rank] for row in pieces], 1) for rank in range(len(xs))]


def first_only(xs: list[Tensor]) -> list[Tensor]:
    return [xs[0], *(x.detach() + 0 * x for x in xs[1:])]


CASES = {
    "enter": Case(lambda x, g: enter(x, axis=g), lambda xs: xs, one_in=True),
    "all_reduce": Case(
        lambda x, g: all_reduce(x, axis=g), lambda xs: [summed(xs)] * len(xs), one_out=True
    ),
    "all_reduce_partial": Case(
        lambda x, g: all_reduce_partial(x, axis=g), lambda xs: [summed(xs)] * len(xs)
    ),
    "all_gather dim 0": Case(
        lambda x, g: all_gather(x, dim=0, axis=g), lambda xs: [torch.cat(xs)] * len(xs)
    ),
    "all_gather": Case(
        lambda x, g: all_gather(x, dim=1, axis=g), lambda xs: [torch.cat(xs, 1)] * len(xs)
    ),
    "reduce_scatter dim 0": Case(
        lambda x, g: reduce_scatter(x, dim=0, axis=g),
        lambda xs: list(summed(xs).chunk(len(xs), 0)),
    ),
    "reduce_scatter": Case(
        lambda x, g: reduce_scatter(x, dim=-1, axis=g),
        lambda xs: list(summed(xs).chunk(len(xs), 2)),
    ),
    "unshard": Case(
        lambda x, g: unshard(x, dim=1, axis=g),
        lambda xs: [torch.cat(xs, 1)] * len(xs),
        one_out=True,
    ),
    "shard": Case(
        lambda x, g: shard(x, dim=2, axis=g),
        lambda xs: [x.chunk(len(xs), 2)[rank] for rank, x in enumerate(xs)],
        one_in=True,
    ),
    "local_part": Case(
        lambda x, g: local_part(x, dim=1, axis=g),
        lambda xs: [x.chunk(len(xs), 1)[rank] for rank, x in enumerate(xs)],
    ),
    "all_to_all": Case(lambda x, g: all_to_all(x, split_dim=2, gather_dim=1, axis=g), exchanged),
    "ring": Case(lambda x, g: ring(x, axis=g), lambda xs: [xs[-1], *xs[:-1]]),
    "once": Case(lambda x, g: once(x, axis=g), first_only),
}


def error_of(name: str, mesh_name: str) -> float:
    """The largest error of output and gradient on this rank."""
    axes, group_axes = MESHES[mesh_name]
    mesh = ProcessMesh(axes, groups=[group_axes])
    group, case = mesh[group_axes], CASES[name]
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    one = random(SHAPE).requires_grad_()
    leaves = [one if case.one_in else random(SHAPE).requires_grad_() for _ in group.ranks]
    expected = case.reference(leaves)
    weights = [random(tuple(out.shape)) for out in expected]
    if case.one_out:
        weights = [weights[0]] * group.size
        (expected[0] * weights[0]).sum().backward()
    else:
        summed([(out * w).sum() for out, w in zip(expected, weights, strict=True)]).backward()
    # A transposed copy: collectives must not rely on contiguous memory.
    mine = leaves[group.rank].detach().transpose(0, 2).contiguous().transpose(0, 2)
    mine.requires_grad_()
    out = case.run(mine, group)
    (out * weights[group.rank]).sum().backward()
    mesh.close()
    theirs = leaves[group.rank].grad
    assert mine.grad is not None and theirs is not None and mine.is_contiguous() is False
    assert out.shape == expected[group.rank].shape, (out.shape, expected[group.rank].shape)
    errors = [(out - expected[group.rank]).abs().max(), (mine.grad - theirs).abs().max()]
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradient(pool4: Pool, name: str, mesh_name: str) -> None:
    assert max(pool4.run(error_of, name, mesh_name)) < 1e-12


BROKEN: dict[str, tuple[str, Callable[[Any, Tensor], Any]]] = {
    "enter": ("_Enter", lambda ctx, g: (g, None)),
    "all_reduce": ("_AllReduce", lambda ctx, g: (g / 4, None)),
    "all_reduce_partial": ("_AllReducePartial", lambda ctx, g: (g, None)),
    "all_gather": (
        "_AllGather",
        lambda ctx, g: (collectives._slice(g, ctx.dim, ctx.axis), None, None, None),
    ),
    "reduce_scatter": (
        "_ReduceScatter",
        lambda ctx, g: (torch.cat([g] * ctx.axis.size, ctx.dim), None, None, None),
    ),
    "unshard": (
        "_Unshard",
        lambda ctx, g: (collectives._scatter_sum(g, ctx.dim, ctx.axis), None, None, None),
    ),
    "shard": ("_Shard", lambda ctx, g: (torch.cat([g] * ctx.axis.size, ctx.dim), *[None] * 3)),
    "all_to_all": (
        "_AllToAll",
        lambda ctx, g: (torch.cat(g.chunk(ctx.axis.size, 1), 2), *[None] * 4),
    ),
    "ring": ("_Ring", lambda ctx, g: (collectives._shift(g, 1, ctx.axis), None)),
    "once": ("_Once", lambda ctx, g: (g, None)),
}


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Inside, the collective's backward is a plausible wrong one."""
    class_name, wrong = BROKEN[name]
    function = getattr(collectives, class_name)
    right = function.__dict__["backward"]
    function.backward = staticmethod(wrong)
    try:
        yield
    finally:
        function.backward = right


def error_when_broken(name: str) -> float:
    with broken(name):
        return error_of(name, "tp4")


@pytest.mark.parametrize("name", BROKEN)
def test_check_sees_wrong_backward(pool4: Pool, name: str) -> None:
    assert max(pool4.run(error_when_broken, name)) > 0.1


# ---------------------------------------------------------------- groups


def groups_of_mesh() -> tuple[tuple[int, ...], ...]:
    mesh = ProcessMesh((("pp", 1), ("dp", 2), ("tp", 2)), groups=[("tp", "dp")])
    assert mesh["dp", "tp"] is mesh["tp", "dp", "pp"] is mesh.world
    assert mesh["pp", "tp"] is mesh["tp"] and mesh["pp"].process_group is None
    found = (mesh["dp"].ranks, mesh["tp"].ranks, mesh.world.ranks)
    mesh.close()
    return found


def test_ranks_of_groups(pool4: Pool) -> None:
    found = pool4.run(groups_of_mesh)
    assert [dp for dp, _, _ in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [tp for _, tp, _ in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert {world for _, _, world in found} == {(0, 1, 2, 3)}


@pytest.fixture
def fake_world8() -> Iterator[None]:
    """This process as rank 5 of 8 that don't exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_world8")
def test_unopened_group_is_refused() -> None:
    mesh = ProcessMesh((("dp", 2), ("cp", 2), ("tp", 2)), groups=[("tp", "dp")])
    assert mesh["dp", "tp"].ranks == (0, 1, 4, 5) and mesh["dp", "tp"].rank == 3
    with pytest.raises(AssertionError, match=re.escape("no group over the axes ('cp', 'tp')")):
        mesh["tp", "cp"]


def test_world_of_another_size() -> None:
    with pytest.raises(AutoparError) as error:
        ProcessMesh((("dp", 8), ("tp", 2)))
    assert str(error.value) == (
        "The program is for 16 processes (dp8 · tp2), but 1 is running. "
        "Start it with: torchrun --nnodes 2 --nproc-per-node 8 your_script.py"
    )


def test_one_process_needs_no_process_group() -> None:
    mesh = ProcessMesh((("dp", 1), ("tp", 1)))
    x = torch.ones(2, requires_grad=True)
    assert all_gather(all_reduce(enter(x, mesh["tp"]), mesh["dp"]), 0, mesh.world) is x


# ---------------------------------------------------------------- counting


def counted() -> tuple[dict[Any, int], dict[Any, int]]:
    mesh = ProcessMesh((("dp", 2), ("cp", 1), ("tp", 2)))
    x = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
    with CollectiveCounter(mesh) as counter:
        y = all_gather(x, dim=1, axis=mesh["tp"])  # 4·12 out, and back by reduce-scatter
        y = all_reduce(y, axis=mesh["dp"])
        y = all_to_all(y, 0, 1, axis=mesh["dp"])
        enter(y, axis=mesh["tp"]).sum().backward()
        dist.broadcast(torch.ones(5), src=0)
        dist.all_reduce(torch.ones(3), group=mesh["tp"].process_group)
    mesh.close()
    return dict(counter.bytes), dict(counter.calls)


def test_counter_bytes_and_axes(pool4: Pool) -> None:
    for found_bytes, calls in pool4.run(counted):
        assert found_bytes == {
            ("all_gather", ("tp",)): 48 * 8,
            ("reduce_scatter", ("tp",)): 48 * 8,
            ("all_reduce", ("dp",)): 48 * 8,
            ("all_to_all", ("dp",)): 2 * 48 * 8,
            ("all_reduce", ("tp",)): 48 * 8 + 3 * 4,
            ("broadcast", ("dp", "tp")): 5 * 4,
        }
        assert calls["all_reduce", ("tp",)] == 2 and calls["all_to_all", ("dp",)] == 2


def count_unknown() -> str:
    mesh = ProcessMesh((("tp", 4),))
    with pytest.raises(AssertionError) as error, CollectiveCounter(mesh):
        dist.reduce(torch.ones(2), dst=0)
    return str(error.value)


def test_counter_refuses_unknown_collective(pool4: Pool) -> None:
    assert pool4.run(count_unknown) == ["no rule to count the collective c10d::reduce_"] * 4


# ---------------------------------------------------------------- the pool itself


def fail_on_rank_2() -> int:
    assert dist.get_rank() != 2, "rank 2 fails on purpose"
    return dist.get_rank()


def never_ends() -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.ones(1), src=0)


def test_pool_reports_and_recovers(pool4: Pool) -> None:
    with pytest.raises(PoolError, match=r"rank 2: Traceback(?s:.*)fails on purpose"):
        pool4.run(fail_on_rank_2)
    with pytest.raises(PoolError, match="rank 1: hung"):
        pool4.run(never_ends, timeout_s=1.0)
    assert pool4.run(dist.get_rank) == [0, 1, 2, 3]

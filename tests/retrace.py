"""One rank of an emitted program traced anew, without its peers: what its forward computes and
keeps, and what the plan says of that."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from equality import OFF, STRATEGIES
from models import Job
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import autopar
from autopar.capture import capture
from autopar.capture.saved import FusedAttention
from autopar.graph.analyse import analyse
from autopar.layouts.program import Program
from autopar.layouts.saved import saved_residents, shared_residents
from autopar.layouts.state_ratio import StateRatio
from autopar.layouts.typing import type_region
from autopar.planning.account import program_effects
from autopar.planning.realise import realise
from autopar.plugin import Compute, Resident
from autopar.registry import select_strategies
from autopar.runtime import TrainingModule, run_program


@dataclass(frozen=True)
class Local:
    """Of one microbatch's forward on one rank: flops, and bytes that autograd keeps beside the
    weights, each storage once."""

    flops: int
    saved_bytes: int


class Kernels(TorchFunctionMode):
    """Attention and dropout as accelerators' kernels run them: what a plan is about."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if function is F.scaled_dot_product_attention:
            query, key, value = args
            self.flops += sdpa_flop_count(query.shape, key.shape, value.shape)
            return FusedAttention.apply(query, key, value, given.get("attn_mask"))  # type: ignore[no-untyped-call]
        if function is F.dropout:
            (source,) = args
            return torch.native_dropout(source, given["p"], given["training"])[0]
        return function(*args, **given)


def planned(job: Job, pins: dict[str, Any], world: int) -> autopar.Compiled:
    """The job under a plan that has these pins and nothing else."""
    off = {key: value for key, value in OFF.items() if key not in pins}
    pin = {"tensor": pins.get("tp", 1) > 1, **pins}
    return autopar.compile(
        job.model,
        f"cpu:{world}",
        job.batch,
        loss=job.loss,
        strategies=STRATEGIES,
        pin={**off, **pin},
    )


def divided(program: Program) -> Local:
    """What the plan's figures are made of: divisions of the whole graphs'."""
    effects = [e for _, e in program_effects(program, StateRatio(2.0))]
    flops = sum(e.flops for e in effects if isinstance(e, Compute) and e.phase == "forward")
    saved = sum(e.bytes for e in effects if isinstance(e, Resident) and e.what == "saved")
    return Local(flops, saved)


def regions_bytes(program: Program) -> int:
    """What the regions keep, each by itself: what the integer programme sums up."""
    setting = program.setting
    paths = [layer.path for layer in program.model.layers]
    residents = [*shared_residents(program.model, setting, paths)]
    for path, block in program.model.instances():
        for candidate in program.choices[path].values():
            typing = type_region(block, candidate)
            residents += saved_residents(block, typing, setting, (path,), path)
    return sum(resident.bytes for resident in residents)


def program_of(job: Job, plan: autopar.Plan) -> Program:
    """The finished program of a plan."""
    graph = analyse(capture(job.model, job.batch, job.loss))
    return realise(graph, plan, select_strategies(STRATEGIES))


def traced(compiled: autopar.Compiled, rank: int, world: int, batch: Any) -> Local:
    """The same, of the emitted module as it runs on a rank. Collectives move nothing: shapes are
    all that counts."""
    with alone(rank, world):
        parallel = TrainingModule(run_program(compiled.source), code=compiled.model)
        model = compiled.model
        parallel.load_weights(dict([*model.named_parameters(), *model.named_buffers()]))
        pieces = parallel._microbatches(parallel.shard_batch(batch))
        piece = [tensor.clone() for tensor in pieces[0]]  # and not a view of the whole batch
        counts = parallel._counts(pieces)
        kernels, counter = Kernels(), FlopCounterMode(display=False)
        weights = {_storage(t) for t in tensors_of(parallel)}
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in weights:
                kept.setdefault(_storage(tensor), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), counter, kernels:
            parallel.model(*piece, counts)
        parallel.close()
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return Local(counter.get_total_flops() + kernels.flops, saved)


def tensors_of(parallel: TrainingModule) -> Iterator[Tensor]:
    """All weights and buffers."""
    for leaf in parallel.leaves:
        yield from (leaf.registered, leaf.value)
    yield from parallel.model.buffers()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def alone(rank: int, world: int) -> Iterator[None]:
    """A process group whose other ranks are not there; collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()

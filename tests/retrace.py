"""One rank of an emitted program traced anew, without its peers: what its forward computes and
keeps, and what the plan says of that."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from equality import OFF, STRATEGIES
from models import Job
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import autopar
from autopar.capture import capture
from autopar.capture.saved import FusedAttention
from autopar.graph.analyse import analyse
from autopar.layouts.program import Program
from autopar.layouts.saved import held, saved_residents, shared_tensors
from autopar.layouts.state_ratio import StateRatio
from autopar.layouts.typing import type_region
from autopar.planning.program_effects import program_effects
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
    setting, residents = program.setting, list[Resident]()
    shared: dict[object, int] = {}
    given = shared_tensors(program.model, setting, [layer.path for layer in program.model.layers])
    for path, block in program.model.instances():
        for candidate in program.choices[path].values():
            typing = type_region(block, candidate)
            found = held(block, typing, setting, (path,), path)
            residents += saved_residents(block, typing, setting, (path,), path, found)
            shared |= dict(given[path][name] for name, _ in found.kept.shared)
    return sum(resident.bytes for resident in residents) + sum(shared.values())


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


class Attention(FusedAttention):
    """The same with a backward, of which the shapes are right."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Zeros."""
        query, key, value, *_ = ctx.saved_tensors
        return *map(torch.zeros_like, (query, key, value)), None


def _attention(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    out: Tensor = Attention.apply(query, key, value, given.get("attn_mask"))  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class Peak:
    """Bytes of saved tensors beside the weights, each storage once: after the forward, and at most
    while something runs again in the backward."""

    kept_bytes: int
    again_bytes: int


def peak(compiled: autopar.Compiled, rank: int, world: int, batch: Any) -> Peak:
    """Of one microbatch on a rank of the emitted module."""
    live: dict[StorageWeakRef, int] = {}
    moments = [0]

    def now() -> int:
        for gone in [one for one in live if one.expired()]:
            del live[gone]
        return sum(live.values())

    def note(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in weights:
            storage = tensor.untyped_storage()
            live[StorageWeakRef(storage)] = storage.nbytes()
        return tensor

    class Again(checkpoint._recomputation_hook):
        """Tensors that are saved a second time are noted, too."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            plain = self.pack_hook

            def pack(tensor: Tensor) -> Any:
                note(tensor)
                moments.append(now())
                return plain(tensor)

            self.pack_hook = pack

    with alone(rank, world):
        parallel = TrainingModule(run_program(compiled.source), code=compiled.model)
        model = compiled.model
        parallel.load_weights(dict([*model.named_parameters(), *model.named_buffers()]))
        pieces = parallel._microbatches(parallel.shard_batch(batch))
        piece = [tensor.clone() for tensor in pieces[0]]
        weights = {_storage(t) for t in tensors_of(parallel)}
        with (
            torch.autograd.graph.saved_tensors_hooks(note, lambda t: t),
            mock.patch.object(F, "scaled_dot_product_attention", _attention),
            mock.patch.object(checkpoint, "_recomputation_hook", Again),
        ):
            loss = parallel.model(*piece, parallel._counts(pieces))
            kept_bytes = now()
            loss.backward()
        parallel.close()
    return Peak(kept_bytes, max(moments))


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

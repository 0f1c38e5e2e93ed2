"""What an emitted module really keeps and computes in a forward, on this rank."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.capture import saved as recorded
from autopar.runtime import TrainingModule, run_program


@dataclass(frozen=True)
class Retrace:
    """Bytes that are alive after a forward for its backward; the most bytes that one checkpointed
    function keeps while it runs again, beside what it was given; flops of matrix products."""

    saved_bytes: int
    again_bytes: int
    product_flops: int


@dataclass
class Storages(TorchDispatchMode):
    """Every storage that was made inside; `alive_bytes` of those that still are."""

    known: dict[StorageWeakRef, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.known.setdefault(StorageWeakRef(storage), storage.nbytes())
        return result

    def alive_bytes(self, but: Iterable[torch.Tensor]) -> int:
        """Without the storages of some tensors."""
        out = {StorageWeakRef(tensor.untyped_storage()) for tensor in but}
        found = (ref for ref in self.known if ref not in out and not ref.expired())
        return sum(self.known[ref] for ref in found)


def retrace(program: autopar.Compiled, model: nn.Module, batch: Any) -> Retrace:
    """One forward of the first microbatch. Attention is the one that capture records: it keeps what
    accelerators' kernels keep."""
    module = run_program(program.source)
    parallel = TrainingModule(module, device_type="cpu")
    parallel.load_from_rank0(model)
    pieces = parallel._microbatches(parallel.shard_batch(batch))
    counts = parallel._counts(pieces)
    given = [*parallel.model.parameters(), *parallel.model.buffers(), *pytree.tree_leaves(pieces)]
    given += pytree.tree_leaves(counts)
    storages, spans = Storages(), list[int]()

    def probe(function: Callable[..., Any], *inputs: Any, use_reentrant: bool) -> Any:
        before = storages.alive_bytes(given)
        node = function(*inputs).grad_fn
        spans.append(storages.alive_bytes(given) - before)
        del node
        return checkpoint(function, *inputs, use_reentrant=use_reentrant)

    module.__dict__["checkpoint"] = probe
    parallel.model.train()
    with _recorded_attention():
        with storages:
            loss = parallel.model(*pieces[0], counts)
        saved_bytes = storages.alive_bytes([*given, loss])
        module.__dict__["checkpoint"] = checkpoint
        with FlopCounterMode(display=False) as flops:
            parallel.model(*pieces[0], counts)
    parallel.close()
    return Retrace(saved_bytes, max(spans, default=0), flops.get_total_flops())


@contextmanager
def _recorded_attention() -> Iterator[None]:
    plain = nn.functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **_: Any) -> Any:
        made: Any = recorded._Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
        return made

    nn.functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = plain

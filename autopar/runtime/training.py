"""TrainingModule: an emitted program, run on this rank."""

import types
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Union

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.runtime import batch as batches
from autopar.runtime import weights
from autopar.runtime.checkpoint import Running, open_checkpoint, save_checkpoint
from autopar.runtime.gradients import (
    clip_gradients,
    global_norm,
    sum_axes,
    sum_gradients,
    sum_shared,
)
from autopar.runtime.launch import initialise
from autopar.runtime.opaque import OpaqueLayer, drop_unused
from autopar.runtime.process_mesh import ProcessMesh
from autopar.runtime.program import read_program
from autopar.runtime.random_stream import RandomStream
from autopar.runtime.roots import build
from autopar.runtime.steps import Steps
from autopar.runtime.weights_files import load_files

NamedParameters = Iterable[tuple[str, nn.Parameter]]
OptimizerFactory = Union[
    type[torch.optim.Optimizer],
    "partial[Any]",
    Callable[[NamedParameters], torch.optim.Optimizer],
]


class StepResult(NamedTuple):
    """The global loss and the gradients' norm before clipping: 0-d, the same on every rank."""

    loss: Tensor
    grad_norm: Tensor


class TrainingModule:
    """The shard of a model that this rank holds, and how to train it.

    `program` is an emitted module. `optimizer`: a class of torch.optim or a partial of one, or a
    callable of (name, parameter) pairs for groups; the parameters are this rank's local parts under
    the plain model's names. `clip_norm`: the largest global gradient norm, or None. `seed` of the
    dropout masks (left out, rank 0's torch seed): data ranks draw different ones, and nothing that
    the user's code draws changes them. `code`: the plain model, whose opaque layers run.

    Every method is a collective unless it says otherwise. Weights are uninitialised until
    `load_weights` or `load_from_rank0`.

    Errors: AutoparError when the program is for another number of processes.
    """

    def __init__(
        self,
        program: types.ModuleType,
        *,
        optimizer: OptimizerFactory | None = None,
        clip_norm: float | None = None,
        device_type: str = "cpu",
        seed: int | None = None,
        code: nn.Module | None = None,
    ) -> None:
        initialise(device_type)
        self.program = read_program(program)
        groups = [self.program.data_axes, self.program.loss_sums, *self.program.groups]
        self.mesh = ProcessMesh(self.program.mesh.axes, groups, device_type)
        roots = build(self.program, self.mesh)
        self.roots = tuple(roots.parts.values())
        """The whole model, or what of it lies on this rank's stage."""
        if code is not None:
            for root in self.roots:
                _bind(root, code)
        self.leaves = roots.leaves
        self._catalogue = roots.catalogue
        self._open_groups()
        self._steps = Steps(self.program, roots, self.mesh)
        self.clip_norm = clip_norm
        self.optimizer = build_optimizer(optimizer, self._named_parameters())
        self.steps = 0
        """How many optimizer steps were taken, before a loaded checkpoint as well."""
        self._unloaded = {leaf.name for leaf in self.leaves}
        self._peers_checked = False
        self._gradients_ready = False
        self.random = self._random_stream(seed)

    # ------------------------------------------------------------ training

    def train_step(self, local_batch: Any) -> StepResult:
        """`forward_backward`, then `optimizer_step`."""
        loss = self.forward_backward(local_batch)
        return StepResult(loss, self.optimizer_step())

    def forward_backward(self, local_batch: Any) -> Tensor:
        """Gradients of the loss of the whole global batch; returns that loss.

        `local_batch` is this rank's share, all microbatches of it, in the structure that the model
        was compiled with. Gradients of earlier calls are cleared.

        Errors: AutoparError for other shapes or dtypes, or (first call) where peers were given
        different samples.
        """
        pieces = self._microbatches(local_batch)
        counts = self._counts(pieces)
        for leaf in self.leaves:
            leaf.registered.grad = None
            leaf.value.grad = None
        with self.random.use():
            total = self._steps.step(pieces, counts)
        sum_gradients(self.leaves, self.mesh)
        sum_shared(self.leaves, self.mesh)
        with torch.no_grad():
            for root in self.roots:
                if "sync_gradients" in vars(type(root)):
                    root.sync_gradients()
        drop_unused(self.leaves)
        self._gradients_ready = True
        return self._global_loss(total)

    def optimizer_step(self) -> Tensor:
        """Clips, steps, and returns the gradients' global norm before clipping.

        Errors: AutoparError without a `forward_backward` before it.
        """
        self._need_gradients("optimizer_step")
        self._gradients_ready = False
        norm = global_norm(self.leaves, self.mesh)
        if self.clip_norm is not None:
            clip_gradients(self.leaves, norm, self.clip_norm)
        for leaf in self.leaves:
            if leaf.value is not leaf.registered:
                leaf.value.grad = leaf.grad
        self.optimizer.step()
        self.steps += 1
        return norm

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole gradients on every rank by parameter name (tied: once; frozen and unused ones:
        absent), unclipped.

        Errors: AutoparError unless called between `forward_backward` and `optimizer_step`.
        """
        self._need_gradients("full_gradients")
        return weights.full_gradients(self._catalogue, self.mesh)

    def evaluate(self, local_batch: Any) -> Tensor:
        """The loss of the whole global batch with dropout off; gradients stay as they are."""
        pieces = self._microbatches(local_batch)
        counts = self._counts(pieces)
        total = self._steps.evaluate(pieces, counts)
        return self._global_loss(total)

    @property
    def model(self) -> Any:
        """The root, or where a stage has several the first. No collective."""
        return self.roots[0]

    # ------------------------------------------------------------ data

    @property
    def data_parallel_size(self) -> int:
        """How many shares the global batch has. No collective."""
        return self.program.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the global batch this rank takes. No collective."""
        return self.mesh[self.program.data_axes].rank

    def shard_batch(self, global_batch: Any) -> Any:
        """What this rank takes of a global batch, in the same structure. No collective."""
        return batches.shard_batch(global_batch, self.program, self.data_parallel_rank)

    # ------------------------------------------------------------ weights

    def load_weights(self, state: Mapping[str, Tensor] | str | Path) -> None:
        """Takes this rank's parts of a plain state dict, or of a safetensors file or folder, of
        which it reads nothing else. No collective.

        Errors: AutoparError for missing or unknown names, other shapes, and unreadable files.
        """
        if isinstance(state, str | Path):
            self._unloaded -= load_files(self._catalogue, self.mesh, Path(state))
        else:
            self._unloaded -= weights.load_weights(self._catalogue, self.mesh, state)

    def load_from_rank0(self, model: nn.Module | None) -> None:
        """Takes rank 0's weights, one tensor at a time; other ranks may pass None.

        Errors: AutoparError, on every rank, where rank 0's model doesn't fit or is on meta.
        """
        weights.load_from_rank0(self._catalogue, self.mesh, model)
        self._unloaded.clear()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole weights on every rank under the plain model's names, tied names included."""
        return weights.full_state_dict(self._catalogue, self.mesh)

    # ------------------------------------------------------------ checkpoints

    def save_checkpoint(self, folder: str | Path, *, keep: int = 2) -> Path:
        """Adds a checkpoint (weights, optimizer, random stream, `steps`) to a folder that all ranks
        share, keeps the `keep` newest, and returns its path. A kill at any moment loses none.

        Errors: AutoparError, on every rank, where one couldn't write; earlier ones stay.
        """
        self._need_values()
        return save_checkpoint(self._running(), Path(folder), keep)

    def load_checkpoint(self, folder: str | Path, *, drop_state: Collection[str] = ()) -> None:
        """Goes on from the newest complete checkpoint of a folder (or from one given itself), saved
        under any plan of the same model. `drop_state` names what isn't wanted: "optimizer",
        "random", or state that this plan doesn't know.

        Errors: AutoparError, on every rank: no complete checkpoint, a corrupt one, another model's,
        another optimizer's, state that this plan doesn't know.
        """
        if isinstance(drop_state, str):
            raise AutoparError(f"drop_state takes several names: ({drop_state!r},)")
        opened = open_checkpoint(self._running(), Path(folder), drop_state)
        self._gradients_ready = False
        self._unloaded = {leaf.name for leaf in self.leaves}
        opened.read(self._running())
        self._unloaded.clear()
        self.steps = opened.step

    def close(self) -> None:
        """Destroys the process groups made for this program; the default one stays."""
        self.mesh.close()

    # ------------------------------------------------------------ inside

    def _open_groups(self) -> None:
        """Opens what sums and gathers of parameters need."""
        wanted = [
            axes
            for leaf in self.leaves
            for axes in (tuple(leaf.declaration.axes), sum_axes(leaf, self.mesh))
        ]
        if self.program.stages is None:
            self.mesh.open(wanted)  # the same list on every rank
        else:
            self.mesh.open_together(wanted)

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        named = [(leaf.name, leaf.value) for leaf in self.leaves if leaf.declaration.trainable]
        if not any(leaf.declaration.trainable for leaf in self._catalogue):
            raise AutoparError("The model has no trainable parameter (requires_grad is False)")
        if not named:  # all of this stage is frozen; no optimizer takes nothing
            named = [("", nn.Parameter(torch.empty(0, device=self.mesh.device)))]
        return [(name, value) for name, value in named if isinstance(value, nn.Parameter)]

    def _running(self) -> Running:
        return Running(
            self.leaves,
            self.mesh,
            self.optimizer,
            tuple(kept for root in self.roots for kept in root.kept_state.values()),
            self.random,
            *self._stream,
            self.steps,
            self._catalogue,
        )

    @property
    def _stream(self) -> tuple[int, int]:
        """Which stream of random numbers this rank draws from, of how many: one for each share of
        the batch, on each stage."""
        stages = self.program.stages
        if stages is None:
            return self.data_parallel_rank, self.data_parallel_size
        group = self.mesh[stages.axis]
        index = group.rank * self.data_parallel_size + self.data_parallel_rank
        return index, group.size * self.data_parallel_size

    def _random_stream(self, seed: int | None) -> RandomStream:
        """Ranks that share samples and layers draw the same masks, others different ones."""
        given = torch.initial_seed() if seed is None else seed
        base = torch.tensor(given % 2**62, device=self.mesh.device)
        if self.mesh.world.size > 1:
            dist.broadcast(base, src=0, group=self.mesh.world.process_group)
        return RandomStream(int(base) + self._stream[0], self.mesh.device)

    def _microbatches(self, local_batch: Any) -> list[tuple[Tensor, ...]]:
        self._need_values()
        tensors = batches.local_tensors(local_batch, self.program, self.mesh.device)
        if not self._peers_checked:
            data = self.mesh[self.program.data_axes]
            batches.check_peers(tensors, self.program, data, self.mesh.world, self.mesh.device)
            self._peers_checked = True
        return batches.microbatches(tensors, self.program)

    def _counts(self, pieces: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What mean losses divide by, over all microbatches and data axes: one all-reduce."""
        if not self.program.defines("counts"):
            return ()
        with torch.no_grad():
            rows = [self.roots[0].counts(*piece) for piece in pieces]
        dtypes = [count.dtype for count in rows[0]]
        # float64 is exact for integers up to 2^53.
        sums = torch.stack([torch.stack(row).double() for row in rows]).sum(0)
        group = self.mesh[self.program.data_axes]
        if group.size > 1:
            dist.all_reduce(sums, group=group.process_group)
        return tuple(count.to(dtype) for count, dtype in zip(sums.unbind(), dtypes, strict=True))

    def _global_loss(self, total: Tensor) -> Tensor:
        group = self.mesh[self.program.loss_sums]
        if group.size > 1:
            dist.all_reduce(total, group=group.process_group)
        return total

    def _need_values(self) -> None:
        if self._unloaded:
            raise AutoparError(
                f"{len(self._unloaded)} tensors have no values yet ({min(self._unloaded)}, …): "
                "call load_weights or load_from_rank0 first"
            )

    def _need_gradients(self, method: str) -> None:
        if not self._gradients_ready:
            raise AutoparError(f"{method}() needs the gradients of a forward_backward() before it")


def _bind(root: nn.Module, code: nn.Module) -> None:
    for name, module in root.named_modules():
        if isinstance(module, OpaqueLayer):
            module.bind(name, code.get_submodule(name))


def build_optimizer(
    factory: OptimizerFactory | None, named: list[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """The optimizer over (name, parameter) pairs; `factory` as in `TrainingModule`.

    Errors: AutoparError where it returns something else.
    """
    made_of = torch.optim.AdamW if factory is None else factory
    base = made_of.func if isinstance(made_of, partial) else made_of
    takes_parameters = isinstance(base, type) and issubclass(base, torch.optim.Optimizer)
    made: Any = made_of
    optimizer = made([value for _, value in named]) if takes_parameters else made(named)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise AutoparError(
            f"optimizer must be a class of torch.optim, a partial of one, or a callable of "
            f"(name, parameter) pairs that returns one; it returned {type(optimizer).__name__}"
        )
    return optimizer

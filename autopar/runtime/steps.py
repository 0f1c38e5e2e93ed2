"""The forwards and backwards of a step: microbatch after microbatch, or through stages."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.fsdp import forget_forward
from autopar.runtime.pipeline import Part, Pipeline, Tensors
from autopar.runtime.process_mesh import ProcessMesh
from autopar.runtime.program import Program
from autopar.runtime.roots import Roots, of_part
from autopar.runtime.zero import ShardedState

Pieces = Sequence[Tensors]
"""The batch's tensors, for each microbatch."""


class Steps:
    """Runs all microbatches on this rank. Gradients are added up; sums over ranks come after.

    Both methods return the sum of this rank's losses: partial over the program's loss_sums.
    """

    def __init__(self, program: Program, roots: Roots, mesh: ProcessMesh) -> None:
        self._program, self._roots, self._mesh = program, roots, mesh
        self._sharded = {
            part: ShardedState(tuple(of_part(roots, part))) for part in sorted(roots.parts)
        }

    def step(self, pieces: Pieces, counts: Tensors) -> Tensor:
        """Forward and backward of every microbatch."""
        self._begin(training=True)
        if self._program.stages is not None:
            return self._pipeline().step(self._parts(pieces, counts), self._mesh.device)
        ((part, root),) = self._roots.parts.items()
        total = torch.zeros((), device=self._mesh.device)
        for index, piece in enumerate(pieces, start=1):
            loss = root(*piece, counts)
            self._sharded[part].begin_backward(last=index == len(pieces))
            loss.backward()
            self._sharded[part].end_backward()
            total = total + loss.detach()
        return total

    def evaluate(self, pieces: Pieces, counts: Tensors) -> Tensor:
        """Forward of every microbatch, dropout off."""
        self._begin(training=False)
        if self._program.stages is not None:
            total = self._pipeline().forward(self._parts(pieces, counts), self._mesh.device)
        else:
            (root,) = self._roots.parts.values()
            total = torch.zeros((), device=self._mesh.device)
            with torch.no_grad():
                for piece in pieces:
                    total = total + root(*piece, counts)
        for root in self._roots.parts.values():
            forget_forward(root)
        return total

    def _begin(self, training: bool) -> None:
        for part, root in self._roots.parts.items():
            root.train(training)
            self._sharded[part].begin()

    def _pipeline(self) -> Pipeline:
        stages = self._program.stages
        assert stages is not None
        return Pipeline(stages.table, stages.boundaries, self._mesh[stages.axis])

    def _parts(self, pieces: Pieces, counts: Tensors) -> dict[int, Part]:
        out = {}
        for part, root in self._roots.parts.items():
            leaves = tuple(of_part(self._roots, part))
            out[part] = Part(
                partial(self._run, part, root, pieces, counts),
                tuple(leaf.registered for leaf in leaves if leaf.declaration.trainable),
                self._sharded[part].begin_backward,
                self._sharded[part].end_backward,
            )
        return out

    def _run(
        self,
        part: int,
        root: Any,
        pieces: Pieces,
        counts: Tensors,
        microbatch: int,
        received: Tensors,
    ) -> Tensors:
        stages = self._program.stages
        assert stages is not None
        names = [one.name for one in self._program.inputs]
        piece = pieces[microbatch]
        taken = [piece[names.index(name)] for name in stages.takes[part]]
        if part + 1 == stages.table.parts:
            return (root(*received, *taken, counts),)
        given: Tensors = root(*received, *taken)
        return given

"""Faults of pipelines: of schedules, of what stages send, and of weights that two of them share."""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from equality import Edit
from fault import EVERYTHING, Fault, instead
from torch import Tensor

from autopar.runtime import training
from autopar.runtime.leaves import Place
from autopar.runtime.pipeline import Part, Pipeline, _Run
from autopar.runtime.split_backward import Later


def _labels_of_the_next(self: Pipeline, parts: Mapping[int, Part], device: Any) -> Tensor:
    """The last part sees its inputs of one microbatch with activations of another."""
    last, count = self.table.parts - 1, self.table.microbatches
    changed = dict(parts)
    if last in parts:
        plain = parts[last]
        changed[last] = replace(plain, run=lambda m, x: plain.run((m + 1) % count, x))
    return _step(self, changed, device)


_step = Pipeline.step


def _zeros_back(self: _Run, part: int, microbatch: int, grads: tuple[Tensor, ...]) -> None:
    _give_back(self, part, microbatch, tuple(torch.zeros_like(grad) for grad in grads))


_give_back = _Run._give_back


@contextmanager
def _one_half_left_out() -> Iterator[None]:
    """The weights' half of each rank's second backward (of the first no label counts)."""
    whole, turns = Later.run, itertools.count()

    def run(self: Later) -> None:
        if next(turns) != 1:
            whole(self)

    with mock.patch.object(Later, "run", run):
        yield


STAGES = {
    "tied weights: each stage keeps its own gradient": Fault(
        "tie",
        "gpt2_3",
        "pp2_tp2",
        red=r"transformer\.wte\.weight|norm|weights",
        green=r"loss|.*h\.\d.*",
        patch=instead(training, "sum_shared", lambda leaves, mesh: None),
    ),
    "tied weights: counted on both stages": Fault(
        "tie",
        "gpt2_3",
        "pp2_tp2",
        red=r"norm|weights",
        green=r"loss|transformer.*",
        patch=instead(Place, "first", property(lambda self: True, lambda self, value: None)),
    ),
    "a layer run twice": Fault(
        "schedule",
        "llama_3",
        "pp2_tp2",
        (Edit(r"for i in range\(0, 2\):", "for i in (0, 0, 1):"),),
        red=EVERYTHING,
    ),
    "labels of the next microbatch": Fault(
        "schedule",
        "gpt2_3",
        "pp2_tp2",
        red=EVERYTHING,
        patch=instead(Pipeline, "step", _labels_of_the_next),
    ),
    "nothing is sent back": Fault(
        "schedule",
        "layers",
        "pp4_1f1b",
        red=r"norm|weights|layers\.0.*",
        green=r"loss|layers\.4.*|head.*",
        patch=instead(_Run, "_give_back", _zeros_back),
    ),
    "zero_bubble: the weights' half of one backward left out": Fault(
        "schedule",
        "layers",
        "pp4_zero_bubble",
        red=r"norm|weights|layers\.[2-4].*",
        green=r"loss|layers\.0.*",
        patch=_one_half_left_out,
    ),
    "the loss of one stage alone": Fault(
        "collective",
        "layers",
        "pp4_1f1b",
        (Edit(r'LOSS_SUMS = \("pp",\)', "LOSS_SUMS = ()"),),
        red=r"loss",
        green=r"norm|layers.*",
    ),
    "backwards that start from a mean over microbatches": Fault(
        "scaling",
        "layers",
        "pp4_1f1b",
        (Edit(r"div = loss_sum / counts\[0\]", "div = loss_sum / counts[0] / 4"),),
        red=r"loss|norm|layers.*",
    ),
}

"""What a fault is that is put in on purpose, and a task for the pool that runs with one."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import context
import equality
import experts
import matrix_runs
import models
from equality import Comparison, Edit, edited, run
from families import FAMILIES
from models import Job, deep_classifier, gpt2, llama

import autopar

Kind = Literal["collective", "mask", "position", "routing", "scaling", "schedule", "tie"]
MODELS: dict[str, Callable[[], Job]] = {
    **matrix_runs.MODELS,
    "gpt2": gpt2,
    "llama": llama,
    "gpt2_3": lambda: gpt2(layers=3),
    "llama_3": lambda: llama(layers=3),
    "layers": deep_classifier,
    "mlp": models.classifier,
    "bert_padded": lambda: context.padded(FAMILIES["bert"].tiny()),
}
EVERYTHING = r"loss|norm|weights"


@dataclass(frozen=True)
class Fault:
    """A model under a `case` of test_equality, or under a plan in the words of the matrix, with its
    emitted source edited, or with something in the runtime replaced.

    `red` and `green` are regular expressions of parts ("loss", "norm", "weights" after the steps,
    or a parameter's name: its gradient): some rank finds each part of `red` wrong by more than RED,
    every rank finds each of `green` right to GREEN.
    """

    kind: Kind
    model: str
    case: str
    edits: tuple[Edit, ...] = ()
    red: str = r"norm|weights"
    green: str = r""
    patch: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def compiled(fault: Fault, job: Job) -> autopar.Compiled:
    """The program without the fault."""
    if fault.case in (*equality.PINS, *equality.STAGED):
        return equality.compiled(job, fault.case)
    return matrix_runs.compiled(job, fault.case)


def run_with(fault: Fault, even: bool = False) -> Comparison:
    """A comparison with the fault; `even`: no label is ignored."""
    with experts.wide(), fault.patch():
        job = MODELS[fault.model]()
        job.model.double()
        if even:
            job = replace(job, batch={**job.batch, "labels": job.batch["input_ids"].clone()})
        return run(job, edited(compiled(fault, job), fault.edits))


def instead(where: Any, name: str, new: Any) -> Callable[[], Any]:
    """A patch that puts something else in the place of a name."""
    return lambda: mock.patch.object(where, name, new, create=True)

"""The same call in two fresh processes, with different hash seeds, gives the same bytes."""

import os
import subprocess
import sys
from pathlib import Path

import autopar
from clusters import cluster
from models import Job, classifier, gpt2

FILES = ("plan.json", "module.py")


def planned(job: Job, memory_bytes: int) -> autopar.Compiled:
    """A job planned freely for four devices with little memory, so that strategies are mixed."""
    spec = cluster(memory_bytes=memory_bytes)
    return autopar.compile(job.model, spec, job.batch, loss=job.loss)


def save_all(folder: Path) -> None:
    """What each fresh process does."""
    planned(gpt2(), GPT2_BYTES).save(folder / "gpt2")
    planned(classifier(), MLP_BYTES).save(folder / "mlp")

"""The same call in two fresh processes, with different hash seeds, gives the same bytes."""

import os
import subprocess
import sys
from pathlib import Path

from clusters import cluster
from models import Job, classifier, gpt2

import autopar

FILES = ("plan.json", "module.py")
GPT2_BYTES, MLP_BYTES = 350_000, 30_000
"""So little memory that free planning has to mix strategies."""


def planned(job: Job, memory_bytes: int) -> autopar.Compiled:
    """A job planned freely for four devices."""
    spec = cluster(memory_bytes=memory_bytes)
    return autopar.compile(job.model, spec, job.batch, loss=job.loss)


def save_all(folder: Path) -> None:
    """What each fresh process does."""
    planned(gpt2(), GPT2_BYTES).save(folder / "gpt2")
    planned(classifier(), MLP_BYTES).save(folder / "mlp")


def start(folder: Path, hash_seed: str) -> "subprocess.Popen[bytes]":
    """A fresh process that saves into a folder."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, __file__, str(folder)], env=environment)


def test_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / seed for seed in ("1", "42")]
    processes = [start(folder, folder.name) for folder in folders]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    for model in ("gpt2", "mlp"):
        for name in FILES:
            first, second = ((folder / model / name).read_bytes() for folder in folders)
            assert len(first) > 1000
            assert first == second, f"{model}/{name}"
    plan = autopar.Plan.load(folders[0] / "gpt2" / "plan.json")
    assert len({name for region in plan.regions for name in region.strategies}) >= 3


if __name__ == "__main__":
    save_all(Path(sys.argv[1]))

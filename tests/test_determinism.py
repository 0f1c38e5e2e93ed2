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


def test_each_solvers_certificate_holds_for_the_others_plan() -> None:
    """No bound is above what the other solver found, and the steps differ by no more than the gaps
    allow."""
    for job, memory_bytes in ((gpt2(), GPT2_BYTES), (classifier(), MLP_BYTES)):
        spec = cluster(memory_bytes=memory_bytes)
        plans = [
            autopar.compile(job.model, spec, job.batch, loss=job.loss, solver=solver).plan
            for solver in ("highs", "cbc")
        ]
        assert [plan.certificate.solver for plan in plans] == ["highs", "cbc"]
        for one in plans:
            for other in plans:
                assert one.certificate.bound_s <= other.predicted.step_s * (1 + 1e-9)


if __name__ == "__main__":
    save_all(Path(sys.argv[1]))

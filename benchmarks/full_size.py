"""The models of tests/families.py at full size, on meta, with a global batch of any size."""

import sys
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parent.parent / "tests"


def job_of(name: str, cluster: str, samples: int) -> Any:
    """A model in 16 bits (float16 on V100, else bfloat16) with its loss and a batch of meta
    tensors."""
    sys.path.insert(0, str(TESTS))
    from families import FAMILIES
    from models import Job

    full = {key: build for family in FAMILIES.values() for key, build in family.full.items()}
    job = full[name]()
    half = torch.float16 if cluster.startswith("v100") else torch.bfloat16
    batch = {
        key: torch.empty(
            (samples, *value.shape[1:]),
            dtype=half if value.is_floating_point() else value.dtype,
            device="meta",
        )
        for key, value in job.batch.items()
    }
    return Job(job.model.to(half), batch, job.loss)

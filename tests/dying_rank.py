"""Run by test_dying_rank under torchrun: one rank ends in the middle of training."""

import os
import sys

from models import classifier

import autopar


def main(how: str) -> None:
    """Trains five steps; rank 2 raises, or is gone without a word, after the second."""
    job = classifier()
    compiled = autopar.compile(job.model, "cpu:4", job.batch, loss=job.loss, pin={"dp": 4})
    parallel = compiled.materialize()
    local = parallel.shard_batch(job.batch)
    for step in range(5):
        if step == 2 and parallel.data_parallel_rank == 2:
            if how == "raise":
                raise RuntimeError("rank 2 has had enough")
            os._exit(17)
        parallel.train_step(local)


if __name__ == "__main__":
    main(sys.argv[1])

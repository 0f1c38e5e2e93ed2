"""How long planning takes, and what it proves.

python benchmarks/planning.py [model cluster …]

Each pair is planned in a process of its own, three times; the time is the best of `compile`, after
imports and without building the model. Memory is the process's peak, imports included. Without
arguments: GPT-2 on 8 devices, Llama-3-8B on 8 and on 64.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
ROUNDS = 3
PAIRS = (("gpt2-124M", "h100:8"), ("llama3-8B", "h100:8"), ("llama3-8B", "h100:64"))


def measure(name: str, cluster: str) -> dict[str, Any]:
    """One pair, in this process."""
    import resource
    import warnings

    sys.path.insert(0, str(TESTS))
    from families import FAMILIES

    import autopar

    warnings.simplefilter("ignore")
    full = {key: build for family in FAMILIES.values() for key, build in family.full.items()}
    job = full[name]()
    start = time.perf_counter()
    compiled = autopar.compile(job.model, cluster, job.batch, loss=job.loss)
    seconds = time.perf_counter() - start
    plan = compiled.plan
    return {
        "seconds": seconds,
        "capture_s": compiled.report["capture_s"],
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "axes": {axis: size for axis, size in plan.axes.items() if size > 1},
        "microbatches": plan.microbatches,
        "step_s": plan.predicted.step_s,
        "gap": plan.certificate.gap,
        "difference_s": plan.certificate.difference_s,
        "candidates": plan.certificate.candidates,
        "solved": plan.certificate.solved,
    }


def best(name: str, cluster: str) -> dict[str, Any]:
    """The fastest of three processes. Errors: RuntimeError with what a process said that failed."""
    runs = []
    for _ in range(ROUNDS):
        given = [sys.executable, __file__, "--one", name, cluster]
        done = subprocess.run(given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return min(runs, key=lambda run: run["seconds"])


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", action="store_true")
    parser.add_argument("pairs", nargs="*", help="model cluster …")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*given.pairs)))
        return
    pairs = list(zip(given.pairs[::2], given.pairs[1::2], strict=True)) or PAIRS
    for name, cluster in pairs:
        run = best(name, cluster)
        mesh = " · ".join(f"{axis}{size}" for axis, size in run["axes"].items())
        print(
            f"{name} on {cluster}: {run['seconds']:.1f} s ({run['capture_s']:.1f} s capture), peak "
            f"{run['peak'] / 1e9:.2f} GB; {mesh}, {run['microbatches']} microbatches, step "
            f"{run['step_s']:.4f} s; gap {run['gap']:.2%}, {run['candidates']} settings, "
            f"{run['solved']} solved, objective {run['difference_s'] * 1e3:+.1f} ms off",
            flush=True,
        )


if __name__ == "__main__":
    main()

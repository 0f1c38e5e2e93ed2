"""How long planning takes, and what it proves.

python benchmarks/planning.py [model cluster samples …] [--memory-fraction X] [--rounds n]
python benchmarks/planning.py --tight       # DeepSeek-V3 in 40 GB, Llama-3-405B on 1,024

Each case is planned in a process of its own, three times; the time is the best of `compile`, after
imports and without building the model. Memory is the process's peak, imports included. Without
arguments: GPT-2 on 8 devices, Llama-3-8B on 64, Llama-3-405B on 16,384, DeepSeek-V3 on 2,048.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from full_size import job_of

ROUNDS = 3
CASES = (
    ("gpt2-124M", "h100:8", "8"),
    ("llama3-8B", "h100:64", "512"),
    ("llama3-405B", "h100:16384", "2048"),
    ("deepseek-v3-671B", "h800:2048", "8192"),
)
TIGHT = (
    ("deepseek-v3-671B", "h800:2048", "8192", "0.5"),
    ("llama3-405B", "h100:1024", "2048", "1.0"),
)
"""With how much of the devices' memory."""


def measure(name: str, cluster: str, samples: str, fraction: str) -> dict[str, Any]:
    """One case, in this process."""
    import resource
    import warnings

    import autopar

    warnings.simplefilter("ignore")
    job = job_of(name, cluster, int(samples))
    start = time.perf_counter()
    compiled = autopar.compile(
        job.model, cluster, job.batch, loss=job.loss, memory_fraction=float(fraction)
    )
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


def best(case: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """The fastest of some processes. Errors: RuntimeError with what a process said that failed."""
    runs = []
    for _ in range(rounds):
        given = [sys.executable, __file__, "--one", *case]
        done = subprocess.run(given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return min(runs, key=lambda run: run["seconds"])


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tight", action="store_true")
    parser.add_argument("--memory-fraction", default="1.0")
    parser.add_argument("cases", nargs="*", help="model cluster samples …")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*given.cases)))
        return
    every = given.cases
    named = list(zip(every[::3], every[1::3], every[2::3], strict=True)) or CASES
    plain = [(*case, given.memory_fraction) for case in named]
    for name, cluster, samples, fraction in TIGHT if given.tight else plain:
        run = best((name, cluster, samples, fraction), given.rounds)
        mesh = " · ".join(f"{axis}{size}" for axis, size in run["axes"].items())
        times = f"{run['seconds']:.1f} s ({run['capture_s']:.1f} s capture)"
        print(
            f"{name} on {cluster}, {samples} samples: {times}, peak {run['peak'] / 1e9:.2f} GB; "
            f"{mesh}, {run['microbatches']} microbatches, step {run['step_s']:.4f} s; gap "
            f"{run['gap']:.2%}, {run['candidates']} settings, {run['solved']} solved, objective "
            f"{run['difference_s'] * 1e3:+.1f} ms off",
            flush=True,
        )


if __name__ == "__main__":
    main()

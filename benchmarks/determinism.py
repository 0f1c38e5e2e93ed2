"""Whether the same input gives the same bytes, on idle and on loaded cores.

python benchmarks/determinism.py [case …] [--runs n]

Each case is planned in many processes, each with another hash seed; every other one runs beside as
many busy loops as there are cores. What is compared is the SHA-256 of plan.json and module.py.
Errors: exit status 1 where two differ. Without arguments all cases: GPT-2 on 8 devices, a mixture
of experts, and pipelines with little memory.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from full_size import job_of

RUNS = 20
CASES: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "gpt2": ("gpt2-124M", {"preset": "h100:8"}, 8, {}),
    "experts": ("mixtral-8x7B", {"preset": "h100:16"}, 32, {}),
    "pipeline": ("gpt2-xl", {"preset": "h100:8", "memory_bytes": 12 * 10**9}, 32, {"pp": 4}),
}
"""Model, cluster, samples, pins."""


def digest(case: str) -> str:
    """One case planned in this process."""
    import warnings

    import autopar

    warnings.simplefilter("ignore")
    name, cluster, samples, pin = CASES[case]
    job = job_of(name, cluster["preset"], samples)
    compiled = autopar.compile(job.model, cluster, job.batch, loss=job.loss, pin=pin or None)
    found = hashlib.sha256(compiled.plan.to_json().encode())
    found.update(compiled.source.encode())
    return found.hexdigest()


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that do nothing but count."""
    given = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(given) for _ in range(loops)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def run(case: str, number: int) -> tuple[str, float]:
    """The digest of one process, and the seconds that it took."""
    environment = {**os.environ, "PYTHONHASHSEED": str(number)}
    start = time.perf_counter()
    with busy((os.cpu_count() or 1) if number % 2 else 0):
        done = subprocess.run(
            [sys.executable, __file__, "--one", case],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.strip(), time.perf_counter() - start


def main() -> None:
    """Prints how many different digests each case has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", choices=CASES)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    given = parser.parse_args()
    if given.one:
        print(digest(given.one))
        return
    different = False
    for case in given.cases or CASES:
        runs = [run(case, number) for number in range(given.runs)]
        found = Counter(text for text, _ in runs)
        different |= len(found) > 1
        seconds = sorted(spent for _, spent in runs)
        print(
            f"{case}: {len(runs)} runs of {seconds[0]:.0f} to {seconds[-1]:.0f} s, "
            f"{len(found)} different: "
            + ", ".join(f"{n} × {key[:12]}" for key, n in found.items()),
            flush=True,
        )
    sys.exit(different)


if __name__ == "__main__":
    main()

"""How planning grows with layers and with devices.

python benchmarks/planning_curves.py [layers] [devices] [--limit seconds]

Each case is planned in a process of its own, once. Layers: chains of 8 to 1,000 layers of which no
two are alike (`chain.py`), on 8 devices. Devices: Llama-3-8B on 8 to 16,384, with 8 samples a
device up to 2,048. The time is that of `compile`, after imports and without building the model, and
of the processor; memory is the process's peak, imports included. `--limit`: the time limit of each
search, after which the gap says what is left.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from chain import chain_of
from full_size import job_of

LAYERS = (8, 32, 128, 500, 1000)
DEVICES = (8, 64, 512, 4096, 16384)
CHAIN_SAMPLES, CHAIN_CLUSTER = 64, "h100:8"
MODEL, MOST_SAMPLES = "llama3-8B", 2048


def measure(kind: str, size: int, limit_s: float) -> dict[str, Any]:
    """One case, in this process."""
    import resource
    import warnings

    import autopar

    warnings.simplefilter("ignore")
    if kind == "layers":
        model, batch, loss = chain_of(size, CHAIN_SAMPLES)
        cluster = CHAIN_CLUSTER
    else:
        cluster = f"h100:{size}"
        job = job_of(MODEL, cluster, min(8 * size, MOST_SAMPLES))
        model, batch, loss = job.model, job.batch, job.loss
    start, processor = time.perf_counter(), time.process_time()
    compiled = autopar.compile(model, cluster, batch, loss=loss, time_limit_s=limit_s)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    plan = compiled.plan
    return {
        "seconds": seconds,
        "processor_s": processor,
        "capture_s": compiled.report["capture_s"],
        "plan_s": compiled.report["plan_s"],
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "axes": {axis: size for axis, size in plan.axes.items() if size > 1},
        "step_s": plan.predicted.step_s,
        "gap": plan.certificate.gap,
        "candidates": plan.certificate.candidates,
        "solved": plan.certificate.solved,
    }


def main() -> None:
    """The curves, a line each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("cases", nargs="*", help="layers, devices, or layers:1000, devices:64 …")
    given = parser.parse_args()
    if given.one:
        kind, size = given.cases[0].split(":")
        print(json.dumps(measure(kind, int(size), given.limit)))
        return
    for case in given.cases or ("layers", "devices"):
        kind, _, size = case.partition(":")
        for one in [int(size)] if size else LAYERS if kind == "layers" else DEVICES:
            command = [sys.executable, __file__, "--one", f"{kind}:{one}", f"--limit={given.limit}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr)
            run = json.loads(done.stdout)
            mesh = " · ".join(f"{axis}{size}" for axis, size in run["axes"].items())
            print(
                f"{one} {kind}: {run['seconds']:.1f} s ({run['capture_s']:.1f} capture, "
                f"{run['plan_s']:.1f} planning; {run['processor_s']:.1f} of the processor), peak "
                f"{run['peak'] / 1e9:.2f} GB; {mesh}, step {run['step_s']:.4f} s, gap "
                f"{run['gap']:.2%}, {run['solved']} of {run['candidates']} settings solved",
                flush=True,
            )


if __name__ == "__main__":
    main()

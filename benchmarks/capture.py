"""Capture and analysis of every family at full size: a table.

python benchmarks/capture.py [family or model …]

Each model runs in a process of its own, three times; the times are the best, after imports, without
building the model: of the clock and of the processor. Memory is the process's peak, imports
included.
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


def measure(name: str, layers: int | None) -> dict[str, Any]:
    """One model, in this process: seconds, peak bytes, and what was found."""
    import resource
    import warnings

    sys.path.insert(0, str(TESTS))
    from families import FAMILIES, llama_405b

    from autopar.capture import capture
    from autopar.graph.analyse import analyse
    from autopar.inspection import figures

    warnings.simplefilter("ignore")
    full = {key: build for family in FAMILIES.values() for key, build in family.full.items()}
    job = llama_405b(layers=layers) if layers else full[name]()
    start, cpu = time.perf_counter(), time.process_time()
    graph = analyse(capture(job.model, job.batch, job.loss))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = figures(graph)
    return {
        "seconds": seconds,
        "cpu": cpu,
        "peak": peak,
        "layers": found.layers,
        "unique": len(found.blocks) - 1,
        "regions": sum(len(b.regions) for b in graph.blocks),
        "opaque": sum(len(b.opaque) for b in found.blocks),
        "parameters": found.parameters,
        "share": found.splittable_share,
    }


def best(name: str, layers: int | None = None) -> dict[str, Any]:
    """The best of three processes."""
    runs: list[dict[str, Any]] = []
    for _ in range(ROUNDS):
        given = [sys.executable, __file__, "--one", name]
        if layers:
            given += ["--layers", str(layers)]
        done = subprocess.run(given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {key: min(run[key] for run in runs) for key in runs[0]}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="families or models; left out, all")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.layers)))
        return
    sys.path.insert(0, str(TESTS))
    from families import FAMILIES

    wanted = [
        name
        for key, family in FAMILIES.items()
        for name in family.full
        if not options.names or key in options.names or name in options.names
    ]
    heads = "s   cpu s  peak MB  layers → unique  regions  opaque  share"
    print(f"model                parameters     {heads}")
    for name in wanted:
        row = best(name)
        print(
            f"{name:<18} {row['parameters']:>12.3e} {row['seconds']:>5.1f} {row['cpu']:>7.1f} "
            f"{row['peak'] / 1e6:>8.0f} {row['layers']:>7} → {row['unique']:<6} "
            f"{row['regions']:>7} {row['opaque']:>7} {row['share']:>6.1%}",
            flush=True,
        )
    if not options.names or "llama3-405B" in options.names:
        few, many = best("llama3-405B", 8)["cpu"], best("llama3-405B", 126)["cpu"]
        print(
            f"Llama-3-405B with 8 layers {few:.2f} s of the processor, with 126 {many:.2f} s: "
            f"{many / few:.2f} ×"
        )


if __name__ == "__main__":
    main()

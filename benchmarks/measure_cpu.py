"""Measure the `cpu` preset: what a rank gets when several one-thread processes share a machine.

    python benchmarks/measure_cpu.py                                  # prints the preset
    python benchmarks/measure_cpu.py --write autopar/presets/cpu.json

All ranks work at once, between barriers, and the slowest counts: with more ranks than cores, a
rank gets its share of a core. A collective is measured as in a step, by what it adds to a matrix
product before it: on a core that computes it takes up to twice as long as on an idle one, since
each message wakes threads that displace another rank. Every figure is the best of several repeats,
since whatever else runs on the machine can only slow one down; the repeats are rounds over all
trials, so that those of one trial lie seconds apart.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

# Rows of the matrix product in each dtype; few where the CPU has no fast kernel.
ROWS = {torch.float32: 2048, torch.float64: 2048, torch.bfloat16: 2048, torch.float16: 64}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
SIZES_BYTES = tuple(4096 * 4**k for k in range(7))  # 4 KiB to 16 MiB
COMPUTE_ROWS = 256  # of the matrix product before each collective
ADD_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Trial:
    """What every rank does at once: `work`, `calls` times between two barriers."""

    work: Callable[[], object]
    calls: int

    def seconds(self) -> float:
        """Seconds of one call, on the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(self.calls):
            self.work()
        dist.barrier()
        return (time.perf_counter() - start) / self.calls


def linear(rows: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    """A small GPT-2's linear layer: [rows, 256] by [256, 1024]."""
    a, b = torch.randn(rows, 256).to(dtype), torch.randn(256, 1024).to(dtype)
    return lambda: a @ b


def addition() -> Trial:
    """The sum of two tensors of ADD_BYTES into a third, beyond a rank's share of cache."""
    a, b, out = (torch.ones(ADD_BYTES // 4) for _ in range(3))
    return Trial(lambda: torch.add(a, b, out=out), calls=3)


def small_op(op: Callable[[torch.Tensor], torch.Tensor]) -> Trial:
    """An op on 64 numbers that autograd records."""
    x = torch.ones(8, 8, requires_grad=True)
    return Trial(lambda: op(x), calls=2000)


def collective(op: str, size_bytes: int, ranks: int, group: dist.ProcessGroup) -> Trial:
    """A matrix product, then a collective whose larger side is `size_bytes`, in all groups of
    `ranks` at once."""
    whole = torch.ones(size_bytes // 4)
    part = torch.ones(size_bytes // 4 // ranks)
    work: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
    }
    compute, communicate = linear(COMPUTE_ROWS), work[op]
    return Trial(lambda: (compute(), communicate()), calls=max(2, min(12, 2**23 // size_bytes)))


def ring_terms(op: str, size_bytes: int, ranks: int) -> tuple[float, float]:
    """The factors of α and β in the ring's time (Thakur et al. 2005).

    gloo has no reduce-scatter: it all-reduces a copy, of which each rank keeps its part (torch's
    ProcessGroupGloo.cpp).
    """
    steps = (1 if op == "all_gather" else 2) * (ranks - 1)
    return float(steps), steps * size_bytes / ranks


def fit_alpha_beta(
    samples: list[tuple[str, int, int, float]], compute_s: float
) -> tuple[float, float, float]:
    """α (s), β (s a byte) and the mean error, relative to the time with the matrix product, of the
    least-squares fit of what the collectives add to `compute_s`.

    Each row is divided by its measured time, so that a small collective counts as much as a large.
    """
    terms = [ring_terms(op, size, ranks) for op, size, ranks, _ in samples]
    seconds = torch.tensor([sample[3] for sample in samples], dtype=torch.float64)
    rows = torch.tensor(terms, dtype=torch.float64) / seconds[:, None]
    added = (1 - compute_s / seconds)[:, None]
    solution = torch.linalg.lstsq(rows, added).solution
    error = (rows @ solution - added).abs().mean()
    return float(solution[0]), float(solution[1]), float(error)


def measure(rank: int, world: int, folder: str, repeats: int) -> None:
    """One rank's part of all measurements; rank 0 leaves them in `folder`."""
    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", "`torch.distributed.*_tensor` is deprecated"
    )  # the new name is younger than 2.11
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    groups = {2: pairs[rank // 2], world: dist.group.WORLD}
    trials = {
        **{f"matmul {name(dtype)}": Trial(linear(ROWS[dtype], dtype), calls=2) for dtype in ROWS},
        "compute": Trial(linear(COMPUTE_ROWS), calls=12),
        "addition": addition(),
        "pointwise": small_op(lambda x: x * 1.5),
        "view": small_op(lambda x: x.view(64)),
        **{
            f"{op} {ranks} {size}": collective(op, size, ranks, group)
            for op in COLLECTIVES
            for ranks, group in groups.items()
            for size in SIZES_BYTES
        },
    }
    for trial in trials.values():
        trial.work()
    rounds = [[trial.seconds() for trial in trials.values()] for _ in range(repeats)]
    if rank == 0:
        best_s = dict(zip(trials, map(min, zip(*rounds, strict=True)), strict=True))
        Path(folder, "best_s.json").write_text(json.dumps(best_s), encoding="utf-8")
    dist.destroy_process_group()


def name(dtype: torch.dtype) -> str:
    """The dtype's name without the module's: torch.float32 is float32."""
    return str(dtype).removeprefix("torch.")


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "an unnamed processor"


def samples(best_s: dict[str, float]) -> list[tuple[str, int, int, float]]:
    """(collective, bytes, ranks, seconds with the matrix product) of the trials that are
    collectives."""
    split = [(key.split(), seconds) for key, seconds in best_s.items()]
    return [
        (key[0], int(key[2]), int(key[1]), seconds)
        for key, seconds in split
        if key[0] in COLLECTIVES
    ]


def preset(best_s: dict[str, float], world: int, repeats: int) -> dict[str, Any]:
    """The preset as autopar/presets holds it."""
    date = datetime.date.today().isoformat()
    setting = f"{world} single-thread processes on {os.cpu_count()} cores of {cpu_name()}"
    how = f"benchmarks/measure_cpu.py: {setting}, torch {torch.__version__}, best of {repeats}"
    alpha_s, beta_s, error = fit_alpha_beta(samples(best_s), best_s["compute"])
    fit = (
        f"{how}; ring fit over {', '.join(COLLECTIVES)}, each after a matrix product of "
        f"{1e3 * best_s['compute']:.1f} ms, mean error {100 * error:.0f} % of both"
    )
    ram_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def number(value: float, source: str) -> dict[str, Any]:
        exact = value if isinstance(value, int) else float(f"{value:.3g}")
        return {"value": exact, "source": source, "date": date, "verified": True}

    def rate(dtype: torch.dtype) -> dict[str, Any]:
        shape = f"{ROWS[dtype]} x 256 x 1024"
        return number(
            2 * ROWS[dtype] * 256 * 1024 / best_s[f"matmul {name(dtype)}"], f"{how}; {shape}"
        )

    device = {
        "name": "cpu",
        "backend": "gloo",
        "memory_bytes": number(
            ram_bytes // world, f"a default: this machine's {ram_bytes} bytes over {world}"
        ),
        "overhead_bytes": number(0, "stated: the process itself isn't counted on a CPU"),
        "flops_per_s": {name(dtype): rate(dtype) for dtype in ROWS},
        "memory_bytes_per_s": number(
            3 * ADD_BYTES / best_s["addition"], f"{how}; sums of {ADD_BYTES} bytes"
        ),
        "op_overhead_s": number(best_s["pointwise"], f"{how}; recorded by autograd"),
    }
    link = {
        "name": "loopback",
        "devices": "all",
        "latency_s": number(alpha_s, fit),
        "bytes_per_s": number(1 / beta_s, fit),
    }
    return {
        "name": "cpu",
        "summary": f"gloo, {setting}",
        "date": date,
        "device": device,
        "links": [link],
    }


def main() -> None:
    """Start the ranks, then print or write the preset; the collectives' fit goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4, choices=(4, 8))
    parser.add_argument("--repeats", type=int, default=24, help="more on a busy machine")
    parser.add_argument("--write", type=Path, help="the preset's file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (options.ranks, folder, options.repeats), nprocs=options.ranks)
        best_s = json.loads(Path(folder, "best_s.json").read_text(encoding="utf-8"))
    alpha_s, beta_s, _ = fit_alpha_beta(samples(best_s), best_s["compute"])
    for op, size, ranks, seconds in samples(best_s):
        steps, sent = ring_terms(op, size, ranks)
        fitted = steps * alpha_s + sent * beta_s
        added_s = seconds - best_s["compute"]
        row = f"{op:15s} {ranks} ranks {size:9d} bytes {1e3 * added_s:8.3f} ms"
        print(f"{row}, fit {1e3 * fitted:8.3f} ms", file=sys.stderr)
    print(f"view: {1e6 * best_s['view']:.2f} us an op", file=sys.stderr)
    text = (
        json.dumps(preset(best_s, options.ranks, options.repeats), indent=2, ensure_ascii=False)
        + "\n"
    )
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()

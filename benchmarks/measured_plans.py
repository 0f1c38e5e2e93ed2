"""The demo's GPT-2 under four plans: steps as predicted from a spec measured here, and as they are.

    torchrun --nproc-per-node 4 benchmarks/measured_plans.py
    torchrun --nproc-per-node 4 benchmarks/measured_plans.py --spec measured.yaml  # one made before

Plans take turns, a few steps at a time, so that other work on the machine slows all alike; a plan's
time is the median of its turns' fastest steps. Run it where nothing else runs: the load is printed.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import autopar
from autopar.measure import Origin, Settings, machine_name, measure, spec_of

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

PLANS: Mapping[str, Mapping[str, Any]] = {
    "dp4": {"dp": 4, "microbatches": 1, "zero": False, "recompute": False},
    "dp4, ZeRO 3": {"dp": 4, "microbatches": 1, "zero": 3, "recompute": False},
    "dp2 · tp2, sequence": {
        **{"dp": 2, "tp": 2, "microbatches": 1, "sequence": True},
        **{"zero": False, "recompute": False},
    },
    "tp4, two microbatches": {
        **{"tp": 4, "microbatches": 2, "sequence": False},
        **{"zero": False, "recompute": False},
    },
}
TIE = 1.05
"""Steps within this ratio are as good as equal."""


@dataclass
class Trial:
    """One plan, and the fastest step of each of its turns."""

    name: str
    predicted_s: float
    module: autopar.TrainingModule
    turns_s: list[float] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        """The median turn."""
        return statistics.median(self.turns_s)


def measured_spec(repeats: int) -> Mapping[str, Any]:
    """What `autopar measure` finds, here and now."""
    world = dist.get_world_size()
    figures = measure(torch.device("cpu"), world, Settings(repeats=repeats))
    text = f"{world} processes on {machine_name('cpu')}, torch {torch.__version__}"
    return spec_of(figures, Origin(text, time.strftime("%Y-%m-%d")))


def planned(name: str, spec: Any, example: Any, corpus: Any) -> Trial:
    """A plan with everything pinned, ready to train."""
    compiled = autopar.compile(
        example.build_model(),
        spec,
        example.global_batch(corpus, 0),
        optimizer=example.OPTIMIZER,
        clip_norm=example.CLIP_NORM,
        pin=PLANS[name],
    )
    return Trial(name, compiled.plan.predicted.step_s, compiled.materialize())


def turn(trial: Trial, batch: Any, steps: int) -> None:
    """A few steps; all ranks start each together, and the slowest counts."""
    local = trial.module.shard_batch(batch)
    seconds = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        trial.module.train_step(local)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    trial.turns_s.append(min(seconds))


def in_order(trials: Sequence[Trial]) -> bool:
    """Whether predicted and measured steps are in the same order, ties aside."""
    pairs = [(a, b) for i, a in enumerate(trials) for b in trials[i + 1 :]]
    return all(
        (a.predicted_s - b.predicted_s) * (a.measured_s - b.measured_s) > 0
        for a, b in pairs
        if not _tied(a.measured_s, b.measured_s) and not _tied(a.predicted_s, b.predicted_s)
    )


def _tied(one: float, other: float) -> bool:
    return max(one, other) <= TIE * min(one, other)


def report(trials: Sequence[Trial], console: Console) -> None:
    """Predicted against measured."""
    table = Table(title="a step of the demo's GPT-2")
    for heading in ("plan", "predicted", "measured", "fastest", "off by"):
        table.add_column(heading)
    for one in sorted(trials, key=lambda t: t.measured_s):
        table.add_row(
            one.name,
            f"{1e3 * one.predicted_s:.1f} ms",
            f"{1e3 * one.measured_s:.1f} ms",
            f"{1e3 * min(one.turns_s):.1f} ms",
            f"{100 * (one.predicted_s / one.measured_s - 1):+.0f} %",
        )
    console.print(table)
    console.print("in the same order" if in_order(trials) else "not in the same order")


def main() -> None:
    """Measure, plan, train, compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", help="a preset or a file, in place of measuring")
    parser.add_argument("--repeats", type=int, default=12, help="rounds of the measurement")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="of each turn")
    options = parser.parse_args()
    import train_gpt2 as example
    from stdlib_text import load_corpus

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    console = Console(quiet=dist.get_rank() != 0, width=120)
    console.print(f"load of the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    start = time.perf_counter()
    spec = options.spec or measured_spec(options.repeats)
    console.print(f"measured in {time.perf_counter() - start:.0f} s")
    corpus = load_corpus()
    trials = [planned(name, spec, example, corpus) for name in PLANS]
    batch = example.global_batch(corpus, 0)
    for trial in trials:
        turn(trial, batch, 2)
        trial.turns_s.clear()
    for _ in range(options.turns):
        for trial in trials:
            turn(trial, batch, options.steps)
    report(trials, console)
    console.print(f"load of the last minute: {os.getloadavg()[0]:.1f}")
    dist.barrier()
    for trial in trials:
        trial.module.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Measure the `cpu` preset: what a rank gets when several one-thread processes share a machine.

    python benchmarks/measure_cpu.py                                  # prints the preset
    python benchmarks/measure_cpu.py --write autopar/presets/cpu.json

The measurement is `autopar measure`'s (autopar/measure), in processes that this starts; the
collectives' fit goes to stderr.
"""

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from autopar.measure import Figures, Origin, Settings, machine_name, measure
from autopar.measure.fit import fit, fits, terms
from autopar.measure.spec import device_of, links_of


def work(rank: int, world: int, folder: str, repeats: int) -> None:
    """One rank's part of all measurements; rank 0 leaves them in `folder`."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    figures = measure(torch.device("cpu"), world, Settings(repeats=repeats))
    if rank == 0:
        torch.save(figures, Path(folder, "figures.pt"))
    dist.destroy_process_group()


def preset(figures: Figures, repeats: int) -> dict[str, Any]:
    """The preset as autopar/presets holds it."""
    setting = f"{figures.world} single-thread processes on {machine_name('cpu')}"
    text = f"benchmarks/measure_cpu.py: {setting}, torch {torch.__version__}, best of {repeats}"
    origin = Origin(text, datetime.date.today().isoformat())
    return {
        "name": "cpu",
        "summary": f"gloo, {setting}",
        "date": origin.date,
        "device": device_of(figures, origin),
        "links": links_of(figures, origin),
    }


def report(figures: Figures) -> None:
    """Each collective beside its fit, to stderr."""
    (samples,) = figures.levels
    for op, up_to, found in fits(figures.backend, samples):
        size = f"up to {up_to} bytes" if up_to else "any size"
        print(
            f"{op:15s} {size:20s} {1e6 * found.alpha_s:9.1f} us, {1e-9 / found.beta_s:8.2f} GB/s, "
            f"error {found.error:.0%}",
            file=sys.stderr,
        )
    whole = fit(figures.backend, samples)
    for sample in samples:
        steps, sent = terms(figures.backend, sample.op, sample.nbytes, sample.ranks)
        fitted_s = steps * whole.alpha_s + sent * whole.beta_s
        row = f"{sample.op:15s} {sample.ranks} ranks {sample.nbytes:9d} bytes"
        print(
            f"{row} {1e3 * sample.added_s:8.3f} ms, one fit of all {1e3 * fitted_s:8.3f} ms",
            file=sys.stderr,
        )
    print(f"view: {1e6 * figures.view_s:.2f} us an op", file=sys.stderr)


def main() -> None:
    """Start the ranks, then print or write the preset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4, choices=(4, 8))
    parser.add_argument("--repeats", type=int, default=24, help="more on a busy machine")
    parser.add_argument("--write", type=Path, help="the preset's file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (options.ranks, folder, options.repeats), nprocs=options.ranks)
        figures = torch.load(Path(folder, "figures.pt"), weights_only=False)
    report(figures)
    text = json.dumps(preset(figures, options.repeats), indent=2, ensure_ascii=False) + "\n"
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()

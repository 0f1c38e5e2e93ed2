"""What `autopar measure` does in each of torchrun's processes."""

import datetime
import os
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.measure.run import Settings, measure
from autopar.measure.spec import Origin, check_path, spec_of, write_spec
from autopar.runtime.launch import initialise, torchrun_sizes


def measure_here(out: Path, repeats: int, device_type: str | None = None) -> bool:
    """Measure torchrun's processes and write the spec; whether this rank has written it (rank 0).

    Errors: AutoparError outside torchrun, with one process, and for a file that can't be.
    """
    check_path(out)
    sizes = torchrun_sizes()
    if sizes is None or sizes[0] < 2:
        raise AutoparError(
            "autopar measure needs two processes or more, for the links between them: "
            f"torchrun --nproc-per-node 4 --no-python autopar measure --out {out}"
        )
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    initialise(kind)
    device = (
        torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )
    world, local_world = sizes
    figures = measure(device, local_world, Settings(repeats=repeats))
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    if first:
        what = f"{world} processes, {local_world} a node, on {machine_name(figures.device_name)}"
        text = f"autopar measure: {what}, torch {torch.__version__}, best of {repeats}"
        today = datetime.date.today().isoformat()
        write_spec(spec_of(figures, Origin(text, today)), out)
    return first


def machine_name(device_name: str) -> str:
    """The device's name, for a CPU the cores and the processor's as the system gives it."""
    if device_name != "cpu":
        return device_name
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else 'an unnamed processor'}"

"""The cluster that this process is on, by what it shows and what autopar knows of its devices."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.preset_files import preset_names, read_preset
from autopar.runtime.launch import torchrun_sizes


@dataclass(frozen=True)
class Machine:
    """A spec as `cluster_spec` takes it, and where it is from."""

    spec: Mapping[str, Any]
    source: str


def detect_machine() -> Machine:
    """This machine, times the nodes that torchrun reports.

    GPUs get the figures of the preset whose pattern their name has, with their own memory; a node
    with fewer of them than the preset's is a smaller level. Without a GPU: one process for each of
    torchrun's, or for each core, with its share of the memory and the rates of the preset `cpu`,
    which were measured elsewhere (`autopar measure` finds this machine's).

    Errors: AutoparError for a GPU that no preset knows.
    """
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        here = torch.cuda.device_count()
        world, local = torchrun_sizes() or (here, here)
        return gpu_machine(properties.name, properties.total_memory, world, local)
    cores = os.cpu_count() or 1
    world, local = torchrun_sizes() or (cores, cores)
    return cpu_machine(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), world, local)


def gpu_machine(name: str, memory_bytes: int, world: int, local: int) -> Machine:
    """`world` GPUs of that name, `local` of them in each node."""
    preset = _preset_of(name)
    data = read_preset(preset)
    spec: dict[str, Any] = {"preset": preset, "devices": world, "memory_bytes": memory_bytes}
    if local < data["detect"]["node"] and local < world:
        first, *rest = data["links"]
        spec["links"] = [{**first, "devices": local}, *rest]
    source = f"detected {world} x {name}, {local} a node; rates of preset {preset}"
    return Machine(spec, source)


def cpu_machine(memory_bytes: int, world: int, local: int) -> Machine:
    """`world` processes on CPUs, `local` of them in each node of that memory."""
    spec = {"preset": "cpu", "devices": world, "memory_bytes": memory_bytes // local}
    source = (
        f"detected {world} processes on CPUs, {local} a node; rates of preset cpu, measured "
        "elsewhere: `autopar measure` finds this machine's"
    )
    return Machine(spec, source)


def _preset_of(name: str) -> str:
    patterns = {
        preset: data["detect"]["pattern"]
        for preset in preset_names()
        for data in [read_preset(preset)]
        if "detect" in data
    }
    found = [preset for preset, pattern in patterns.items() if re.search(pattern, name)]
    if len(found) != 1:
        raise AutoparError(
            f"no preset is for {name!r} (known: {', '.join(patterns)}): measure it with "
            "`autopar measure` under torchrun, or give the cluster's numbers"
        )
    return found[0]

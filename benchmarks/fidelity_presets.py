"""What the fit found, as the presets have it: a planner's machines are those that were fitted."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from published_runs import LINE_BYTES_PER_S, PEAK_BYTES_PER_S

PRESETS = Path(__file__).parents[1] / "autopar" / "presets"
OWNERS = {
    "a100": "ampere",
    "a100_40gb": "ampere",
    "h100": "hopper",
    "h200": "hopper",
    "h800": "hopper",
    "b200": "blackwell",
    "gb200_nvl72": "blackwell",
}
ATTENTION = {
    "ampere": "fsdp2_on_ampere.attention",
    "hopper": "fsdp2_on_hopper.attention",
    "blackwell": "nemo_on_blackwell.attention",
}
"""torch's own kernel, where some run had it."""

SOFTWARE = "fsdp2"
"""The generation of software that programs of this project are: torch of 2024 and later."""

SOURCE = "fitted by benchmarks/fidelity_fit.py on half of the published runs of benchmarks/data"


def fitted_values(preset: str, values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """What a preset takes of the constants, by place."""
    owner = OWNERS[preset]
    shared = ("tile_128", "tile_64", "prologue", "aligned_16", "unaligned")
    kernels = {
        **{name: values[f"all.{name}"] for name in (*shared, "attention_backward")},
        "host_exponent": values["all.host_exponent"],
        "sustained": values[f"{owner}.sustained"],
        "attention": values[ATTENTION[owner]],
        "overlap_slowdown": values[f"{SOFTWARE}.overlap_slowdown"],
        "collective_s": values[f"{SOFTWARE}.collective_s"],
    }
    memory = PEAK_BYTES_PER_S[preset] * values[f"{owner}.memory"]
    network = LINE_BYTES_PER_S[preset] * values["network.rate"]
    found: dict[tuple[str, ...], float] = {
        ("device", "op_overhead_s"): values[f"{SOFTWARE}.op_s"],
        ("device", "memory_bytes_per_s"): memory,
        ("links", "network", "bytes_per_s"): network,
        **{("device", "kernels", name): value for name, value in kernels.items()},
    }
    if owner == "ampere":
        found["links", "network", "crowding"] = values["network.crowding"]
    return {place: float(f"{value:.4g}") for place, value in found.items()}


def place_of(preset: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    """The entry of a place: value, source, date."""
    found: Any = preset
    for key in place:
        found = (
            next(one for one in found if one["name"] == key)
            if isinstance(found, list)
            else found[key]
        )
    return found  # type: ignore[no-any-return]


def write_presets(values: Mapping[str, float], date: str) -> None:
    """Into the files of all presets that have an owner."""
    for name in OWNERS:
        path = PRESETS / f"{name}.json"
        preset = json.loads(path.read_text(encoding="utf-8"))
        for place, value in fitted_values(name, values).items():
            entry = place_of(preset, place)
            if entry["value"] != value:
                entry.update(value=value, source=SOURCE, date=date, verified=False)
        path.write_text(json.dumps(preset, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

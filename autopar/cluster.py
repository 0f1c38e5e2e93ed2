"""The cluster as a value, from a preset, a dict or a file."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from autopar.cluster_checks import checked, known_keys, positive, required, whole_number
from autopar.cluster_links import cut_links, describe_link
from autopar.detect import detect_machine
from autopar.devices import ClusterSpec, Device, Fit, Kernels, Link, Protocol
from autopar.errors import AutoparError
from autopar.preset_files import read_preset

__all__ = [
    "ClusterSpec",
    "Device",
    "Fit",
    "Kernels",
    "Link",
    "Protocol",
    "Spec",
    "describe_cluster",
    "resolve_cluster",
    "with_devices",
]

Spec = ClusterSpec | str | os.PathLike[str] | Mapping[str, Any]
AUTO = "auto"
"""The spec of the machine that asks."""

_DEVICE_KEYS = (
    "name",
    "backend",
    "memory_bytes",
    "flops_per_s",
    "memory_bytes_per_s",
    "op_overhead_s",
    "overhead_bytes",
    "communicator_bytes",
    "fragmentation",
    "special_per_s",
    "kernels",
)
_OPTIONAL_KEYS = (
    *("overhead_bytes", "communicator_bytes", "fragmentation", "special_per_s"),
    "kernels",
)
_FULL_KEYS = ("device", "devices", "links", "source", "date")
_PRESET_KEYS = ("preset", "devices", "links", *_DEVICE_KEYS)


def resolve_cluster(spec: Spec) -> ClusterSpec:
    """The ClusterSpec that `spec` describes, checked.

    `spec`: a ClusterSpec; "auto", what this machine has (see `autopar.detect`); a preset and a
    number of devices, "h100:64"; a dict that names a preset and overrides the device's fields or
    the links, {"preset": "cpu:4", "memory_bytes": 2**30}; a dict with "device", "devices" and
    "links" in full; or the path of a JSON or YAML file with such a dict. Any number may also be
    given as {"value": …, "source": …, "date": …}. A link whose "devices" is "all" reaches the whole
    cluster; one that would reach further is cut to it.

    Errors: AutoparError for an unknown preset, a key or a number that isn't allowed, a missing
    number of devices, and links that don't nest.
    """
    if isinstance(spec, ClusterSpec):
        return checked(spec)
    if isinstance(spec, Mapping):
        return _from_mapping(spec)
    if spec == AUTO:
        found = detect_machine()
        return dataclasses.replace(_from_mapping(found.spec), source=found.source)
    if isinstance(spec, str) and not spec.endswith((".json", ".yaml", ".yml")):
        return _from_mapping({"preset": spec})
    if isinstance(spec, str | os.PathLike):
        return _from_mapping(_read(Path(spec)))
    raise AutoparError(
        f"cluster_spec is {type(spec).__name__}: pass a ClusterSpec, a preset like 'cpu:4', "
        "'auto', a dict, or the path of a JSON or YAML file"
    )


def with_devices(spec: Spec, devices: int) -> ClusterSpec:
    """The cluster that `spec` describes with another number of devices: a preset's next levels come
    in, and of a cluster in full the outermost link reaches further.

    Errors: as `resolve_cluster`, where the number doesn't fit the links.
    """
    if isinstance(spec, str | os.PathLike) and spec != AUTO:
        is_file = not isinstance(spec, str) or spec.endswith((".json", ".yaml", ".yml"))
        return with_devices(_read(Path(spec)) if is_file else {"preset": spec}, devices)
    if isinstance(spec, Mapping) and "preset" in spec and "links" not in spec:
        name = str(spec["preset"]).partition(":")[0]
        return _from_mapping({**spec, "preset": name, "devices": devices})
    whole = resolve_cluster(spec)
    outermost = whole.links[-1]
    if outermost.shape:
        raise AutoparError(
            f"link {outermost.name} is a torus of shape {list(outermost.shape)}: what shape "
            f"{devices} devices would have, nobody said"
        )
    links = (*whole.links[:-1], dataclasses.replace(outermost, devices=devices))
    return checked(dataclasses.replace(whole, devices=devices, links=links))


def describe_cluster(spec: ClusterSpec) -> dict[str, Any]:
    """The cluster in full as plain data: `resolve_cluster` makes the same ClusterSpec of it."""
    full = json.loads(json.dumps(dataclasses.asdict(spec)))
    full["device"]["flops_per_s"] = dict(spec.device.flops_per_s)
    if spec.device.kernels is None:
        del full["device"]["kernels"]
    full["links"] = [describe_link(link) for link in spec.links]
    return dict(full)


# ---------------------------------------------------------------- from text and files to mappings


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else _exponents(yaml.safe_load(text))
    except OSError as error:
        raise AutoparError(f"cluster_spec: can't read {path}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise AutoparError(f"cluster_spec: {path} isn't valid: {error}") from error
    if not isinstance(found, Mapping):
        raise AutoparError(f"cluster_spec: {path} holds {type(found).__name__}, not a mapping")
    return found


def _exponents(data: Any) -> Any:
    """`data` with "8e9" as a number: YAML 1.1 takes it for text, for want of a dot and a sign."""
    if isinstance(data, Mapping):
        return {key: _exponents(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_exponents(value) for value in data]
    number = isinstance(data, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", data)
    return float(data) if number else data


def _plain(data: Any) -> Any:
    """`data` with each {"value": v, "source": …, "date": …} replaced by v."""
    if isinstance(data, Mapping):
        return data["value"] if "value" in data else {k: _plain(v) for k, v in data.items()}
    return [_plain(v) for v in data] if isinstance(data, list | tuple) else data


# ---------------------------------------------------------------- from mappings to a ClusterSpec


def _from_mapping(spec: Mapping[str, Any]) -> ClusterSpec:
    if "preset" not in spec:
        full = known_keys("cluster_spec", _plain(spec), _FULL_KEYS)
        return _build(full, full.get("source", "given by the user"), full.get("date", ""))
    given = known_keys("cluster_spec", _plain(spec), _PRESET_KEYS)
    name, colon, count = str(given["preset"]).partition(":")
    preset = read_preset(name)
    if colon and "devices" in given:
        raise AutoparError(f"devices is given twice: {given['preset']!r} and {given['devices']!r}")
    devices = _count_in(given["preset"], count) if colon else given.get("devices")
    if devices is None:
        raise AutoparError(f"preset {name!r} needs a number of devices: '{name}:4', say")
    device, overrides = _plain(preset["device"]), {k: given[k] for k in _DEVICE_KEYS if k in given}
    if isinstance(overrides.get("flops_per_s"), Mapping):
        overrides["flops_per_s"] = {**device["flops_per_s"], **overrides["flops_per_s"]}
    full = {
        "device": {**device, **overrides},
        "devices": devices,
        "links": given.get("links", _plain(preset["links"])),
    }
    changed = [key for key in (*_DEVICE_KEYS, "links") if key in given]
    source = f"preset {name}" + (f", with the user's {', '.join(changed)}" if changed else "")
    return _build(full, source, preset["date"])


def _count_in(text: str, count: str) -> int:
    if not count.isdecimal():
        raise AutoparError(f"{text!r}: {count!r} is no number of devices; write '<preset>:4', say")
    return int(count)


def _build(full: Mapping[str, Any], source: str, date: str) -> ClusterSpec:
    device = known_keys("device", required("cluster_spec", full, "device"), _DEVICE_KEYS)
    rates = required("device", device, "flops_per_s")
    if not isinstance(rates, Mapping):
        raise AutoparError(f"device.flops_per_s must map dtype names to rates, not {rates!r}")
    fields = {k: required("device", device, k) for k in _DEVICE_KEYS if k not in _OPTIONAL_KEYS}
    fields["flops_per_s"] = tuple(sorted(rates.items()))
    for key in ("overhead_bytes", "communicator_bytes"):
        fields[key] = whole_number(device.get(key, 0))
    for key in ("fragmentation", "special_per_s"):
        fields[key] = device.get(key, 0.0)
    if "kernels" in device:
        fields["kernels"] = _kernels(device["kernels"])
    fields["memory_bytes"] = whole_number(fields["memory_bytes"])
    devices = whole_number(required("cluster_spec", full, "devices"))
    positive("devices", devices, whole=True)
    links = required("cluster_spec", full, "links")
    if not isinstance(links, Sequence) or isinstance(links, str):
        raise AutoparError(f"links must be a list, from the innermost level out, not {links!r}")
    return checked(
        ClusterSpec(Device(**fields), devices, cut_links(links, devices), source, str(date))
    )


def _kernels(given: Any) -> Kernels:
    fields = dataclasses.fields(Kernels)
    known = known_keys("device.kernels", given, tuple(field.name for field in fields))
    needed = [f.name for f in fields if f.default is dataclasses.MISSING or f.name in known]
    return Kernels(**{key: required("device.kernels", known, key) for key in needed})

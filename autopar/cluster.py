"""The cluster: devices, the links between them, and presets (data with source and date)."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import AutoparError
from autopar.preset_files import read_preset


@dataclass(frozen=True)
class Device:
    """One device as a cost model sees it. `backend` is torch.distributed's ("gloo", "nccl").

    `flops_per_s` maps dtype names ("float32") to the rate that large matrix multiplications reach;
    `op_overhead_s` is the host's time per op; `overhead_bytes` is the part of `memory_bytes` that
    no plan can use (the device's context, the libraries' workspaces).
    """

    name: str
    backend: str
    memory_bytes: int
    flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes_per_s: float
    op_overhead_s: float
    overhead_bytes: int = 0


@dataclass(frozen=True)
class Link:
    """One level of the network: `devices` neighbours reach each other over it, each with
    `latency_s` (α) a message and `bytes_per_s` (1/β) each way."""

    name: str
    devices: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class ClusterSpec:
    """`devices` equal devices; `links` from the innermost level to the outermost, whose `devices`
    is the whole cluster. `source` says where the numbers are from, `date` when."""

    device: Device
    devices: int
    links: tuple[Link, ...]
    source: str
    date: str


ALL = "all"
"""A link's `devices` where it reaches the whole cluster, however many devices that has."""

_DEVICE_KEYS = (
    "name",
    "backend",
    "memory_bytes",
    "flops_per_s",
    "memory_bytes_per_s",
    "op_overhead_s",
    "overhead_bytes",
)
_LINK_KEYS = ("name", "devices", "latency_s", "bytes_per_s")
_FULL_KEYS = ("device", "devices", "links", "source", "date")
_PRESET_KEYS = ("preset", "devices", "links", *_DEVICE_KEYS)


def resolve_cluster(spec: ClusterSpec | str | os.PathLike[str] | Mapping[str, Any]) -> ClusterSpec:
    """The ClusterSpec that `spec` describes, checked.

    `spec`: a ClusterSpec; a preset and a number of devices, "h100:64"; a dict that names a preset
    and overrides the device's fields or the links, {"preset": "cpu:4", "memory_bytes": 2**30}; a
    dict with "device", "devices" and "links" in full; or the path of a JSON or YAML file with such
    a dict. Any number may also be given as {"value": …, "source": …, "date": …}. A link whose
    "devices" is "all" reaches the whole cluster; one that would reach further is cut to it.

    Errors: AutoparError for an unknown preset, a key or a number that isn't allowed, a missing
    number of devices, and links that don't nest.
    """
    if isinstance(spec, ClusterSpec):
        return _checked(spec)
    if isinstance(spec, Mapping):
        return _from_mapping(spec)
    if isinstance(spec, str) and not spec.endswith((".json", ".yaml", ".yml")):
        return _from_mapping({"preset": spec})
    if isinstance(spec, str | os.PathLike):
        return _from_mapping(_read(Path(spec)))
    raise AutoparError(
        f"cluster_spec is {type(spec).__name__}: pass a ClusterSpec, a preset like 'cpu:4', "
        "a dict, or the path of a JSON or YAML file"
    )


def describe_cluster(spec: ClusterSpec) -> dict[str, Any]:
    """The cluster in full as plain data: `resolve_cluster` makes the same ClusterSpec of it."""
    full = json.loads(json.dumps(dataclasses.asdict(spec)))
    full["device"]["flops_per_s"] = dict(spec.device.flops_per_s)
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
        full = _known_keys("cluster_spec", _plain(spec), _FULL_KEYS)
        return _build(full, full.get("source", "given by the user"), full.get("date", ""))
    given = _known_keys("cluster_spec", _plain(spec), _PRESET_KEYS)
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
    device = _known_keys("device", _required("cluster_spec", full, "device"), _DEVICE_KEYS)
    rates = _required("device", device, "flops_per_s")
    if not isinstance(rates, Mapping):
        raise AutoparError(f"device.flops_per_s must map dtype names to rates, not {rates!r}")
    fields = {key: _required("device", device, key) for key in _DEVICE_KEYS[:-1]}
    fields["flops_per_s"] = tuple(sorted(rates.items()))
    fields["overhead_bytes"] = _whole(device.get("overhead_bytes", 0))
    fields["memory_bytes"] = _whole(fields["memory_bytes"])
    devices = _whole(_required("cluster_spec", full, "devices"))
    _positive("devices", devices, whole=True)
    links = _required("cluster_spec", full, "links")
    if not isinstance(links, Sequence) or isinstance(links, str):
        raise AutoparError(f"links must be a list, from the innermost level out, not {links!r}")
    return _checked(ClusterSpec(Device(**fields), devices, _cut(links, devices), source, str(date)))


def _cut(links: Sequence[Any], devices: int) -> tuple[Link, ...]:
    """The levels that a cluster of `devices` has: those further out than all of it are left out."""
    levels: list[Link] = []
    for entry in links:
        link = _known_keys("links", entry, _LINK_KEYS)
        fields = {key: _required("links", link, key) for key in _LINK_KEYS}
        if fields["devices"] == ALL:
            fields["devices"] = devices
        _positive(f"link {fields['name']}: devices", fields["devices"], whole=True)
        levels.append(Link(**{**fields, "devices": min(fields["devices"], devices)}))
        if levels[-1].devices == devices:
            break
    return tuple(levels)


# ---------------------------------------------------------------- checks


def _checked(spec: ClusterSpec) -> ClusterSpec:
    device = spec.device
    for key, text in (("name", device.name), ("backend", device.backend)):
        if not isinstance(text, str):
            raise AutoparError(f"device.{key} must be text, not {text!r}")
    _positive("devices", spec.devices, whole=True)
    _positive("device.memory_bytes", device.memory_bytes, whole=True)
    _positive("device.memory_bytes_per_s", device.memory_bytes_per_s)
    _positive("device.op_overhead_s", device.op_overhead_s)
    for dtype, rate in device.flops_per_s:
        _positive(f"device.flops_per_s[{dtype}]", rate)
    if device.overhead_bytes != 0:
        _positive("device.overhead_bytes", device.overhead_bytes, whole=True)
    if not device.flops_per_s:
        raise AutoparError("device.flops_per_s is empty: give the rate of one dtype or more")
    inner = 1
    for link in spec.links:
        _positive(f"link {link.name}: devices", link.devices, whole=True)
        _positive(f"link {link.name}: latency_s", link.latency_s)
        _positive(f"link {link.name}: bytes_per_s", link.bytes_per_s)
        if link.devices % inner:
            raise AutoparError(
                f"link {link.name} joins {link.devices} devices, which is no multiple of the "
                f"{inner} that the level inside it joins"
            )
        inner = link.devices
    if not spec.links or inner != spec.devices:
        raise AutoparError(
            f"the outermost link joins {inner} of {spec.devices} devices: links must end with one "
            f"whose devices is {spec.devices} or {ALL!r}"
        )
    return spec


def _whole(value: Any) -> Any:
    """8e9 is a whole number of bytes, though text makes it a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _positive(what: str, value: Any, whole: bool = False) -> None:
    """Raise unless `value` is a finite number above zero, an integer where `whole`."""
    number = not isinstance(value, bool) and isinstance(value, int if whole else int | float)
    if not number or not math.isfinite(value) or value <= 0:
        kind = "integer" if whole else "number"
        raise AutoparError(f"{what} must be a positive {kind}, not {value!r}")


def _known_keys(what: str, found: Any, allowed: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise AutoparError(f"{what} must be a mapping, not {found!r}")
    unknown = sorted(str(key) for key in found if key not in allowed)
    if unknown:
        raise AutoparError(
            f"{what} has no {', '.join(map(repr, unknown))}: allowed are {', '.join(allowed)}"
        )
    return found


def _required(what: str, found: Mapping[str, Any], key: str) -> Any:
    if key not in found:
        raise AutoparError(f"{what} lacks {key!r}")
    return found[key]

"""What makes a cluster acceptable; each refusal says which number is wrong."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.devices import ClusterSpec, Kernels, Link
from autopar.errors import AutoparError

ALL = "all"
"""A link's `devices` where it reaches the whole cluster, however many devices that has."""
TOPOLOGIES = ("switch", "mesh", "torus")


def checked(spec: ClusterSpec) -> ClusterSpec:
    """The cluster itself. Errors: AutoparError for numbers that aren't positive and levels that
    don't nest or don't reach all devices."""
    device = spec.device
    text("device.name", device.name)
    text("device.backend", device.backend)
    text("source", spec.source)
    positive("devices", spec.devices, whole=True)
    positive("device.memory_bytes", device.memory_bytes, whole=True)
    positive("device.memory_bytes_per_s", device.memory_bytes_per_s)
    positive("device.op_overhead_s", device.op_overhead_s)
    for dtype, rate in device.flops_per_s:
        positive(f"device.flops_per_s[{dtype}]", rate)
    for key in ("overhead_bytes", "communicator_bytes"):
        if getattr(device, key) != 0:
            positive(f"device.{key}", getattr(device, key), whole=True)
    for key in ("fragmentation", "special_per_s"):
        if getattr(device, key) != 0:
            positive(f"device.{key}", getattr(device, key))
    if device.kernels is not None:
        _check_kernels(device.kernels)
    if not device.flops_per_s:
        raise AutoparError("device.flops_per_s is empty: give the rate of one dtype or more")
    inner = 1
    for link in spec.links:
        checked_link(link, inner)
        inner = link.devices
    if not spec.links or inner != spec.devices:
        raise AutoparError(
            f"the outermost link joins {inner} of {spec.devices} devices: links must end with one "
            f"whose devices is {spec.devices} or {ALL!r}"
        )
    return spec


def _check_kernels(kernels: Kernels) -> None:
    positive("device.kernels.units", kernels.units, whole=True)
    for field in dataclasses.fields(kernels):
        value = getattr(kernels, field.name)
        if isinstance(field.default, bool):
            if not isinstance(value, bool):
                raise AutoparError(f"device.kernels.{field.name} is {value!r}, not a boolean")
        elif isinstance(field.default, str):
            if not isinstance(value, str):
                raise AutoparError(f"device.kernels.{field.name} is {value!r}, not a dtype's name")
        elif value != field.default:
            positive(f"device.kernels.{field.name}", value)


def checked_link(link: Link, inner: int) -> None:
    """Raise unless the link is sound outside a level of blocks of `inner` devices."""
    text("a link's name", link.name)
    what = f"link {link.name}"
    positive(f"{what}: devices", link.devices, whole=True)
    positive(f"{what}: latency_s", link.latency_s)
    positive(f"{what}: bytes_per_s", link.bytes_per_s)
    if link.devices % inner:
        raise AutoparError(
            f"{what} joins {link.devices} devices, which is no multiple of the "
            f"{inner} that the level inside it joins"
        )
    if link.topology not in TOPOLOGIES:
        raise AutoparError(
            f"{what}: topology is {link.topology!r}; known are {', '.join(TOPOLOGIES)}"
        )
    _checked_shape(what, link, link.devices // inner)
    positive(f"{what}: wraps_from", link.wraps_from, whole=True)
    positive(f"{what}: oversubscription", link.oversubscription)
    if link.crowding != 0:
        positive(f"{what}: crowding", link.crowding)
    positive(f"{what}: leaf", link.leaf, whole=True)
    if link.oversubscription < 1:
        raise AutoparError(f"{what}: oversubscription {link.oversubscription} must be 1 or more")
    if link.switch_bytes_per_s or link.switch_latency_s:
        positive(f"{what}: switch_bytes_per_s", link.switch_bytes_per_s)
        positive(f"{what}: switch_latency_s", link.switch_latency_s)
    for protocol in link.protocols:
        for key in ("call_s", "latency_s", "tree_latency_s", "share", "tree_share"):
            positive(f"{what}: protocol {protocol.name}: {key}", getattr(protocol, key))
    for fit in link.fits:
        positive(f"{what}: fit of {fit.op}: latency_s", fit.latency_s)
        positive(f"{what}: fit of {fit.op}: bytes_per_s", fit.bytes_per_s)
        if fit.up_to_bytes != 0:
            positive(f"{what}: fit of {fit.op}: up_to_bytes", fit.up_to_bytes, whole=True)


def _checked_shape(what: str, link: Link, blocks: int) -> None:
    """A torus has as many places as it joins blocks; nothing else has a shape."""
    if link.topology != "torus":
        if link.shape:
            raise AutoparError(f"{what} has a shape, but its topology is {link.topology!r}")
        return
    for length in link.shape:
        positive(f"{what}: shape", length, whole=True)
    if not link.shape or math.prod(link.shape) != blocks:
        raise AutoparError(
            f"{what}: a torus of shape {list(link.shape)} doesn't hold {blocks}: the lengths' "
            "product must be what the level joins; or give its number of dimensions"
        )


def text(what: str, value: Any) -> None:
    """Raise unless `value` is text."""
    if not isinstance(value, str):
        raise AutoparError(f"{what} must be text, not {value!r}")


def whole_number(value: Any) -> Any:
    """8e9 is a whole number of bytes, though text makes it a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def positive(what: str, value: Any, whole: bool = False) -> None:
    """Raise unless `value` is a finite number above zero, an integer where `whole`."""
    number = not isinstance(value, bool) and isinstance(value, int if whole else int | float)
    if not number or not math.isfinite(value) or value <= 0:
        kind = "integer" if whole else "number"
        raise AutoparError(f"{what} must be a positive {kind}, not {value!r}")


def known_keys(what: str, found: Any, allowed: Sequence[str]) -> Mapping[str, Any]:
    """The mapping itself. Errors: AutoparError where it is none, or has a key beyond `allowed`."""
    if not isinstance(found, Mapping):
        raise AutoparError(f"{what} must be a mapping, not {found!r}")
    unknown = sorted(str(key) for key in found if key not in allowed)
    if unknown:
        raise AutoparError(
            f"{what} has no {', '.join(map(repr, unknown))}: allowed are {', '.join(allowed)}"
        )
    return found


def required(what: str, found: Mapping[str, Any], key: str) -> Any:
    """The entry. Errors: AutoparError where there is none."""
    if key not in found:
        raise AutoparError(f"{what} lacks {key!r}")
    return found[key]

"""The levels of the network: from plain data to links, and back."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.cluster_checks import (
    ALL,
    checked_link,
    known_keys,
    positive,
    required,
    text,
    whole_number,
)
from autopar.devices import Fit, Link, Protocol
from autopar.errors import AutoparError

_REQUIRED = ("name", "devices", "latency_s", "bytes_per_s")
_OPTIONAL = tuple(f.name for f in dataclasses.fields(Link) if f.name not in _REQUIRED)
_KEYS = (*_REQUIRED, "dimensions", *_OPTIONAL)


def cut_links(links: Sequence[Any], devices: int) -> tuple[Link, ...]:
    """The levels that a cluster of `devices` has: those further out than all of it are left out.

    A link's "devices" may be "all". A torus gives its "shape", or how many "dimensions" it has,
    which are then made as equal as the number of devices allows.
    """
    levels: list[Link] = []
    inner = 1
    for entry in links:
        given = known_keys("links", entry, _KEYS)
        fields = {key: required("links", given, key) for key in _REQUIRED}
        what = f"link {fields['name']}"
        reach = devices if fields["devices"] == ALL else fields["devices"]
        positive(f"{what}: devices", reach, whole=True)
        fields["devices"] = min(reach, devices)
        fields |= {key: _optional(what, key, given[key]) for key in _OPTIONAL if key in given}
        if "dimensions" in given:
            blocks = fields["devices"] // inner
            fields["shape"] = _shape(what, given, blocks)
        levels.append(Link(**fields))
        checked_link(levels[-1], inner)
        inner = fields["devices"]
        if inner == devices:
            break
    return tuple(levels)


def describe_link(link: Link) -> dict[str, Any]:
    """The link as plain data, without what it has by default."""
    full = dataclasses.asdict(link)
    defaults = {f.name: f.default for f in dataclasses.fields(Link)}
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in full.items()
        if value != defaults[key]
    }


def balanced_shape(count: int, dimensions: int) -> tuple[int, ...]:
    """`count` as a product of that many factors, as equal as its primes allow, ascending."""
    shape = [1] * dimensions
    for prime in reversed(_primes(count)):
        shape[shape.index(min(shape))] *= prime
    return tuple(sorted(shape))


def _shape(what: str, given: Mapping[str, Any], blocks: int) -> tuple[int, ...]:
    if "shape" in given:
        raise AutoparError(f"{what} has both a shape and dimensions: give one of them")
    positive(f"{what}: dimensions", given["dimensions"], whole=True)
    return balanced_shape(blocks, given["dimensions"])


def _primes(count: int) -> list[int]:
    """The prime factors, ascending."""
    found, factor = [], 2
    while factor * factor <= count:
        while count % factor == 0:
            found.append(factor)
            count //= factor
        factor += 1
    return [*found, count] if count > 1 else found


def _optional(what: str, key: str, value: Any) -> Any:
    """One of a link's optional fields from plain data."""
    if key == "shape":
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise AutoparError(f"{what}: shape must be a list of lengths, not {value!r}")
        return tuple(value)
    if key in ("protocols", "fits"):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise AutoparError(f"{what}: {key} must be a list, not {value!r}")
        kind = Protocol if key == "protocols" else Fit
        return tuple(_record(f"{what}: {key}", kind, entry) for entry in value)
    return value


def _record(what: str, kind: type[Protocol] | type[Fit], entry: Any) -> Protocol | Fit:
    keys = tuple(f.name for f in dataclasses.fields(kind))
    known = known_keys(what, entry, keys)
    fields = {key: required(what, known, key) for key in keys}
    for key, value in fields.items():
        if key in ("name", "op", "algorithm"):
            text(f"{what}: {key}", value)
        elif key == "up_to_bytes":
            fields[key] = whole_number(value)
    return kind(**fields)

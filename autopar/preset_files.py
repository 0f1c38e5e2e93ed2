"""The presets that come with autopar: devices and links as data, each number with its source."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from autopar.errors import AutoparError


@dataclass(frozen=True)
class PresetInfo:
    """What a preset is, when it was written, and which of its numbers are from where."""

    name: str
    summary: str
    date: str
    sources: tuple[str, ...]


def preset_names() -> tuple[str, ...]:
    """The presets that come with autopar, sorted."""
    names = [file.name for file in _folder().iterdir()]
    return tuple(sorted(n.removesuffix(".json") for n in names if n.endswith(".json")))


def read_preset(name: str) -> Mapping[str, Any]:
    """A preset's data. Errors: AutoparError for an unknown name."""
    if name not in preset_names():
        raise AutoparError(f"unknown preset {name!r}: known are {', '.join(preset_names())}")
    preset: Mapping[str, Any] = json.loads((_folder() / f"{name}.json").read_text("utf-8"))
    return preset


def preset_info(name: str) -> PresetInfo:
    """What a preset says of itself. Errors: AutoparError for an unknown name."""
    data = read_preset(name)
    numbers: dict[str, list[str]] = {}
    for key, source in _sources(data, ()):
        numbers.setdefault(source, []).append(key)
    sources = tuple(f"{', '.join(keys)}: {source}" for source, keys in numbers.items())
    return PresetInfo(name, data["summary"], data["date"], sources)


def _sources(data: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(number, source), "device.memory_bytes" say; those in a list go by the entry's name."""
    if isinstance(data, Mapping) and "source" in data:
        note = "" if data["verified"] else " [not verified]"
        yield ".".join(path), str(data["source"]) + note
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _sources(value, (*path, key))
    elif isinstance(data, list):
        for entry in data:
            yield from _sources(entry, (*path[:-1], str(entry.get("name", entry.get("op")))))


def _folder() -> Traversable:
    return resources.files("autopar") / "presets"

"""From measured figures to a cluster's spec as plain data, each number with its source."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import AutoparError
from autopar.measure.fit import ALGORITHMS, AlphaBeta, Sample, fit, fits
from autopar.measure.run import Figures
from autopar.measure.trials import ADD_BYTES, PRODUCTS

LEVELS = ("inside", "across")
"""The links' names: inside a node, and across nodes."""


@dataclass(frozen=True)
class Origin:
    """Where and when the figures are from: "autopar measure, 4 processes on …, best of 24"."""

    text: str
    date: str

    def number(self, value: float, detail: str = "") -> dict[str, Any]:
        """A number with its source; three digits of what was measured."""
        exact = value if isinstance(value, int) else float(f"{value:.3g}")
        source = f"{self.text}; {detail}" if detail else self.text
        return {"value": exact, "source": source, "date": self.date, "verified": True}


def spec_of(figures: Figures, origin: Origin) -> dict[str, Any]:
    """The cluster in full, as `cluster_spec` takes it. Errors: AutoparError for a single process,
    which shows no link."""
    return {
        "device": device_of(figures, origin),
        "devices": figures.world,
        "links": links_of(figures, origin),
        "source": origin.text,
        "date": origin.date,
    }


def device_of(figures: Figures, origin: Origin) -> dict[str, Any]:
    """The device's part."""
    kind = "cuda" if figures.backend == "nccl" else "cpu"
    shapes = {str(d).removeprefix("torch."): shape for d, shape in PRODUCTS[kind].items()}

    def shape(dtype: str) -> str:
        return " x ".join(str(length) for length in shapes[dtype])

    return {
        "name": figures.device_name,
        "backend": figures.backend,
        "memory_bytes": origin.number(
            figures.memory_bytes, "the device's, or the machine's over the processes of a node"
        ),
        "overhead_bytes": origin.number(
            figures.overhead_bytes, "taken beside torch's allocator; none is counted on a CPU"
        ),
        "flops_per_s": {
            dtype: origin.number(rate, shape(dtype)) for dtype, rate in figures.flops_per_s.items()
        },
        "memory_bytes_per_s": origin.number(
            figures.memory_bytes_per_s, f"sums of {ADD_BYTES[kind]} bytes"
        ),
        "special_per_s": origin.number(figures.special_per_s, "hyperbolic tangents"),
        "op_overhead_s": origin.number(figures.op_s, "recorded by autograd"),
    }


def links_of(figures: Figures, origin: Origin) -> list[dict[str, Any]]:
    """The links' part: one level, or nodes and what joins them."""
    if not figures.levels:
        raise AutoparError(
            "one process shows no link: start two or more, torchrun --nproc-per-node 4, say"
        )
    several = figures.world > figures.local_world
    names = LEVELS if several else ("loopback" if figures.backend == "gloo" else "node",)
    first = 0 if figures.local_world > 1 else 1
    return [
        _link(name, figures, samples, origin)
        for name, samples in zip(names[first:], figures.levels, strict=True)
    ]


def _link(name: str, figures: Figures, samples: Sequence[Sample], origin: Origin) -> dict[str, Any]:
    pooled = [s for s in samples if ALGORITHMS[figures.backend, s.op] == "ring"]
    common = fit(figures.backend, pooled)
    after = f"each after a matrix product of {1e3 * figures.before_s:.1f} ms"
    detail = f"ring fit over {', '.join(dict.fromkeys(s.op for s in pooled))}, {after}"
    detail += f", mean error {100 * common.error:.0f} % of both"
    whole = figures.local_world == figures.world or name == LEVELS[1]
    return {
        "name": name,
        "devices": "all" if whole else figures.local_world,
        "latency_s": origin.number(common.alpha_s, detail),
        "bytes_per_s": origin.number(1 / common.beta_s, detail),
        "fits": [
            _fit(op, ALGORITHMS[figures.backend, op], up_to, found, after, origin)
            for op, up_to, found in fits(figures.backend, samples)
        ],
    }


def _fit(
    op: str, algorithm: str, up_to: int, found: AlphaBeta, after: str, origin: Origin
) -> dict[str, Any]:
    detail = f"{algorithm} fit of {op}, {after}, mean error {100 * found.error:.0f} % of both"
    return {
        "op": op,
        "algorithm": algorithm,
        "up_to_bytes": origin.number(up_to, "0: of any size"),
        "latency_s": origin.number(found.alpha_s, detail),
        "bytes_per_s": origin.number(1 / found.beta_s, detail),
    }


def check_path(path: Path) -> None:
    """Errors: AutoparError unless the file's suffix says JSON or YAML and its folder is there."""
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise AutoparError(f"{path}: a cluster's file ends with .json, .yaml or .yml")
    if not path.parent.is_dir():
        raise AutoparError(f"can't write {path}: there is no folder {path.parent}")


def write_spec(spec: Mapping[str, Any], path: Path) -> None:
    """Write a spec as JSON or YAML, by the file's suffix. Errors: AutoparError for another one,
    and where the file can't be written."""
    check_path(path)
    if path.suffix == ".json":
        text = json.dumps(spec, indent=2, ensure_ascii=False) + "\n"
    else:
        text = yaml.safe_dump(dict(spec), sort_keys=False, allow_unicode=True)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AutoparError(f"can't write {path}: {error.strerror}") from error

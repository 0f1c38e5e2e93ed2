"""Edits of a plan's JSON, as a person makes them, and what the edited plans then compute."""

import functools
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from equality import CLIP_NORM, Comparison, run
from models import MODELS, Job, float32_raised

import autopar

Json = dict[str, Any]
PIN: Mapping[str, Any] = MappingProxyType(
    {"dp": 2, "tp": 2, "zero": 3, "tensor": True, "microbatches": 1}
)
STRATEGIES = ("data", "sequence", "tensor", "zero")


def planned(job: Job, pin: Mapping[str, Any] = PIN, **keywords: Any) -> autopar.Compiled:
    """A job planned for four CPU processes."""
    return autopar.compile(
        job.model, "cpu:4", job.batch, loss=job.loss, pin=pin, strategies=STRATEGIES, **keywords
    )


def edited(plan: autopar.Plan, edit: Callable[[Json], object]) -> autopar.Plan:
    """The plan with its JSON changed by `edit`, in place."""
    data = json.loads(plan.to_json())
    edit(data)
    return autopar.Plan.from_json(json.dumps(data))


def part(data: Json, region: str, layer: str) -> Json:
    """The entry of a region in one layer, split off from the others' where they share one."""
    found: Json = next(
        entry for entry in data["regions"] if entry["region"] == region and layer in entry["layers"]
    )
    if found["layers"] == [layer]:
        return found
    found["layers"].remove(layer)
    own: Json = json.loads(json.dumps({**found, "layers": [layer]}))
    data["regions"].append(own)
    return own


# ---------------------------------------------------------------- legal edits


def zero_off(entry: Json) -> None:
    """One region's parameters are whole on every rank again."""
    del entry["strategies"]["zero"]
    entry["params"] = {}


def tensor_off(entry: Json) -> None:
    """One region's own dims are whole again."""
    del entry["strategies"]["tensor"]
    entry["splits"] = {dim: axes for dim, axes in entry["splits"].items() if axes != ["tp"]}


def sequence_on(entry: Json) -> None:
    """One stream is split along the sequence."""
    entry["strategies"]["sequence"] = {}
    entry["splits"]["sequence"] = ["tp"]


def _second_layer_without_zero(data: Json, layers: list[str]) -> None:
    for region in ("stream", "heads", "ffn"):
        zero_off(part(data, region, layers[1]))


def _first_attention_without_tensor(data: Json, layers: list[str]) -> None:
    tensor_off(part(data, "heads", layers[0]))


def _second_stream_by_sequence(data: Json, layers: list[str]) -> None:
    sequence_on(part(data, "stream", layers[1]))


def _ffn_without_tensor_and_zero(data: Json, layers: list[str]) -> None:
    for layer in layers or [""]:
        entry = part(data, "ffn", layer)
        tensor_off(entry)
        zero_off(entry)


def _two_microbatches(data: Json, layers: list[str]) -> None:
    del layers
    data["microbatches"] = 2


EDITS: Mapping[str, Callable[[Json, list[str]], None]] = MappingProxyType(
    {
        "second_layer_without_zero": _second_layer_without_zero,
        "first_attention_without_tensor": _first_attention_without_tensor,
        "second_stream_by_sequence": _second_stream_by_sequence,
        "ffn_without_tensor_and_zero": _ffn_without_tensor_and_zero,
        "two_microbatches": _two_microbatches,
    }
)


def apply(plan: autopar.Plan, name: str) -> autopar.Plan:
    """The plan after one of EDITS."""
    layers = sorted({layer for choice in plan.regions for layer in choice.layers if layer})
    return edited(plan, lambda data: EDITS[name](data, layers))


# ---------------------------------------------------------------- tasks for the pool


def compare_edited(model: str, edit: str) -> Comparison:
    """An edited plan, emitted and run against the plain model, on every rank."""
    with float32_raised():
        job = MODELS[model]()
        optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
        plan = apply(planned(job, optimizer=optimizer).plan, edit)
        program = autopar.emit(
            job.model, plan, loss=job.loss, optimizer=optimizer, clip_norm=CLIP_NORM
        )
        return run(job, program)


def emit_different_plans() -> str:
    """Rank 2 edits its plan; what every rank then is told."""
    job = MODELS["mlp"]()
    plan = planned(job).plan
    if torch.distributed.get_rank() == 2:
        plan = edited(plan, lambda data: data.update(memory_limit_bytes=10**9))
    try:
        autopar.emit(job.model, plan, loss=job.loss)
    except autopar.AutoparError as error:
        return str(error)
    return "no error"


def load_saved(folder: str) -> str:
    """A saved program, loaded on every rank: its source."""
    job = MODELS["mlp"]()
    return autopar.load(folder, job.model, loss=job.loss).source

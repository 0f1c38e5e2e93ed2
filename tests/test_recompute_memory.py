"""What recompute leaves to be saved, measured on one rank of the emitted module, against the
plan."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import families
import pytest
from models import Job
from retrace import Peak, divided, peak, planned, program_of

import autopar

LAYERS = 4
# Few words: the gradient of the logits, which is no saved tensor, must not be what is largest.
MODELS: dict[str, Callable[[], Job]] = {
    "gpt2": families._tiny(families._gpt2(32, LAYERS, 4, 8, 16, 0.0)),
    "llama": families._tiny(families._llama(32, LAYERS, 4, 2, 48, 8, 16)),
}
MESHES: dict[str, dict[str, Any]] = {
    "tp1": {"dp": 1, "tp": 1},
    "tp2": {"dp": 1, "tp": 2},
    "tp2_sequence": {"dp": 1, "tp": 2, "sequence": True},
    "dp2": {"dp": 2, "tp": 1},
}
QUICK = ("tp2",)
CHOICES: dict[str, dict[str, Any]] = {
    "none": {"recompute": False},
    "region": {"layers": {"*.[0-9]*": {"recompute": "selective"}}},
    "layer": {"recompute": "full"},
    "groups": {"recompute": {"scope": "full", "together": 2}},
    "groups of 3": {"recompute": {"scope": "full", "together": 3}},
    "some": {"layers": {"*.[01].*": {"recompute": "full"}, "*.[23].*": {"recompute": False}}},
}
SHARE = 0.02
"""The plan may be off by that."""


def found(model: str, mesh: str, choice: str) -> tuple[autopar.Plan, Peak, int]:
    """The plan, what was measured, and what the plan says is kept after the forward."""
    job, pins = MODELS[model](), MESHES[mesh]
    world = pins["dp"] * pins["tp"]
    compiled = planned(job, {**pins, **CHOICES[choice]}, world)
    measured = peak(compiled, world - 1, world, job.batch)
    return compiled.plan, measured, divided(program_of(job, compiled.plan)).saved_bytes


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    "mesh", [*QUICK, *(pytest.param(m, marks=pytest.mark.slow) for m in MESHES if m not in QUICK)]
)
@pytest.mark.parametrize("model", MODELS)
def test_saved_bytes_are_those_of_the_plan(model: str, mesh: str, choice: str) -> None:
    """After the forward, and at the highest while something runs again."""
    plan, measured, kept_bytes = found(model, mesh, choice)
    memory = plan.predicted.memory
    assert memory["saved"] == kept_bytes == pytest.approx(measured.kept_bytes, rel=SHARE)
    if choice not in ("none", "some"):
        assert measured.again_bytes > measured.kept_bytes
    highest = max(measured.kept_bytes, measured.again_bytes)
    assert memory["saved"] + memory["transient"] == pytest.approx(highest, rel=SHARE)


def test_each_choice_keeps_less() -> None:
    """Less is kept the more runs again together, and more is there again at once."""
    every = {choice: found("gpt2", "tp1", choice)[1] for choice in CHOICES}
    kept = [every[choice].kept_bytes for choice in ("none", "region", "layer", "groups")]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 4
    assert every["layer"].again_bytes < every["groups"].again_bytes < every["none"].kept_bytes


def test_a_checkpoint_that_is_left_out_is_seen() -> None:
    """One layer of four that keeps everything."""
    job = MODELS["gpt2"]()
    compiled = planned(job, {**MESHES["tp1"], **CHOICES["layer"]}, 1)
    again = "checkpoint(self.transformer.h[i], hidden_states, use_reentrant=False)"
    assert again in compiled.source
    plain = f"(self.transformer.h[i](hidden_states) if i == 0 else {again})"
    edited = replace(compiled, source=compiled.source.replace(again, plain))
    memory = compiled.plan.predicted.memory
    assert peak(edited, 0, 1, job.batch).kept_bytes > 1.5 * memory["saved"]

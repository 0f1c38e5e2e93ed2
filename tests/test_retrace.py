"""Local flops and saved bytes, got by division, against a trace of the emitted local module."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from families import FAMILIES
from models import Job, gpt2, llama
from more_models import MORE
from retrace import divided, planned, program_of, regions_bytes, traced

CASES: dict[str, dict[str, Any]] = {
    "tp2": {"dp": 1, "tp": 2},
    "tp2_sequence": {"dp": 1, "tp": 2, "sequence": True},
    "dp2_tp2": {"dp": 2, "tp": 2},
    "tp4": {"dp": 1, "tp": 4},  # one head a rank, and above the kv heads of most
    "dp8": {"dp": 8, "tp": 1},  # one sample a rank
    "dp4_tp2_sequence": {"dp": 4, "tp": 2, "sequence": True, "microbatches": 2},
}
NO_SEQUENCE = ("vit", "mlp", "resnet", "unet")
"""Families whose sequence can't be split: there is none, or its 17 tokens don't divide by 2."""
WHOLE_BATCH = ("clip", "siglip", "resnet")
"""Families whose loss needs the whole batch at once."""
MODELS: dict[str, Callable[[], Job]] = {
    **{name: family.tiny for name, family in FAMILIES.items()},
    **MORE,
    "dropout": lambda: gpt2(dropout=0.1),
    "llama_4_kv_heads": lambda: llama(kv_heads=4),
}
QUICK = [(name, case) for name in FAMILIES for case in ("tp2", "tp2_sequence")]
QUICK += [(name, "dp8") for name in ("gpt2", "encoder", "phi3", "resnet")]
QUICK += [("dropout", "tp2_sequence"), ("llama", "tp4"), ("llama", "dp2_tp2")]
REST = [(name, case) for name in MODELS for case in CASES if (name, case) not in QUICK]
PAIRS = [
    pytest.param(*pair, marks=[pytest.mark.slow] if pair in REST else [])
    for pair in [*QUICK, *REST]
    if not ("sequence" in CASES[pair[1]] and pair[0] in NO_SEQUENCE)
    and not ("microbatches" in CASES[pair[1]] and pair[0] in WHOLE_BATCH)
]


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_divisions_are_what_a_trace_finds(name: str, case: str) -> None:
    """Flops and bytes of the last rank are exactly as planned; what the search adds up is no
    less."""
    job, pins = MODELS[name](), CASES[case]
    world = pins["dp"] * pins["tp"]
    compiled = planned(job, pins, world)
    program = program_of(job, compiled.plan)
    local = traced(compiled, world - 1, world, job.batch)
    assert local == divided(program)
    assert regions_bytes(program) >= local.saved_bytes


def test_a_copy_that_the_division_forgets_is_seen() -> None:
    """Heads put together again are a view of what attention returns; here they are copied."""
    job = gpt2()
    compiled = planned(job, CASES["tp2"], 2)
    view = "attention.transpose(1, 2).reshape("
    assert view in compiled.source
    copied = compiled.source.replace(view, view.replace(".reshape", ".clone().reshape"))
    edited = replace(compiled, source=copied)
    planned_bytes = divided(program_of(job, compiled.plan)).saved_bytes
    batch, hidden, layers, item_bytes = 8 * 16, 32 // 2, 2, 8
    more = batch * hidden * layers * item_bytes
    assert traced(edited, 0, 2, job.batch).saved_bytes == planned_bytes + more

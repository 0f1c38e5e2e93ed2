"""Faults put in on purpose, one by one: each turns the equality check red."""

import re
from collections import Counter
from typing import Any, get_args

import pytest
from equality import Comparison, Edit, compiled, edited
from fault import Fault, Kind, run_with
from faults_of_flows import FLOWS
from faults_of_splits import SPLITS
from faults_of_stages import STAGES
from models import MODELS
from pool import Pool

FAULTS = {**SPLITS, **STAGES, **FLOWS}
GREEN, RED = 1e-9, 1e-6


def seeded(name: str, even: bool = False) -> Comparison:
    """A task for the pool: a case with a fault."""
    return run_with(FAULTS[name], even)


def swapped() -> Comparison:
    """A task for the pool: what carries an internal dim has its axes in another order."""
    swap = Edit(r'split\(ffn, "dp", "tp"\)', 'split(ffn, "tp", "dp")', 3)
    return run_with(Fault("collective", "mlp", "wide_ffn", (swap,)))


def worst_of(comparisons: list[Any]) -> dict[str, float]:
    """Each part's largest error over the ranks."""
    assert all(isinstance(one, Comparison) for one in comparisons)
    return {part: max(one.errors[part] for one in comparisons) for part in comparisons[0].errors}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(pool4: Pool, name: str) -> None:
    fault, errors = FAULTS[name], worst_of(pool4.run(seeded, name))
    assert any(re.fullmatch(fault.red, part) for part in errors)
    for part, error in errors.items():
        if re.fullmatch(fault.red, part):
            assert error > RED, (part, errors)
        elif re.fullmatch(fault.green, part):
            assert error <= GREEN, (part, errors)


def test_there_are_faults_of_every_kind() -> None:
    """At least three; 41 in all."""
    kinds = Counter(fault.kind for fault in FAULTS.values())
    assert set(kinds) == set(get_args(Kind)) and min(kinds.values()) >= 3
    assert kinds.total() == 41


def test_even_labels_would_hide_a_local_count(pool4: Pool) -> None:
    """Why the batches of these tests ignore labels unevenly."""
    errors = worst_of(pool4.run(seeded, "loss: divided by the local count", True))
    assert max(errors.values()) <= GREEN, errors


def test_order_of_axes_is_free_inside_a_region(pool4: Pool) -> None:
    """All that carries an internal dim in one other order is the same sum in another order."""
    errors = worst_of(pool4.run(swapped))
    assert max(errors.values()) <= GREEN, errors


def test_edit_that_no_longer_matches_fails() -> None:
    """Else a change of the emitter's style would make these tests pass without a fault."""
    program = compiled(MODELS["mlp"](), "dp4")
    with pytest.raises(AssertionError, match="matched 0 times"):
        edited(program, (Edit("no such text", ""),))

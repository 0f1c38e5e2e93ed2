"""The presets' fitted figures are those of benchmarks/data/constants.json."""

import json

import pytest
from fidelity_presets import OWNERS, PRESETS, fitted_values, place_of
from published_runs import DATA


@pytest.mark.parametrize("name", sorted(OWNERS))
def test_presets_hold_what_was_fitted(name: str) -> None:
    written = json.loads((DATA / "constants.json").read_text(encoding="utf-8"))
    values = {key: one["fitted"] for key, one in written.items()}
    preset = json.loads((PRESETS / f"{name}.json").read_text(encoding="utf-8"))
    for place, value in fitted_values(name, values).items():
        entry = place_of(preset, place)
        assert entry["value"] == value, place
        assert entry["source"] and entry["date"]

"""Captured and run again with real weights, every family is identical to the plain model."""

import pytest
from captured import check_same
from families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_graphs_compute_what_the_model_does(family: str) -> None:
    """Loss, every gradient and buffer updates."""
    job = FAMILIES[family].tiny()
    check_same(job.model, job.batch, job.loss)

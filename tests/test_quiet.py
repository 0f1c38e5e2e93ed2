"""Planning says nothing on stdout, which is the user's: not even a solver its name."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PROGRAM = """
import warnings
from clusters import cluster
from models import classifier
import autopar
job = classifier()
autopar.compile(job.model, cluster(), job.batch, loss=job.loss, solver={solver!r})
"""


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_nothing_on_stdout(solver: str) -> None:
    """In a fresh process: a header comes once."""
    given = [sys.executable, "-c", PROGRAM.format(solver=solver)]
    done = subprocess.run(given, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""

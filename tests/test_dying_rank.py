"""A rank that dies ends the whole run, soon, with its name in the log and nothing left behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MOST_S = 60.0


def survivors(run: str) -> list[str]:
    """Command lines of processes that still run the program, of one run."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended meanwhile
                continue
            if "/dying_rank.py" in command and run in command:
                found.append(command)
    return found


@pytest.mark.parametrize(("how", "mark"), [("raise", "rank 2 has had enough"), ("exit", "17")])
def test_a_dying_rank_ends_the_run(how: str, mark: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", str(TESTS / "dying_rank.py"), how, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    start = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    took_s = time.monotonic() - start
    assert done.returncode != 0
    assert took_s < MOST_S, took_s
    assert mark in done.stderr
    assert "(local_rank: 2)" in done.stderr.split("Root Cause")[1]
    assert not survivors(str(tmp_path))

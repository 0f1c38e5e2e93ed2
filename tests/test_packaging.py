"""Wheel, source distribution and editable install, each in an environment of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMOKE = """
import json, pathlib, torch, autopar
schema = pathlib.Path(autopar.__file__).with_name("plan_schema.json")
assert json.loads(schema.read_text("utf-8")) == autopar.Plan.json_schema()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
batch = (torch.randn(8, 8), torch.randint(0, 4, (8,)))
loss = lambda outputs, batch: torch.nn.functional.cross_entropy(outputs, batch[1])
compiled = autopar.compile(model, "cpu:4", batch, loss=loss, pin={"dp": 4, "zero": 3})
assert "shard_fully" in compiled.source
print(sorted(name for region in compiled.plan.regions for name in region.strategies)[0])
"""


def run(*command: object, cwd: Path | None = None) -> str:
    """A command's output; a failure shows it."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_install(kind: str, tmp_path: Path) -> None:
    """Installed with its dependencies, it plans, and its command line finds its own plugins."""
    built: list[object] = ["-e", ROOT]
    if kind != "editable":
        run(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "-o", tmp_path, ROOT)
        built = [next(tmp_path.glob("*.whl" if kind == "wheel" else "*.tar.gz"))]
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    import torch

    run(python, "-m", "pip", "install", "--quiet", f"torch=={torch.__version__.split('+')[0]}")
    run(python, "-m", "pip", "install", "--quiet", *built)
    # The last line: the solver prints a banner of its own.
    assert run(python, "-c", SMOKE, cwd=tmp_path).splitlines()[-1] == "data"
    plugins = run(tmp_path / "venv" / "bin" / "autopar", "plugins", cwd=tmp_path)
    for name in (
        "data",
        "sequence",
        "tensor",
        "zero",
        "compute",
        "collectives",
        "memory",
        "overlap",
    ):
        assert name in plugins

"""The command line: what each command prints, and how it fails."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import autopar
from autopar.cli import main
from autopar.plan import Certificate
from autopar.preset_files import preset_names
from autopar.registry import STRATEGIES, installed_plugins

MODELS = """\
import torch
from torch import nn


def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch["y"])


def mlp():
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
    return model


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x)


def job():
    batch = {"x": torch.empty(8, 12), "y": torch.zeros(8, dtype=torch.int64)}
    return Named(), batch, loss


def without_batch():
    return Named()


def a_number():
    return 3


def broken():
    raise RuntimeError("the user's own fault")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module of models, the current one; the module is forgotten afterwards."""
    (tmp_path / "my_models.py").write_text(MODELS, "utf-8")
    (tmp_path / "bad_import.py").write_text("import not_there_at_all\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    assert sys.path == path, "the search path is as it was"
    for name in ("my_models", "bad_import"):
        sys.modules.pop(name, None)


@pytest.fixture
def built(folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A plan and its module, made by the command."""
    assert main(["plan", "my_models:job", "cpu:4", "--pin", '{"dp": 4}', "--out", "build"]) == 0
    capsys.readouterr()
    return folder / "build"


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a failing command prints to stderr; it prints nothing else and returns 2."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("autopar: ")
    return printed.err.removeprefix("autopar: ").rstrip("\n")


# ---------------------------------------------------------------- plan, show, diff, emit


def test_plan_prints_and_writes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "my_models:job", "cpu:4", "--pin", '{"dp": 4}', "--out", "build"]) == 0
    out = capsys.readouterr().out
    assert "Named (344 parameters, 0 layers) on pp 1 · dp 4" in out
    assert "Written: build/plan.json, build/module.py" in out
    plan = autopar.Plan.load(folder / "build" / "plan.json")
    assert (plan.axes["dp"], plan.batch_size) == (4, 8)
    assert "class Named(Container):" in (folder / "build" / "module.py").read_text("utf-8")


def test_plan_forbids_and_limits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "my_models:job", "cpu:4", "--forbid", "tp", "zero"]
    assert main([*command, "--memory-fraction", "0.5", "--out", "build"]) == 0
    plan = autopar.Plan.load(folder / "build" / "plan.json")
    assert (plan.axes["dp"], plan.axes["tp"], plan.memory_limit_bytes) == (4, 1, 6319127552 // 2)


def certificate(capsys: pytest.CaptureFixture[str], *options: str) -> Certificate:
    """Of a plan by the command with these options, which prints what the file says."""
    assert main(["plan", "my_models:job", "cpu:4", *options, "--out", "build"]) == 0
    made = autopar.Plan.load("build/plan.json").certificate
    printed = f"Certificate: within {made.gap:.2%} of the best of {made.candidates} "
    assert printed in " ".join(capsys.readouterr().out.split())
    return made


def test_plan_stops_at_a_gap(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fine, exact, rough = (
        certificate(capsys, *given) for given in ([], ["--gap", "0"], ["--gap", "0.5"])
    )
    assert exact.gap < fine.gap <= 1e-3 < rough.gap <= 0.5
    assert rough.solved == 1 < fine.solved


def test_plan_stops_in_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped = certificate(capsys, "--time-limit", "0")
    assert (stopped.solved, stopped.solver) == (1, "highs")
    assert stopped.gap > 0.5, "of what wasn't looked at little is known"


def test_plan_by_another_solver(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert certificate(capsys, "--solver", "cbc").solver == "cbc"


def test_plan_explains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "my_models:job", "cpu:4", "--explain", "--out", "build"]) == 0
    assert "times as fast as the recipe (" in capsys.readouterr().out
    plan = autopar.Plan.load(folder / "build" / "plan.json")
    assert plan.recipe is not None
    assert main(["recipe", "my_models:job", "cpu:4", "--out", "rule"]) == 0
    made = autopar.Plan.load(folder / "rule" / "plan.json")
    assert made.predicted == plan.recipe.predicted


def test_show(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(built / "plan.json")]) == 0
    assert capsys.readouterr().out == autopar.Plan.load(built / "plan.json").summary()


def test_diff(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(built / "plan.json")
    assert main(["diff", plan, plan]) == 0
    assert capsys.readouterr().out == "the plans are equal\n"
    assert main(["plan", "my_models:job", "cpu:4", "--pin", '{"tp": 4}', "--out", "other"]) == 0
    capsys.readouterr()
    assert main(["diff", plan, "other/plan.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "decisions",
        "  axes: pp 1 · dp 4 · cp 1 · ep 1 · tp 1 → pp 1 · dp 1 · cp 1 · ep 1 · tp 4",
    ]
    assert lines.index("figures") > 2


def test_emit_of_an_untouched_plan(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["emit", str(built / "plan.json"), "--model", "my_models:job"]
    assert main(command) == 0
    assert capsys.readouterr().out == (built / "module.py").read_text("utf-8")
    assert main([*command, "--out", "again"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "The plan is as it was."
    for name in ("plan.json", "module.py"):
        assert Path("again", name).read_bytes() == (built / name).read_bytes()


def test_emit_of_an_edited_plan(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = built / "plan.json"
    data = json.loads(file.read_text("utf-8"))
    data["microbatches"] = 2
    file.write_text(json.dumps(data), "utf-8")
    assert main(["emit", str(file), "--model", "my_models:job", "--out", "build"]) == 0
    assert "The plan's figures, computed anew:" in capsys.readouterr().out
    again = autopar.Plan.load(file)
    assert (again.microbatches, again.certificate.solver) == (2, "none")
    assert "MICROBATCHES = 2" in (built / "module.py").read_text("utf-8")


# ---------------------------------------------------------------- plugins, presets


def test_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.index("strategies") < lines.index("cost models")
    assert any(
        line.split() == ["zero", "autopar.strategies.zero:Zero", "(autopar", "0.1.0)"]
        for line in lines
    )
    assert not any("BROKEN" in line for line in lines)


def test_a_broken_plugin_is_listed_with_its_fault() -> None:
    points = [
        EntryPoint("data", "autopar.strategies.data:Data", STRATEGIES),
        EntryPoint("zero", "autopar.strategies.zero:Zero", STRATEGIES),
        EntryPoint("zero", "autopar.strategies.data:Data", STRATEGIES),
        EntryPoint("gone", "autopar.strategies.data:Gone", STRATEGIES),
    ]
    found = installed_plugins(points, [])["strategies"]
    assert [plugin.name for plugin in found] == ["data", "gone", "zero", "zero"]
    assert found[0].fault == ""
    assert "can't be loaded: AttributeError" in found[1].fault
    assert "has the name 'data', not that of its entry point" in found[2].fault
    assert found[3].fault == "its name is claimed more than once"


def test_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    for name in preset_names():
        assert f"\n{name}" in f"\n{out}"
    assert "(2026-" in out
    assert "device.memory_bytes: " in out


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_models", "'my_models' isn't of the form module:callable"),
        ("nowhere:job", "there is no module 'nowhere' here or among the installed"),
        ("nowhere.at.all:job", "there is no module 'nowhere.at.all' here or among the installed"),
        ("my_models:jib", "'my_models:jib': my_models has no callable 'jib'"),
        ("my_models:MODELS", "'my_models:MODELS': my_models has no callable 'MODELS'"),
        ("my_models:a_number", "'my_models:a_number' returned int: it must return the model, "
         "(model, batch) or (model, batch, loss)"),
        ("my_models:without_batch", "no batch was given and none can be derived for Named: it has "
         "no example_input_array and no Hugging Face config. Pass batch, what one optimizer step "
         "takes over the whole cluster; meta tensors will do"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_had(
    folder: Path, capsys: pytest.CaptureFixture[str], spec: str, message: str
) -> None:
    assert failure(capsys, "plan", spec, "cpu:4") == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cpu:4", "--pin", "{"], "this is not the JSON of --pin: Expecting property name"),
        (["cpu:4", "--pin", "[4]"], "--pin must be a JSON object, not [4]"),
        (["cpu:4", "--pin", '{"dp": 2, "dp": 4}'], "an object has the key 'dp' twice"),
        (["cpu:4", "--pin", '{"xp": 4}'], "pin: 'xp' is neither an axis"),
        (["cpu:4", "--forbid", "magic"], "forbid: 'magic' is neither an axis"),
        (["tpu:4"], "unknown preset 'tpu'"),
        (["cluster.json"], "can't read cluster.json: No such file"),
        (["cpu:4", "--memory-fraction", "2"], "memory_fraction must lie in (0, 1], not 2.0"),
        (["cpu:4", "--memory-fraction", "1e-9"], "nothing fits into 6 bytes"),
    ],
)
def test_mistakes_of_plan(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in failure(capsys, "plan", "my_models:job", *arguments)


@pytest.mark.parametrize("command", ["plan", "recipe"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--time-limit", "-1"], "time_limit_s must be seconds, 0 or more, or None, not -1.0"),
        (["--time-limit", "nan"], "time_limit_s must be seconds, 0 or more, or None, not nan"),
        (["--gap", "1"], "gap must lie in [0, 1), not 1.0"),
        (["--gap", "-0.1"], "gap must lie in [0, 1), not -0.1"),
        (["--solver", "scip"], 'no solver is called \'scip\': choose "highs" or "cbc"'),
        (["--solver", ""], 'no solver is called \'\': choose "highs" or "cbc"'),
    ],
)
def test_mistakes_of_what_searches(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    arguments: list[str],
    message: str,
) -> None:
    assert failure(capsys, command, "my_models:job", "cpu:4", *arguments) == message


@pytest.mark.parametrize("option", ["--time-limit", "--gap"])
def test_what_is_no_number(capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "my_models:job", "cpu:4", option, "soon"])
    assert f"argument {option}: invalid float value: 'soon'" in capsys.readouterr().err


def test_files_that_are_no_plans(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.json").write_text("{}", "utf-8")
    missing = "can't read the plan none.json: No such file or directory"
    assert failure(capsys, "show", "none.json") == missing
    assert "empty.json: this is not a plan: Field required at format" in failure(
        capsys, "diff", "empty.json", "empty.json"
    )


def test_a_plan_of_another_model(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.py").write_text(MODELS.replace("12, 16", "12, 32").replace("16, 8", "32, 8"))
    text = failure(capsys, "emit", str(built / "plan.json"), "--model", "other:job")
    assert text.startswith("the plan is for another model, batch or loss: a Named with 344")


def test_a_folder_that_cannot_be_written(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("", "utf-8")
    plan = str(built / "plan.json")
    assert main(["emit", plan, "--model", "my_models:job", "--out", "file"]) == 2
    assert "autopar: can't write to file: File exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "kind"),
    [("my_models:broken", RuntimeError), ("bad_import:job", ModuleNotFoundError)],
)
def test_the_users_own_exception_keeps_its_traceback(
    folder: Path, spec: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        main(["plan", spec, "cpu:4"])


def test_as_a_program(folder: Path) -> None:
    """Exit codes and streams of the real process."""
    command = [sys.executable, "-m", "autopar.cli"]
    good = subprocess.run([*command, "presets"], capture_output=True, text=True, check=True)
    assert good.stdout.startswith("a100")
    bad = subprocess.run([*command, "show", "none.json"], capture_output=True, text=True)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "autopar: can't read the plan none.json: No such file or directory\n"
    unknown = subprocess.run([*command, "fly"], capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "invalid choice: 'fly'" in unknown.stderr

"""What GPT-2 and Llama under tensor and sequence parallelism, and in stages, on four processes
come to, as files.

`pytest tests/test_golden.py --update-golden` writes them anew; read the diff before committing it.
"""

import ast
import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clusters import cluster
from equality import Comparison, compiled, run
from models import MODELS, Job, float32_raised, gpt2
from pool import Pool

import autopar

FOLDER = Path(__file__).parent / "golden"
GOLDEN = ("gpt2_tp4_sequence", "llama_tp4_sequence", "llama_pp2_tp2")
MOST_LINES = 400


def module_file(name: str) -> Path:
    """Where a case's emitted module lies."""
    return FOLDER / f"{name}.module.py.txt"


def plan_file(name: str) -> Path:
    """Where a case's plan lies."""
    return FOLDER / f"{name}.plan.json"


@pytest.fixture(params=GOLDEN)
def name(request: pytest.FixtureRequest) -> str:
    """Each case in turn: model_case."""
    return str(request.param)


def made(name: str) -> tuple[Job, autopar.Compiled]:
    """A case as the compiler makes it now."""
    model, _, case = name.partition("_")
    job = MODELS[model]()
    return job, compiled(job, case, cluster())


@pytest.fixture
def program(name: str, update_golden: bool) -> autopar.Compiled:
    """The case as the compiler makes it now; with --update-golden it is written to the files."""
    with float32_raised():
        _, now = made(name)
    if update_golden:
        FOLDER.mkdir(exist_ok=True)
        module_file(name).write_text(now.source, encoding="utf-8")
        plan_file(name).write_text(now.plan.to_json(), encoding="utf-8")
    return now


def same(left: Any, right: Any) -> bool:
    """Equality of JSON values; numbers with a point up to the last digits of their arithmetic."""
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def test_module(program: autopar.Compiled, name: str) -> None:
    golden = module_file(name).read_text(encoding="utf-8")
    assert program.source == golden
    assert golden.count("\n") <= MOST_LINES


def test_plan(program: autopar.Compiled, name: str) -> None:
    golden = json.loads(plan_file(name).read_text(encoding="utf-8"))
    assert same(json.loads(program.plan.to_json()), golden), program.plan.to_json()


def execute(name: str, source: str) -> Comparison:
    """A task for the pool: the golden file's source, not what the emitter would write now."""
    with float32_raised():
        job, now = made(name)
        return run(job, replace(now, source=source))


@pytest.mark.usefixtures("program")
def test_golden_module_is_right(pool4: Pool, name: str) -> None:
    """Executed on four processes it equals the plain model, with the plan's bytes."""
    source = module_file(name).read_text(encoding="utf-8")
    for comparison in pool4.run(execute, name, source):
        assert isinstance(comparison, Comparison)
        assert comparison.worst <= 1e-9, comparison
        assert comparison.counted == comparison.planned


@pytest.mark.parametrize("case", ["dp4", "tp4", "zero3"])
def test_every_weight_is_used_once(case: str) -> None:
    """But for the tied one: nothing is computed twice, whichever regions an op and its bias are
    in."""
    source = compiled(gpt2(), case).source
    used = Counter(re.findall(r"self\.([\w.\[\]]+\.(?:weight|bias))\b", source))
    assert used.pop("transformer.wte.weight") == 2
    assert len(used) == 15 and set(used.values()) == {1}, used


@pytest.mark.parametrize(("model", "case"), [("gpt2", "zero3"), ("gpt2", "dp4"), ("mlp", "dp4")])
def test_imports_are_those_that_are_used(model: str, case: str) -> None:
    tree = ast.parse(compiled(MODELS[model](), case).source)
    nodes = list(ast.walk(tree))
    imported = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert imported == imported & {node.id for node in nodes if isinstance(node, ast.Name)}


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ({"a": [1, 2.0]}, {"a": [1, 2.0 + 1e-12]}, True),
        ({"a": [1, 2.0]}, {"a": [1, 2.1]}, False),
        ({"a": [1, 2.0]}, {"a": [1]}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        ({"a": 1}, {"a": True}, False),
        ({"a": "x"}, {"a": "y"}, False),
    ],
)
def test_comparison_of_json(left: Any, right: Any, equal: bool) -> None:
    assert same(left, right) is equal

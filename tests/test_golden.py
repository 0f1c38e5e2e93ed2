"""What plans of `golden_cases` come to, as files: one or more for each strategy.

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
from equality import Comparison, compiled, run
from experts import split_bytes
from golden_cases import GOLDEN
from models import MODELS, gpt2
from pool import Pool

import autopar
from autopar.emit.legend import INSIDE

FOLDER = Path(__file__).parent / "golden"


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


@pytest.fixture
def program(name: str, update_golden: bool) -> autopar.Compiled:
    """The case as the compiler makes it now; with --update-golden it is written to the files."""
    with GOLDEN[name].raised():
        _, now = GOLDEN[name].made()
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
    assert golden.count("\n") <= GOLDEN[name].lines


def test_plan(program: autopar.Compiled, name: str) -> None:
    golden = json.loads(plan_file(name).read_text(encoding="utf-8"))
    assert same(json.loads(program.plan.to_json()), golden), program.plan.to_json()


def execute(name: str, source: str) -> Comparison:
    """A task for the pool: the golden file's source, not what the emitter would write now."""
    with GOLDEN[name].raised():
        job, now = GOLDEN[name].made()
        return run(job, replace(now, source=source))


@pytest.mark.usefixtures("program")
def test_golden_module_is_right(pool4: Pool, pool2: Pool, name: str) -> None:
    """Executed on its processes it equals the plain model, with the plan's bytes."""
    source = module_file(name).read_text(encoding="utf-8")
    pool = pool4 if GOLDEN[name].world == 4 else pool2
    for comparison in pool.run(execute, name, source):
        assert isinstance(comparison, Comparison)
        assert comparison.worst <= 1e-9, comparison
        counted, planned = comparison.counted, comparison.planned
        if "_ep" in name:  # how many tokens travel to experts depends on the router
            counted, planned, _, _ = split_bytes(comparison)
        assert counted == planned


@pytest.mark.parametrize("name", GOLDEN)
def test_the_legend_says_what_calls_communicate(name: str) -> None:
    """Of those whose names don't say it, where they are used."""
    _, legend, code = module_file(name).read_text(encoding="utf-8").split('"""', 2)
    for call in INSIDE:
        assert (f" {call}(" in code) == (call in legend), call


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

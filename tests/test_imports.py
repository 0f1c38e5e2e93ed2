"""Who may import whom, and who may touch what, read from the source of every file."""

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGINS = ("strategies", "cost_models")
FOR_PLUGINS = ("autopar.plugin", "autopar.runtime", "torch")
PRIVATE_TORCH = ("autopar/capture/", "autopar/runtime/", "autopar/simulate")
PULP = ("autopar/planning/",)
ENVIRONMENT = ("autopar/runtime/launch.py",)


@dataclass(frozen=True)
class Source:
    """One file: its path from the root of the project with `/`, and its text."""

    path: str
    text: str


def sources() -> list[Source]:
    """Every file of the core and of the plugins, each once (the symlinks are left out)."""
    files = [
        file
        for folder in ("autopar", *PLUGINS)
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not any((ROOT / "autopar" / plugin) in file.parents for plugin in PLUGINS)
    ]
    return [Source(f.relative_to(ROOT).as_posix(), f.read_text(encoding="utf-8")) for f in files]


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of all that is imported anywhere in a file, by statement or by literal name."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield from (f"{module}.{name.name}" for name in names)
            case ast.ImportFrom():
                yield "a relative import"
            case ast.Call(func=func, args=[ast.Constant(value=str(module)), *_]) if ast.unparse(
                func
            ).endswith("import_module"):
                yield module


def accessed(tree: ast.AST) -> Iterator[str]:
    """Dotted names that the code reaches for, with what `import … as` and `from` made of them."""
    renamed = dict(_renamed(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            head, _, rest = ast.unparse(node).partition(".")
            yield f"{renamed.get(head, head)}.{rest}"


def _renamed(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((n.asname, n.name) for n in names if n.asname)
            case ast.ImportFrom(module=str(module), names=names):
                yield from ((n.asname or n.name, f"{module}.{n.name}") for n in names)


def inside(name: str, package: str) -> bool:
    """Whether a dotted name is the package or lies in it."""
    return name == package or name.startswith(package + ".")


def is_private_torch(name: str) -> bool:
    """`torch._C.x` and `torch.distributed._tools`, not `torch.fx.__name__` nor `x._y`."""
    parts = [part for part in name.split(".") if part]
    return parts[:1] == ["torch"] and any(
        part.startswith("_") and not part.startswith("__") for part in parts
    )


def core_knows_no_plugin(source: Source, tree: ast.AST) -> Iterator[str]:
    """The core finds plugins by entry point, a stranger's and its own alike."""
    if source.path.startswith("autopar/"):
        for name in imported(tree):
            if any(inside(name, f"{top}{p}") for p in PLUGINS for top in ("", "autopar.")):
                yield name


def plugins_import_the_contract(source: Source, tree: ast.AST) -> Iterator[str]:
    """A plugin's planning half imports autopar.plugin, its runtime half autopar.runtime, torch;
    both the files beside them."""
    if source.path.startswith(PLUGINS):
        beside = f"autopar.{source.path.split('/')[0]}"
        for name in imported(tree):
            standard = name.split(".")[0] in sys.stdlib_module_names
            if not standard and not any(
                inside(name, allowed) for allowed in (*FOR_PLUGINS, beside)
            ):
                yield name


def pulp_stays_in_planning(source: Source, tree: ast.AST) -> Iterator[str]:
    """One folder knows the solver's library."""
    if not source.path.startswith(PULP):
        yield from (name for name in imported(tree) if inside(name, "pulp"))


def private_torch_stays_confined(source: Source, tree: ast.AST) -> Iterator[str]:
    """What torch may change without notice is touched in few rooms."""
    if not source.path.startswith(PRIVATE_TORCH):
        names = [*imported(tree), *accessed(tree)]
        yield from dict.fromkeys(name for name in names if is_private_torch(name))


def environment_is_read_once(source: Source, tree: ast.AST) -> Iterator[str]:
    """torchrun's variables are the only ones, and one file reads them."""
    if source.path not in ENVIRONMENT:
        for name in [*imported(tree), *accessed(tree)]:
            if any(inside(name, f"os.{what}") for what in ("environ", "environb", "getenv")):
                yield name


def no_global_changes(source: Source, tree: ast.AST) -> Iterator[str]:
    """No function rebinds a module's global, and none is an empty container that waits for more."""
    del source
    assert isinstance(tree, ast.Module)
    yield from (f"global {', '.join(n.names)}" for n in ast.walk(tree) if isinstance(n, ast.Global))
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is not None and ast.unparse(value) in ("[]", "{}", "list()", "dict()", "set()"):
            yield ast.unparse(node)


Rule = Callable[[Source, ast.AST], Iterator[str]]
RULES: tuple[Rule, ...] = (
    core_knows_no_plugin,
    plugins_import_the_contract,
    pulp_stays_in_planning,
    private_torch_stays_confined,
    environment_is_read_once,
    no_global_changes,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    files = sources()
    assert {"autopar/plugin.py", "strategies/data.py", "cost_models/compute.py"} <= {
        file.path for file in files
    }
    broken = [f"{s.path}: {name}" for s in files for name in rule(s, ast.parse(s.text))]
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (core_knows_no_plugin, "autopar/compiler.py", "import autopar.strategies.data"),
        (core_knows_no_plugin, "autopar/compiler.py", "from autopar import cost_models"),
        (core_knows_no_plugin, "autopar/compiler.py", "from strategies.zero import Zero"),
        (core_knows_no_plugin, "autopar/a.py", "import_module('autopar.strategies.zero')"),
        (plugins_import_the_contract, "strategies/a.py", "from autopar.planning import ilp"),
        (plugins_import_the_contract, "strategies/a.py", "from autopar import mesh"),
        (plugins_import_the_contract, "strategies/a.py", "import autopar.cost_models.compute"),
        (plugins_import_the_contract, "strategies/a.py", "from . import data"),
        (plugins_import_the_contract, "cost_models/a.py", "def f():\n    import numpy"),
        (pulp_stays_in_planning, "autopar/compiler.py", "import pulp as p"),
        (pulp_stays_in_planning, "strategies/a.py", "from pulp import LpProblem"),
        (private_torch_stays_confined, "autopar/graph/a.py", "from torch._ops import OpOverload"),
        (private_torch_stays_confined, "autopar/graph/a.py", "from torch import _C"),
        (private_torch_stays_confined, "autopar/graph/a.py", "import torch\ntorch._C.f()"),
        (private_torch_stays_confined, "autopar/graph/a.py", "import torch.fx as f\nf._x.g()"),
        (private_torch_stays_confined, "strategies/a.py", "from torch import fx\nfx.graph._g"),
        (environment_is_read_once, "autopar/compiler.py", "import os\nos.environ['RANK']"),
        (environment_is_read_once, "autopar/compiler.py", "from os import environ as e"),
        (environment_is_read_once, "autopar/runtime/a.py", "import os as o\no.getenv('RANK')"),
        (no_global_changes, "autopar/a.py", "x = 0\ndef f():\n    global x\n    x = 1"),
        (no_global_changes, "autopar/a.py", "cache: dict[str, int] = {}"),
    ],
)
def test_rule_can_fail(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(path, text), ast.parse(text)))


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (core_knows_no_plugin, "autopar/plan.py", "strategies = entry_points(group='x')"),
        (plugins_import_the_contract, "strategies/a.py", "import math\nimport torch.fx"),
        (plugins_import_the_contract, "cost_models/a.py", "import autopar.cost_models.topology"),
        (plugins_import_the_contract, "strategies/a.py", "from autopar.plugin import Strategy"),
        (pulp_stays_in_planning, "autopar/planning/ilp.py", "import pulp"),
        (private_torch_stays_confined, "autopar/capture/a.py", "import torch._export"),
        (private_torch_stays_confined, "autopar/simulate.py", "import torch\ntorch._C.f()"),
        (private_torch_stays_confined, "autopar/graph/a.py", "import torch.fx as f\nf.__name__"),
        (environment_is_read_once, "autopar/runtime/launch.py", "import os\nos.environ['RANK']"),
        (environment_is_read_once, "autopar/compiler.py", "import os\nos.fspath('a')"),
        (no_global_changes, "autopar/a.py", "NAMES = {'a': 1}"),
    ],
)
def test_rule_allows(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(Source(path, text), ast.parse(text)))

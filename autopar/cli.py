"""The command line: plan, recipe, inspect, show, diff, emit, schema, plugins, presets,
detect, measure."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from autopar.cluster import describe_cluster, resolve_cluster
from autopar.compiled import Compiled
from autopar.compiler import compile, recipe
from autopar.errors import AutoparError, InfeasibleError
from autopar.inspection import inspect
from autopar.measure import measure_here, write_spec
from autopar.model_spec import MODEL_HELP, load_model
from autopar.plan import Plan
from autopar.preset_files import preset_info, preset_names
from autopar.registry import installed_plugins
from autopar.reload import emit
from autopar.strict_json import read_json

FORBID_HELP = "strategies or axes"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 2 for a user's mistake, which is printed to stderr."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autopar", description="Plans for training in parallel.")
    commands = parser.add_subparsers(required=True, metavar="command")

    _add_planning(commands)
    inspect_ = commands.add_parser(
        "inspect", help="a model's layers, regions, named dims, flops and saved bytes"
    )
    inspect_.add_argument("model", help=MODEL_HELP)
    inspect_.set_defaults(run=_inspect)

    show = commands.add_parser("show", help="print a plan")
    show.add_argument("plan", type=Path, help="plan.json")
    show.set_defaults(run=lambda options: print(Plan.load(options.plan), end=""))

    diff = commands.add_parser("diff", help="what differs between two plans")
    diff.add_argument("before", type=Path, help="plan.json")
    diff.add_argument("after", type=Path, help="plan.json")
    diff.set_defaults(run=_diff)

    again = commands.add_parser("emit", help="check a plan, perhaps edited, and emit its program")
    again.add_argument("plan", type=Path, help="plan.json")
    again.add_argument("--model", required=True, help=MODEL_HELP)
    again.add_argument("--out", type=Path, help="folder for plan.json and module.py")
    again.set_defaults(run=_emit)

    commands.add_parser("schema", help="the JSON Schema of plan.json") \
        .set_defaults(run=_schema)  # fmt: skip
    commands.add_parser("plugins", help="the strategies and cost models that are installed") \
        .set_defaults(run=_plugins)  # fmt: skip
    commands.add_parser("presets", help="the clusters that autopar knows by name") \
        .set_defaults(run=_presets)  # fmt: skip
    detect = commands.add_parser("detect", help="this machine as a cluster, by what autopar knows")
    detect.add_argument("--out", type=Path, help="the spec's file: .json, .yaml or .yml")
    detect.set_defaults(run=_detect)

    measure = commands.add_parser("measure", help="measure this cluster, under torchrun")
    measure.add_argument("--out", type=Path, required=True, help="the spec's file: .json or .yaml")
    measure.add_argument("--repeats", type=int, default=24, help="more on a busy machine")
    measure.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    measure.set_defaults(run=_measure)
    return parser


def _add_planning(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    plan = commands.add_parser("plan", help="plan a model's training on a cluster and print it")
    plan.add_argument("--pin", default="{}", metavar="JSON", help='{"tp": 2, "zero": false}, say')
    plan.add_argument(
        "--advice", action="store_true", help="where nothing fits, look for changes that would"
    )
    plan.add_argument(
        "--explain",
        action="store_true",
        help="compare it with the practitioner's recipe and the best on other meshes",
    )
    plan.add_argument(
        "--sensitivity", action="store_true", help="what 10 %% of memory or bandwidth would change"
    )
    plan.set_defaults(run=_plan)

    rule = commands.add_parser("recipe", help="plan by a practitioner's rule of thumb")
    rule.set_defaults(run=_recipe)
    for one in (plan, rule):
        one.add_argument("model", help=MODEL_HELP)
        one.add_argument(
            "cluster", help="a preset like h100:64, or the path of a JSON or YAML file"
        )
        one.add_argument("--forbid", nargs="*", default=[], metavar="NAME", help=FORBID_HELP)
        one.add_argument("--memory-fraction", type=float, default=1.0, metavar="F")
        one.add_argument("--out", type=Path, help="folder for plan.json and module.py")
    _add_search(plan, "stop after about so many seconds, with the best plan so far")
    _add_search(rule, "so many seconds for each search that a step of the recipe takes")


def _add_search(command: argparse.ArgumentParser, limit_help: str) -> None:
    """Keywords of `compile`, which has their defaults and checks: what isn't given is None here."""
    command.add_argument(
        "--time-limit", type=float, metavar="SECONDS", dest="time_limit_s", help=limit_help
    )
    command.add_argument(
        "--gap",
        type=float,
        metavar="SHARE",
        help="stop where no plan can be faster by more than this share of a step: 0.001 is 0.1 %%",
    )
    command.add_argument("--solver", metavar="highs|cbc", help="cbc is several times slower")


# ---------------------------------------------------------------- commands


def _plan(options: argparse.Namespace) -> None:
    pin = read_json(options.pin, "the JSON of --pin")
    if not isinstance(pin, dict):
        raise AutoparError(f"--pin must be a JSON object, not {options.pin}")
    model, batch, loss = load_model(options.model)
    try:
        compiled = compile(
            model,
            options.cluster,
            batch,
            loss=loss,
            pin=pin,
            **_asked(options),
        )
    except InfeasibleError as error:
        if options.advice:
            print(error.advice(), end="")
        raise
    if options.explain:
        compiled = replace(compiled, plan=compiled.explained())
    _finish(compiled, options.out)
    if options.sensitivity:
        print(compiled.sensitivity(), end="")


def _recipe(options: argparse.Namespace) -> None:
    model, batch, loss = load_model(options.model)
    compiled = recipe(model, options.cluster, batch, loss=loss, **_asked(options))
    _finish(compiled, options.out)


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """What `plan` and `recipe` share, as keywords."""
    names = ("forbid", "memory_fraction", "time_limit_s", "gap", "solver")
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _inspect(options: argparse.Namespace) -> None:
    model, batch, loss = load_model(options.model)
    print(inspect(model, batch, loss).summary(), end="")


def _diff(options: argparse.Namespace) -> None:
    text = Plan.load(options.before).diff(Plan.load(options.after))
    print(text or "the plans are equal\n", end="")


def _emit(options: argparse.Namespace) -> None:
    plan = Plan.load(options.plan)
    model, batch, loss = load_model(options.model)
    compiled = emit(model, plan, batch, loss=loss)
    if options.out is None:
        print(compiled.source, end="")
        return
    changes = plan.diff(compiled.plan)
    print(f"The plan's figures, computed anew:\n{changes}" if changes else "The plan is as it was.")
    _save(compiled, options.out)


def _schema(options: argparse.Namespace) -> None:
    print(json.dumps(Plan.json_schema(), indent=2))


def _plugins(options: argparse.Namespace) -> None:
    for kind, plugins in installed_plugins().items():
        print(kind)
        for plugin in plugins:
            print(f"  {plugin.name:<14} {plugin.value}  ({plugin.distribution})")
            if plugin.fault:
                print(f"  {'':<14} BROKEN: {plugin.fault}")


def _presets(options: argparse.Namespace) -> None:
    for name in preset_names():
        preset = preset_info(name)
        print(f"{name:<12} {preset.summary}  ({preset.date})")
        for source in preset.sources:
            print(f"             {source}")


def _detect(options: argparse.Namespace) -> None:
    spec = describe_cluster(resolve_cluster("auto"))
    if options.out is None:
        print(yaml.safe_dump(spec, sort_keys=False, allow_unicode=True), end="")
    else:
        write_spec(spec, options.out)
        print(f"Written: {options.out}")


def _measure(options: argparse.Namespace) -> None:
    if options.repeats < 1:
        raise AutoparError(f"--repeats must be 1 or more, not {options.repeats}")
    if measure_here(options.out, options.repeats, options.device):
        print(f"Written: {options.out}")


def _finish(compiled: Compiled, out: Path | None) -> None:
    print(compiled.plan, end="")
    if out is not None:
        _save(compiled, out)


def _save(compiled: Compiled, out: Path) -> None:
    try:
        compiled.save(out)
    except OSError as error:
        raise AutoparError(f"can't write to {out}: {error.strerror}") from error
    print(f"Written: {out / 'plan.json'}, {out / 'module.py'}")


if __name__ == "__main__":
    sys.exit(main())

"""docs/pins.md: its examples are kept by plans, its mistakes have the errors that it quotes, and it
names every pin that there is."""

import dataclasses
import fnmatch
import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from models import gpt2
from moe import grouped

import autopar
from autopar.planning.pins import read_pins
from autopar.planning.request import Request, make_plan
from autopar.registry import select_strategies

PAGE = (Path(__file__).parent.parent / "docs" / "pins.md").read_text("utf-8")
STRATEGIES = {strategy.name: strategy for strategy in select_strategies()}
OWNERS = {axis.name: s.name for s in STRATEGIES.values() for axis in s.axes()}


def examples() -> list[str]:
    blocks = re.findall(r"^```json\n(.*?)^```$", PAGE, re.S | re.M)
    return [line for block in blocks for line in block.splitlines()]


def mistakes() -> list[tuple[str, str]]:
    """Each with what its error says."""
    rows = re.findall(r"^\| `(\{.*?\})`(?:, without experts)? \| (`+) ?(.*?) ?\2 \|$", PAGE, re.M)
    return [(pin, text) for pin, _, text in rows]


@functools.cache
def request_for(has_experts: bool) -> Request:
    """The model of the examples on 4 devices, captured once; nothing is pinned."""
    job = grouped("mixtral") if has_experts else gpt2(layers=4)
    compiled = autopar.compile(job.model, "cpu:4", job.batch, pin={"dp": 4}, gap=0.9)
    assert compiled.request is not None
    return compiled.request


def planned(pin: Any, request: Request) -> autopar.Plan:
    """A plan by these pins; any will do."""
    return make_plan(dataclasses.replace(request, pins=read_pins(pin, (), request.strategies)))


def as_options(name: str, value: Any) -> Any:
    """A strategy's pin, a single value as that of the first option."""
    if isinstance(value, bool | Mapping):
        return value
    return {dataclasses.fields(STRATEGIES[name])[0].name: value}


def asked(pin: Mapping[str, Any]) -> dict[str, Any]:
    """The pins of strategies for the whole model; an axis above 1 turns its owner on."""
    owners = {OWNERS[axis]: True for axis in OWNERS if pin.get(axis, 1) > 1}
    return owners | {name: as_options(name, pin[name]) for name in STRATEGIES if name in pin}


def by_region(pin: Mapping[str, Any], request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each region, and what is asked of it; of globs the last wins."""
    for (path, region), modules in request.model.region_paths.items():
        wanted = asked(pin)
        for glob, own in pin.get("layers", {}).items():
            if any(fnmatch.fnmatchcase(module, glob) for module in modules):
                wanted |= {name: as_options(name, value) for name, value in own.items()}
        yield f"{path}/{region}".lstrip("/"), wanted


def check_regions(plan: autopar.Plan, pin: Mapping[str, Any], request: Request) -> None:
    """Off is off everywhere; what is on is used somewhere with its options, and nowhere with
    others."""
    hopes: dict[str, bool] = {}
    for place, wanted in by_region(pin, request):
        used = plan.options(place)
        for name, value in wanted.items():
            if name == "pipeline":
                continue
            if value is False:
                assert name not in used, place
                continue
            given = value if isinstance(value, Mapping) else {}
            own = used.get(name)
            if own is not None:
                assert {**given, **own} == {**own, **given}, place
            what = f"{name} {given}"
            hopes[what] = hopes.get(what, False) or (
                own is not None and own.items() >= given.items()
            )
    assert all(hopes.values()), hopes


def check_schedule(plan: autopar.Plan, pin: Mapping[str, Any]) -> None:
    """By `schedule` or by `pipeline`."""
    wanted = asked(pin).get("pipeline")
    if wanted is False:
        assert plan.schedule is None
    if wanted in (None, False):
        return
    given = {} if wanted is True else dict(wanted)
    given |= {"schedule": pin["schedule"]} if "schedule" in pin else {}
    assert plan.schedule is not None
    assert {"schedule": plan.schedule.name, **plan.schedule.options}.items() >= given.items()


@pytest.mark.parametrize("text", examples())
def test_example_is_kept(text: str) -> None:
    pin = json.loads(text)
    request = request_for("ep" in pin or "expert" in pin)
    plan = planned(pin, request)
    sizes = {**plan.axes, "microbatches": plan.microbatches}
    assert sizes == {**sizes, **{name: pin[name] for name in sizes if name in pin}}
    check_schedule(plan, pin)
    check_regions(plan, pin, request)


@pytest.mark.parametrize(("text", "error"), mistakes())
def test_mistake_is_told(text: str, error: str) -> None:
    with pytest.raises(autopar.AutoparError, match=re.escape(error)):
        planned(json.loads(text), request_for(has_experts=False))


def test_forbid_is_a_pin() -> None:
    (said,) = re.findall(r"`forbid=(\[.*?\])` .* is the same as `(\{.*?\})`", PAGE)
    forbid, pin = map(json.loads, said)
    every = STRATEGIES.values()
    assert read_pins(None, forbid, every) == read_pins(pin, (), every)


def test_all_pins_are_there() -> None:
    """In the first table with all options, in an example, and every table and block was read."""
    table = PAGE[: PAGE.index("| mistake | error |")]
    pins = [json.loads(text) for text in examples()]
    for name in (*OWNERS, *STRATEGIES, "microbatches", "schedule", "layers"):
        assert any(name in pin for pin in pins), name
        assert re.search(rf"^\| \[.*`{name}`.*\]\(#", table, re.M), name
    for name, strategy in STRATEGIES.items():
        (row,) = re.findall(rf"^\| \[`{name}`\].*$", table, re.M)
        options = [field.name for field in dataclasses.fields(strategy)]
        assert all(f"`{option}`" in row for option in options), row
    assert len(pins) == len(re.findall(r'^\{"', PAGE, re.M))
    assert len(mistakes()) == len(re.findall(r"^\| `\{", PAGE, re.M))

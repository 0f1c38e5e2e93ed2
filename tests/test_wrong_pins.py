"""Pins of a wrong type or in a wrong place: the error says what was wrong, and what may stand."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from autopar import AutoparError
from autopar.planning.pins import read_pins
from autopar.plugin import Candidate, Mesh, Refusal, Region, Strategy
from autopar.registry import select_strategies

BY_MODULE = "context, data, expert, recompute, sequence, tensor, zero"


@dataclass(frozen=True)
class Loose(Strategy):
    """Its options have all types, and it checks but one of them."""

    share: float = 0.5
    count: int | None = None
    kind: Literal["a", "b", 1] = "a"
    on: bool = True
    pair: tuple[int, int] = (1, 2)
    name: ClassVar[str] = "loose"

    def __post_init__(self) -> None:
        if self.share > 1:
            raise AutoparError("loose: too much")

    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable[Candidate | Refusal]:
        """Nothing."""
        return ()


def message(pin: Any, *more: Strategy) -> str:
    """What reading a pin ends in."""
    with pytest.raises(AutoparError) as caught:
        read_pins(pin, (), (*select_strategies(), *more))
    return str(caught.value)


@pytest.mark.parametrize(
    ("pin", "text"),
    [
        ({"recompute": ["full"]}, "recompute has no scope ['full']: legal are full, "),
        ({"recompute": {"together": 2.0}}, "recompute together 2.0: it takes the number of "),
        ({"zero": 3.0}, "zero has no stage 3.0: legal are 1, 2, 3"),
        ({"zero": {"stage": True}}, "zero has no stage True: legal are 1, 2, 3"),
        ({"zero": {"within": True}}, "zero within True: it takes the number of ranks"),
        ({"zero": {3: 1, "stages": 2}}, "pin 'zero': no option 3; there are stage, within"),
        ({"context": ("ring",)}, "context has no form ('ring',): there are "),
        ({"pipeline": {"chunks": 2.0}}, "chunks 2.0: an interleaved stage has at least 2"),
        ({"tensor": []}, "pin 'tensor': takes True or False, not []"),
        ({"dp": 2.0}, "pin 'dp': 2.0 is not a positive whole number"),
        ({"dp": "2"}, "pin 'dp': '2' is not a positive whole number"),
        ({"layers": {3: {"zero": 3}}}, 'pin "layers" maps globs of module names, of which 3 is '),
        (
            {"layers": {"h.*": None}},
            'pin "layers" maps globs to mappings such as {"zero": 3}, not ',
        ),
        ({"layers": {"h.*": {"zero": 3.0}}}, "zero has no stage 3.0"),
    ],
)
def test_a_value_of_another_type(pin: dict[str, Any], text: str) -> None:
    assert message(pin).startswith(text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("0.1", "loose share '0.1': it takes a number"),
        ({"share": None}, "loose share None: it takes a number"),
        ({"share": [1]}, "loose share [1]: it takes a number"),
        ({"share": True}, "loose share True: it takes a number"),
        ({"count": 2.0}, "loose count 2.0: it takes a whole number or None"),
        ({"count": False}, "loose count False: it takes a whole number or None"),
        ({"kind": "c"}, "loose kind 'c': it takes 'a' or 'b' or 1"),
        ({"kind": True}, "loose kind True: it takes 'a' or 'b' or 1"),
        ({"on": 1}, "loose on 1: it takes True or False"),
    ],
)
def test_a_plugin_need_not_check_types(options: Any, text: str) -> None:
    assert message({"loose": options}, Loose()) == text


def test_values_that_options_take() -> None:
    for own in ({"share": 1, "count": 3, "kind": 1}, {"pair": (3, 4), "on": False}):
        assert read_pins({"loose": own}, (), [Loose()]).strategies == {"loose": own}


def test_an_instance_has_such_values_too() -> None:
    with pytest.raises(AutoparError, match="loose count '2': it takes a whole number or None"):
        select_strategies([Loose(count="2")])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "what"),
    [
        ({"dp": 2}, "the axis 'dp'"),
        ({"pp": 2}, "the axis 'pp'"),
        ({"microbatches": 2}, "'microbatches'"),
        ({"schedule": "1f1b"}, "'schedule'"),
        ({"pipeline": False}, "'pipeline'"),
        ({"pipeline": "gpipe"}, "'pipeline'"),
        ({"zero": 3, "pipeline": True}, "'pipeline'"),
    ],
)
def test_what_is_of_the_whole_model(own: dict[str, Any], what: str) -> None:
    *_, (name, value) = own.items()
    assert message({"layers": {"h.0.*": own}}) == (
        f"pin layers['h.0.*']: {what} is of the whole model, and can't be pinned by module: pin "
        f'{{"{name}": {value!r}}} beside "layers". By module there are {BY_MODULE}'
    )


@pytest.mark.parametrize("name", ["fsdp", "layers", 3])
def test_what_nothing_is_called_by_module(name: Any) -> None:
    assert message({"layers": {"h.0.*": {name: True}}}) == (
        f"pin layers['h.0.*']: {name!r} is no strategy that can be pinned by module: there are "
        f"{BY_MODULE}"
    )


def test_none_is_free() -> None:
    """Whatever the pin is of, as if it were left out."""
    chosen = select_strategies()
    names = [*(s.name for s in chosen), *(a.name for s in chosen for a in s.axes())]
    nothing = dict.fromkeys([*names, "microbatches", "schedule", "layers"])
    assert read_pins(nothing, (), chosen) == read_pins(None, (), chosen)
    pin = {"zero": 3, "layers": {"h.0.*": {"zero": None, "recompute": "full"}}}
    own = {"h.0.*": {"recompute": "full"}}
    assert read_pins(pin, (), chosen) == read_pins({**pin, "layers": own}, (), chosen)
    assert message({"fsdp": None}).startswith("pin: 'fsdp' is neither an axis")
    assert "'dp' is of the whole model" in message({"layers": {"h.0.*": {"dp": None}}})

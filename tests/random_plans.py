"""Random models under random plans: shapes, processes, axes, schedules and every strategy are
drawn. A task for the pool says whether one is equal to the plain model, or why it is refused."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import experts
import families
from context import STRATEGIES
from equality import Comparison, planned_as, run
from models import Job
from random_models import FAMILIES, MOE

import autopar

WORLDS = (2, 4, 8)
AXES = ("dp", "tp", "pp", "cp", "ep")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
RECOMPUTE = (False, False, False, "selective", "full", {"scope": "full", "together": 2})
ZERO = (False, False, 1, 2, 3, {"stage": 1, "within": 2}, {"stage": 3, "within": 2})
TWO_SEQUENCES = ("t5", "transformer")
UNCUT = ("mlp", "resnet", "vit")
"""Families whose sequence can't be cut, if there is one."""
Bytes = Mapping[tuple[str, tuple[str, ...]], int]
"""By op and axes."""
FREE = 0.1
"""How often a choice is left to the planner."""


@dataclass(frozen=True)
class Drawn:
    """A model of some family with its batch, and what is pinned for so many processes."""

    family: str
    shape: str
    build: Callable[[], Job]
    world: int
    pins: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.family} {self.shape} on {self.world}: {dict(self.pins)}"


def drawn(seed: int) -> Drawn:
    """What a seed gives, always the same."""
    draw = random.Random(f"plan {seed}")
    world = WORLDS[seed % len(WORLDS)]
    family = draw.choice(list(FAMILIES))
    builder, shape = FAMILIES[family](draw)
    axes = _axes(draw, family, world)
    microbatches = 1 if family == "resnet" else draw.choice((1, 1, 2, 2, 3, 4))
    share = axes["dp"] * axes["ep"] * microbatches
    samples = share * draw.choice((1, 2)) if draw.random() < 0.95 else draw.randint(3, 12)
    pins = {**axes, "microbatches": microbatches, **_strategies(draw, family, axes)}
    shape["samples"] = samples
    text = ", ".join(f"{name} {value}" for name, value in shape.items())
    return Drawn(family, text, families._tiny(builder, samples), world, pins)


def _axes(draw: random.Random, family: str, world: int) -> dict[str, int]:
    """The processes, shared out in twos."""
    sizes = dict.fromkeys(AXES, 1)
    legal = [axis for axis in AXES if axis != "ep" or family in MOE]
    legal += ["dp", "tp"] if family in TWO_SEQUENCES else []  # rarely cp, which they refuse
    if family in UNCUT:
        legal.remove("cp")
    if family == "mlp":
        legal.remove("pp")
    while world > 1:
        sizes[draw.choice(legal)] *= 2
        world //= 2
    return sizes


def _strategies(draw: random.Random, family: str, axes: dict[str, int]) -> dict[str, Any]:
    """Pins of everything but the axes; some are left out."""
    replicas = axes["dp"] * axes["ep"] * axes["cp"]
    stages = ZERO if replicas > 1 else (False,)
    pins: dict[str, Any] = {"tensor": False, "sequence": False}
    pins |= {"zero": draw.choice(stages), "recompute": draw.choice(RECOMPUTE)}
    if axes["tp"] > 1:
        pins |= {"tensor": True, "sequence": family not in UNCUT and draw.random() < 0.5}
    if axes["pp"] > 1:
        pins["schedule"] = draw.choice(SCHEDULES)
        if draw.random() < 0.8:  # mostly what can meet
            pins["recompute"] = draw.choice((False, "selective", "full"))
            if pins["schedule"] == "zero_bubble":
                pins |= {"recompute": False, "zero": draw.choice((False, *stages[2:4]))}
    if axes["cp"] > 1:
        pins["context"] = draw.choice(("ring", "all_to_all"))
    if family != "mlp" and draw.random() < 0.2:
        one = draw.choice(({"zero": draw.choice(stages)}, {"recompute": draw.choice(RECOMPUTE)}))
        pins["layers"] = {"*.0.*": one}
    return {name: pin for name, pin in pins.items() if draw.random() >= FREE}


# ---------------------------------------------------------------- a task for the pool


def compare(seed: int) -> Comparison | str:
    """A drawn plan against the plain model, or why it was refused."""
    case = drawn(seed)
    with experts.wide():
        job = case.build()
        job.model.double()
        try:
            program = planned_as(job, f"cpu:{case.world}", STRATEGIES, case.pins)
        except autopar.AutoparError as error:
            return str(error)
        return run(job, program)


def fullest(found: Sequence[Comparison]) -> list[tuple[Bytes, Bytes]]:
    """Counted and planned bytes of each stage. Where rows don't divide, a plan is about the ranks
    with the largest shards; others may send less."""
    stages: dict[tuple[Any, ...], tuple[dict[Any, int], Bytes]] = {}
    for one in map(without_tokens, found):
        most, _ = stages.setdefault(tuple(sorted(one.planned.items())), ({}, one.planned))
        for key, size in one.counted.items():
            most[key] = max(size, most.get(key, 0))
    return list(stages.values())


def without_tokens(found: Comparison) -> Comparison:
    """How many tokens travel to experts depends on the router, and isn't what the plan says."""

    def kept(key: tuple[str, tuple[str, ...]]) -> bool:
        return key[0] != "all_to_all" or not all(axis.startswith("ep") for axis in key[1])

    return replace(
        found,
        counted={key: size for key, size in found.counted.items() if kept(key)},
        planned={key: size for key, size in found.planned.items() if kept(key)},
    )

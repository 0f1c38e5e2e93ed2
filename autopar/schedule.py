"""Schedules of layers in stages, as data: what every stage does, in order, and what follows.

A model is cut into `stages · chunks` parts, in order; part p lies on stage p % stages (chunk
p // stages of that stage). A step runs every microbatch forward through all parts and back.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["F", "B", "I", "W"]
TICKS: Mapping[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""The time of an action, in that of a forward: a backward computes two gradients."""


@dataclass(frozen=True, order=True)
class Action:
    """One microbatch through one part: "F" forward, "B" backward, or the backward in two halves,
    "I" the inputs' gradient and "W" the weights', later."""

    kind: Kind
    part: int
    microbatch: int

    @property
    def key(self) -> "Key":
        """The same as a tuple, which is looked up faster."""
        return self.kind, self.part, self.microbatch

    def __str__(self) -> str:
        return f"{self.kind} of part {self.part}, microbatch {self.microbatch}"


Key = tuple[Kind, int, int]
"""An action's kind, part and microbatch."""


@dataclass(frozen=True, order=True)
class Message:
    """What part `source` hands to part `target` for a microbatch: activations to the next part, or
    gradients to the one before. It leaves when the action that makes it ends, at `tick`."""

    tick: int
    source: int
    target: int
    microbatch: int

    @property
    def forward(self) -> bool:
        """Activations, not gradients."""
        return self.target > self.source


class BrokenScheduleError(Exception):
    """A table that can't run, or leaves something out."""


@dataclass(frozen=True)
class Table:
    """`orders`: for each stage its actions in the order in which it runs them."""

    stages: int
    chunks: int
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]

    @property
    def parts(self) -> int:
        """How many parts the model is cut into."""
        return self.stages * self.chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the weights' gradients come later than the inputs'."""
        return any(action.kind == "W" for order in self.orders for action in order)

    def forward_only(self) -> "Table":
        """The forwards alone, in the same order: an evaluation."""
        orders = tuple(tuple(a for a in order if a.kind == "F") for order in self.orders)
        return Table(self.stages, self.chunks, self.microbatches, orders)

    @cached_property
    def starts(self) -> Mapping[Action, int]:
        """When each action starts, in ticks, if parts take equal time and sending takes none.

        Errors: BrokenScheduleError where an action waits for one that comes later, for ever.
        """
        ends: dict[Key, int] = {}
        starts: dict[Action, int] = {}
        at = [0] * self.stages
        free = [0] * self.stages
        moved = True
        while moved:
            moved = False
            for stage, order in enumerate(self.orders):
                while at[stage] < len(order):
                    action = order[at[stage]]
                    needed = self._needs(action)
                    if any(one not in ends for one in needed):
                        break
                    start = max([free[stage], *(ends[one] for one in needed)])
                    starts[action], free[stage] = start, start + TICKS[action.kind]
                    ends[action.key] = free[stage]
                    at[stage] += 1
                    moved = True
        stuck = [order[i] for order, i in zip(self.orders, at, strict=True) if i < len(order)]
        if stuck:
            raise BrokenScheduleError(f"these wait for ever: {'; '.join(map(str, stuck))}")
        return starts

    def _needs(self, action: Action) -> list[Key]:
        """What must have ended before an action."""
        kind, part, microbatch = action.kind, action.part, action.microbatch
        back: Kind = "I" if self.splits_backward else "B"
        match kind:
            case "F":
                return [("F", part - 1, microbatch)] if part > 0 else []
            case "W":
                return [("I", part, microbatch)]
            case _:
                own: Key = ("F", part, microbatch)
                return [own, (back, part + 1, microbatch)] if part + 1 < self.parts else [own]

    def check(self) -> None:
        """Errors: BrokenScheduleError where it can't run, or something is done twice, never, or on
        another stage than where the part lies."""
        _ = self._checked

    @cached_property
    def _checked(self) -> bool:
        kinds: tuple[Kind, ...] = ("F", "I", "W") if self.splits_backward else ("F", "B")
        for stage, order in enumerate(self.orders):
            wanted: set[Key] = {
                (kind, part, microbatch)
                for kind in kinds
                for part in range(stage, self.parts, self.stages)
                for microbatch in range(self.microbatches)
            }
            wrong = wanted.symmetric_difference(action.key for action in order)
            if wrong or len(order) != len(wanted):
                named = ", ".join(str(Action(*one)) for one in sorted(wrong)[:3])
                named = named or "an action twice"
                raise BrokenScheduleError(f"stage {stage} lacks, or has too much: {named}")
        return bool(self.starts)

    @cached_property
    def ticks(self) -> int:
        """How long a step takes, in ticks."""
        return max(start + TICKS[action.kind] for action, start in self.starts.items())

    @property
    def per_stage(self) -> float:
        """b: a step takes a · slowest stage + b · sum of stages, of one microbatch's time on each.
        Taken from equal stages, where it is exact: the bubble is b · (stages − 1) microbatches. It
        is 1 for GPipe and 1F1B and 1 / chunks for interleaved (Narayanan et al. 2021)."""
        if self.stages == 1:
            return 0.0
        whole = 3 * self.chunks
        return (self.ticks / whole - self.microbatches) / (self.stages - 1)

    @property
    def per_slowest(self) -> float:
        """a of `per_stage`."""
        return self.microbatches - self.per_stage

    @property
    def bubble(self) -> float:
        """The share of a step in which a stage waits, where all take equal time."""
        return 1 - 3 * self.chunks * self.microbatches / self.ticks

    def in_flight(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """For how many microbatches a stage holds saved tensors, by chunk: every combination that
        no other one of this stage exceeds in all chunks."""
        held = [0] * self.chunks
        found: dict[tuple[int, ...], None] = {}
        for action in self.orders[stage]:
            if action.kind == "F":
                held[action.part // self.stages] += 1
                found[tuple(held)] = None
            elif action.kind in ("B", "W"):
                held[action.part // self.stages] -= 1
        most: list[tuple[int, ...]] = []
        for one in sorted(found, key=sum, reverse=True):
            if not any(all(a >= b for a, b in zip(other, one, strict=True)) for other in most):
                most.append(one)
        return tuple(one for one in found if one in most)

    @cached_property
    def every_in_flight(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """`in_flight` of each stage."""
        return tuple(self.in_flight(stage) for stage in range(self.stages))

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Everything that is handed over, in the order in which it leaves."""
        found = []
        for action, start in self.starts.items():
            end = start + TICKS[action.kind]
            part, microbatch = action.part, action.microbatch
            if action.kind == "F" and part + 1 < self.parts:
                found.append(Message(end, part, part + 1, microbatch))
            if action.kind in ("B", "I") and part > 0:
                found.append(Message(end, part, part - 1, microbatch))
        return tuple(sorted(found))

    def steps(self, stage: int) -> tuple["Action | tuple[Message, ...]", ...]:
        """What a stage does: actions, and between them the messages of one tick that it sends or
        receives, together. All stages have the ticks in one order, so no two wait for each other.
        """
        mine = [
            m for m in self.messages if stage in (m.source % self.stages, m.target % self.stages)
        ]
        placed: list[tuple[int, int, Action | tuple[Message, ...]]] = [
            (tick, 0, tuple(group)) for tick, group in itertools.groupby(mine, key=lambda m: m.tick)
        ]
        placed += [(self.starts[action], 1, action) for action in self.orders[stage]]
        # Stable: a stage's own order stays, whatever the starts.
        return tuple(item[2] for item in sorted(placed, key=lambda item: item[:2]))

"""Which ops and conversions run again in the backward, and what that entails."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from autopar.graph.model_graph import STREAM, Block
from autopar.layouts.convert import Step
from autopar.layouts.effects import closing_collectives, compute_effects
from autopar.layouts.layout import Setting
from autopar.layouts.typing import OpTyping
from autopar.plugin import Candidate, Collective, Compute, Effect


@dataclass(frozen=True)
class Reach:
    """How far a second run of what `scope` says goes.

    `places`: the order of its ops; it ends at `last` (before any op where nothing is kept), which
    itself runs if `with_last`."""

    scope: Literal["region", "layers"]
    places: Mapping[str, int]
    last: int
    with_last: bool

    def runs(self, op: str) -> bool:
        """Whether an op runs again."""
        return op in self.places and self.places[op] < self.last + self.with_last

    def takes(self, user: str) -> bool:
        """Whether a node's inputs (the block's output's too) are there again, converted."""
        return user in self.places and self.places[user] <= self.last


def reach(block: Block, candidate: Candidate, ends: bool) -> Reach | None:
    """How far the second run goes that the candidate's region is in, or None if there is none.

    It ends where the last tensor is kept: a product keeps its inputs, and isn't computed again.
    `ends`: the layer is the last of those that run again together; the others run whole.
    """
    if candidate.recompute is None:
        return None
    alone = candidate.recompute.scope == "region"
    own = [op for op in block.ops.values() if not alone or op.region == candidate.region]
    places = {op.node.name: i for i, op in enumerate(own)}
    if not ends:
        output = next(n.name for n in reversed(block.graph.nodes) if n.op == "output")
        return Reach("layers", {**places, output: len(places)}, len(places), True)
    last, with_last = -1, False
    for one in block.saved:
        if one.op in places and places[one.op] >= last:
            made = one.value is None or one.value == one.op
            with_last = made or (with_last and places[one.op] == last)
            last = places[one.op]
    return Reach(candidate.recompute.scope, places, last, with_last)


Running = Mapping[str, tuple[Compute | Collective, ...]]
"""By op, what it does in a step on one rank for one microbatch."""


def running_effects(block: Block, typings: Mapping[str, OpTyping], setting: Setting) -> Running:
    """What ops of a region do, if each runs once."""
    return {
        name: (
            *compute_effects(block, block.ops[name], typing, setting, typings),
            *closing_collectives(block, block.ops[name], typing, setting),
        )
        for name, typing in typings.items()
    }


def again_effects(
    block: Block, candidate: Candidate, running: Running, setting: Setting, ends: bool
) -> Iterator[Effect]:
    """The region's ops (`running`: what each does) that run again, in the backward; the stream
    answers for its layer's input ops as well. Conversions between regions are not among them."""
    again = reach(block, candidate, ends)
    if again is None:
        return
    for name, op in block.ops.items():
        if not again.runs(name):
            continue
        mine = op.region == candidate.region
        if not mine and (op.region is not None or candidate.region != STREAM):
            continue
        if not mine and name not in block.values:
            continue
        if mine and name not in running:
            continue
        effects = running[name] if mine else compute_effects(block, op, None, setting)
        yield from (_again(e) for e in effects if e.phase == "forward")


def _again(effect: Compute | Collective) -> Compute | Collective:
    if isinstance(effect, Compute):
        return replace(effect, phase="backward", again=True)
    return replace(effect, phase="backward")


def steps_again(steps: tuple[Step, ...], what: str) -> Iterator[Collective]:
    """The collectives of a conversion that runs again."""
    for step in steps:
        if step.forward is not None:
            op, size = step.forward
            yield Collective(op, size, step.parts, "backward", "microbatch", what)

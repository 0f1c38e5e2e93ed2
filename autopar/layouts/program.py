"""A plan made concrete: the chosen candidate of every region of every layer, on one setting."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.graph.chains import groups
from autopar.graph.model_graph import STREAM, Block, ModelGraph
from autopar.layouts.flow import Choices, Flow, make_flow
from autopar.layouts.layout import Setting
from autopar.layouts.stages import Cut, Here, heres
from autopar.mesh import Split
from autopar.plugin import Candidate


@dataclass(frozen=True)
class Program:
    """`choices`: layer path ("" for the skeleton) → region → candidate. `cut`: how layers lie in
    stages, if the setting has a schedule."""

    model: ModelGraph
    setting: Setting
    choices: Mapping[str, Choices]
    cut: Cut | None = None

    @cached_property
    def flows(self) -> Mapping[str, Flow]:
        """The flow of every instance; instances of one variant share it."""
        streams = {
            path: (block, self.choices[path][STREAM])
            for path, block in self.model.instances()
            if path
        }
        made: dict[tuple[int, tuple[object, ...]], Flow] = {}
        out = {}
        for path, block in self.model.instances():
            key = (id(block), splits_of(self.choices[path]))
            if key not in made:
                callees = streams if block is self.model.skeleton else {}
                returns_loss = block is self.model.skeleton
                choices = self.choices[path]
                made[key] = make_flow(block, choices, self.setting, callees, returns_loss)
            out[path] = made[key]
        return out

    @cached_property
    def heres(self) -> tuple[Here, ...]:
        """The skeleton as each part has it; none without stages."""
        return () if self.cut is None else heres(self.cut, self.setting)

    def group(self, path: str) -> tuple[str, ...]:
        """The layers that run again in the backward together with a layer, itself included."""
        return group_of(self.model, path, self.choices[path][STREAM])

    def block(self, path: str) -> Block:
        """The block of an instance."""
        return self.flows[path].block


def group_of(model: ModelGraph, path: str, candidate: Candidate) -> tuple[str, ...]:
    """The layers that run again in the backward with a layer whose region does this; it alone where
    none do."""
    again = candidate.recompute
    if again is None or again.scope == "region" or path == "" or again.layers == 1:
        return (path,)
    return groups(model, again.layers)[path]


def splits_of(choices: Choices) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """What a block's code depends on: the splits of its regions, ops in forms of their own, regions
    that run again alone, and whose gradients have a sync of their own (not how parameters are
    sharded)."""
    return tuple(
        sorted(
            (
                region,
                (candidate.splits, candidate.forms, runs_alone(candidate), _synced(candidate)),
            )
            for region, candidate in choices.items()
        )
    )


def run_together(program: Program, path: str) -> int:
    """How many layers run again together where a layer runs again as a whole, else 0."""
    again = program.choices[path][STREAM].recompute
    return again.layers if again is not None and again.scope == "layers" else 0


def runs_alone(candidate: Candidate) -> bool:
    """Whether the region runs again in the backward by itself."""
    return candidate.recompute is not None and candidate.recompute.scope == "region"


def _synced(candidate: Candidate) -> tuple[tuple[str, Split], ...]:
    return tuple((name, plan.sync.axes) for name, plan in candidate.params if plan.sync)

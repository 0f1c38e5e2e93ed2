"""A plan made concrete: the chosen candidate of every region of every layer, on one setting."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.graph.model_graph import STREAM, Block, ModelGraph
from autopar.layouts.flow import Choices, Flow, make_flow
from autopar.layouts.layout import Setting
from autopar.plugin import Candidate


@dataclass(frozen=True)
class Program:
    """`choices`: layer path ("" for the skeleton) → region → candidate."""

    model: ModelGraph
    setting: Setting
    choices: Mapping[str, Choices]

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

    def block(self, path: str) -> Block:
        """The block of an instance."""
        return self.flows[path].block


def splits_of(choices: Choices) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """What a block's code depends on: the splits of its regions (not how parameters live)."""
    return tuple(sorted((region, candidate.splits) for region, candidate in choices.items()))


def sharded_params(candidate: Candidate) -> Mapping[str, tuple[str, ...]]:
    """Parameters that ZeRO shards, and the axes."""
    return {
        name: tuple(part.axis for part in plan.param)
        for name, plan in candidate.params
        if plan.param
    }

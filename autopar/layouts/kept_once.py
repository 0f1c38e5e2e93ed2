"""What a whole program keeps for the backward: each tensor once, whichever regions and layers keep
it. (A region alone can't know: `saved.saved_residents`.)"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch.fx

from autopar.graph.chains import layer_calls
from autopar.graph.model_graph import STREAM
from autopar.layouts.flow import Flow, normal
from autopar.layouts.layout import Layout
from autopar.layouts.program import Program
from autopar.layouts.saved import Kept, Storage, moved, owner_of
from autopar.layouts.typing import RegionTyping
from autopar.plugin import Resident

Origin = tuple[str, str, Layout]
"""The layer ("" for the skeleton) and the value in it that own a storage, and its layout."""


def kept_once(
    program: Program, kept: Iterable[tuple[str, Kept]], late: Iterable[Kept]
) -> Iterator[tuple[str, Resident]]:
    """Of what regions of layers (by path) keep the bytes, a tensor's with the first that does.
    `late`: what the skeleton keeps after the last layer."""
    origins = _Origins(program)
    seen: set[Origin] = set()
    every = itertools.chain(((p, one, False) for p, one in kept), (("", one, True) for one in late))
    for path, one, is_late in every:
        total = one.inside_bytes
        for name, layout in (*one.storages, *one.shared):
            origin = origins.of(path, name, layout)
            total += 0 if origin in seen else origins.bytes(origin)
            seen.add(origin)
        yield path, Resident("saved", total, "end" if is_late else "any")


@dataclass(frozen=True)
class _Origins:
    """Where values come from, across the borders of layers. `owners`: what was found within blocks,
    by the flow's identity."""

    program: Program
    owners: dict[tuple[int, str, Layout], Storage] = field(default_factory=dict)

    def of(self, path: str, name: str, layout: Layout) -> Origin:
        """The value that owns the storage of a layer's value as it is taken in a layout."""
        while True:
            flow = self.program.flows[path]
            name, layout = self._owner(flow, name, layout)
            value = flow.block.values[name]
            before = self._before(path, name)
            layout = layout.restrict(value.names)
            if before is None or moved(normal(value, flow.made[name]), normal(value, layout)):
                return path, name, layout
            path, name = before

    def bytes(self, origin: Origin) -> int:
        """The size of such a storage."""
        path, name, layout = origin
        flow = self.program.flows[path]
        value = flow.block.values[name]
        return flow.setting.local_numel(value.dims, layout) * value.item_bytes

    def _owner(self, flow: Flow, name: str, layout: Layout) -> Storage:
        key = (id(flow), name, layout)
        if key not in self.owners:
            every = RegionTyping(flow.choices[STREAM], flow.typings)
            self.owners[key] = owner_of(flow.block, name, layout, every, flow.setting)
        return self.owners[key]

    def _before(self, path: str, name: str) -> tuple[str, str] | None:
        """The same value on the other side of a layer's border; None for others."""
        if path:
            given = self._given[path].get(name)
            return None if given is None else ("", given)
        return self._results.get(name)

    @cached_property
    def _results(self) -> dict[str, tuple[str, str]]:
        """Values of the skeleton that layers return."""
        found = {}
        for call in layer_calls(self.program.model.skeleton):
            path = str(call.args[1])
            outputs = self.program.block(path).outputs()
            for user in call.users:
                found[user.name] = path, outputs[user.args[1]].name  # type: ignore[index]
        return found

    @cached_property
    def _given(self) -> dict[str, dict[str, str]]:
        """Of each layer its inputs' names in the skeleton."""
        found = {}
        for call in layer_calls(self.program.model.skeleton):
            tensors: tuple[torch.fx.Node, ...] = tuple(call.args[0])  # type: ignore[arg-type]
            inputs = self.program.block(str(call.args[1])).inputs()
            names = zip(inputs, tensors, strict=True)
            found[str(call.args[1])] = {inner: outer.name for inner, outer in names}
        return found

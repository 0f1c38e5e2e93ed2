"""Inputs that several layers share (masks, rotary tables): there once in a part of the model if any
of its layers keeps them as they come."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autopar.graph.model_graph import STREAM
from autopar.layouts.saved import Storage, shared_tensors
from autopar.planning.layered import Layered
from autopar.plugin import Resident

Takes = Mapping[int, frozenset[int]]
"""By slot, its choices."""


@dataclass(frozen=True)
class SharedInputs:
    """Of some layers: the bytes that they keep whatever they do, and what only some choices keep,
    with its bytes."""

    always_bytes: int
    sometimes: tuple[tuple[str, int, Takes], ...]


def shared_inputs(layered: Layered, layers: Collection[str]) -> SharedInputs:
    """Those of the layers at these paths."""
    pricer = layered.pricer
    sizes: dict[Storage, int] = {}
    takes: dict[Storage, dict[int, frozenset[int]]] = {}
    always: set[Storage] = set()
    for path, given in shared_tensors(pricer.model, pricer.setting, layers).items():
        kind = layered.kinds[path]
        for name, (storage, size) in given.items():
            takers = kind.sharing.get(name)
            if takers is not None:
                # In an account it is rounded up with what else a region keeps, once.
                sizes[storage] = math.floor(pricer.prices.cost(Resident("saved", size)))
                own = takes.setdefault(storage, {})
                slot = layered.index[path, STREAM]
                own[slot] = own.get(slot, frozenset()) | takers
                if len(own[slot]) == len(kind.columns.picks):
                    always.add(storage)
    return SharedInputs(
        sum(sizes[one] for one in always),
        tuple((one[0], sizes[one], own) for one, own in takes.items() if one not in always),
    )

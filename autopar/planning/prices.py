"""Seconds and bytes of effects, asked of the cost model that claims each kind."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.cluster import ClusterSpec
from autopar.layouts.saved import Storage
from autopar.mesh import Mesh
from autopar.planning.joined import Late, empty_call, split_price
from autopar.planning.weights import (
    Row,
    Weights,
    beside,
    comes_once,
    entry,
    weighted,
    window_of,
)
from autopar.plugin import BUCKET, Alongside, Collective, Compute, CostModel, Effect, Resident

ONE_RANK = Mesh(())
"""What one rank computes and holds costs the same on any mesh: only collectives see it."""


@dataclass(frozen=True)
class Bill:
    """What some effects come to on one rank in one step."""

    compute_s: float = 0.0
    communication_s: float = 0.0
    optimizer_s: float = 0.0
    resident_bytes: int = 0
    transient_bytes: int = 0
    step_s: float = 0.0
    """The seconds that are paid once a step, of all of them."""
    held_bytes: int = 0
    """The resident bytes that are held for each microbatch in flight, of all of them."""
    again_bytes: int = 0
    """The transient bytes that are there for what runs again, of all of them."""
    alone_bytes: int = 0
    """Of these, what regions need that run again by themselves, one at a time."""
    late_bytes: int = 0
    """The held bytes of what follows the last layer: its backward is the first to free its own."""
    closing_bytes: int = 0
    """The transient bytes of what follows the last layer."""
    units: Mapping[Collective, int] = field(default_factory=dict)
    """The joined calls that it takes part in, with its bytes: what they cost beside these at a full
    rate isn't in it."""
    kept: Mapping[Storage, int] = field(default_factory=dict)
    """Of the held bytes, storages that other regions of the layer may keep too."""
    shared: frozenset[str] = frozenset()
    """Inputs of the layer that it keeps as they come, being there once for all layers: their bytes
    aren't among the held."""

    @property
    def seconds(self) -> float:
        """Everything, as the weights count it."""
        return self.compute_s + self.communication_s + self.optimizer_s

    @property
    def freed_bytes(self) -> int:
        """What of it is gone when the backward of the last layer begins."""
        return self.late_bytes + self.closing_bytes

    @property
    def brief_bytes(self) -> int:
        """The transient bytes that are there whether something runs again or not."""
        return self.transient_bytes - self.again_bytes

    @property
    def lasting_bytes(self) -> int:
        """The resident bytes that are held throughout, however many microbatches are in flight."""
        return self.resident_bytes - self.held_bytes

    def each_s(self, microbatches: int) -> float:
        """Seconds of one microbatch, without what is paid once a step."""
        return (self.seconds - self.step_s) / microbatches

    def __add__(self, other: "Bill") -> "Bill":
        return Bill(
            self.compute_s + other.compute_s,
            self.communication_s + other.communication_s,
            self.optimizer_s + other.optimizer_s,
            self.resident_bytes + other.resident_bytes,
            self.transient_bytes + other.transient_bytes,
            self.step_s + other.step_s,
            self.held_bytes + other.held_bytes,
            self.again_bytes + other.again_bytes,
            self.alone_bytes + other.alone_bytes,
            self.late_bytes + other.late_bytes,
            self.closing_bytes + other.closing_bytes,
            joined_units(self.units, other.units),
            {**self.kept, **other.kept} if self.kept and other.kept else self.kept or other.kept,
            self.shared | other.shared,
        )


@dataclass(frozen=True)
class Prices:
    """The chosen cost models on one mesh of one cluster."""

    models: Sequence[CostModel]
    mesh: Mesh
    cluster: ClusterSpec
    weights: Weights = field(default_factory=Weights)
    known: dict[tuple[object, ...], Late] = field(default_factory=dict, compare=False)
    """Prices of collectives, whatever they communicate; of joined ones, what they add to a call."""

    def on(self, mesh: Mesh) -> "Prices":
        """The same models and weights on another mesh."""
        return replace(self, mesh=mesh, known={})

    def cost(self, effect: Effect) -> float:
        """Seconds of an effect by itself, or bytes (Resident)."""
        mesh = self.mesh if isinstance(effect, Collective) else ONE_RANK
        return self._checked(effect, self._model(effect).cost(effect, mesh, self.cluster))

    def seconds(self, effect: Compute | Collective) -> Late:
        """What an effect adds each microbatch and once a step, as the weights count it: the window
        with what hides once a step has weights of its own."""
        if isinstance(effect, Compute):
            return self._weighted(effect)
        key = ("whole", *_all_but_what(effect))
        if key not in self.known:
            self.known[key] = self._weighted(effect)
        return self.known[key]

    def _weighted(self, effect: Compute | Collective) -> Late:
        price, host_s = self.apart(effect)
        hides = isinstance(effect, Collective) and self.hides(effect)
        work, window = entry(effect, hides, price, host_s), window_of(effect)
        if work is None:
            return 0.0, price
        each_s, ends_s = (
            weighted(row, work)
            for row in (self.weights.of(window), self.weights.at_the_end(window))
        )
        return (0.0, ends_s) if comes_once(effect) else (each_s, ends_s - each_s)

    def _joined(self, effect: Collective) -> Late:
        key = ("joined", *_all_but_what(effect))
        if key not in self.known:
            self.known[key] = split_price(effect, self.seconds)
        return self.known[key]

    def _checked(self, effect: Effect, price: float) -> float:
        assert price >= 0 and math.isfinite(price), (self._model(effect).name, effect, price)
        return price

    def apart(self, effect: Effect) -> tuple[float, float]:
        """Seconds on the device or the network, and of the host that may run ahead."""
        mesh = self.mesh if isinstance(effect, Collective) else ONE_RANK
        price, host_s = self._model(effect).apart(effect, mesh, self.cluster)
        return self._checked(effect, price), self._checked(effect, host_s)

    def hides(self, effect: Collective) -> bool:
        """Whether it counts as hidden behind compute."""
        return beside(self.models).hides(effect)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Weighted sums of what runs at the same time, of which the largest is the price."""
        return beside(self.models).rows(self.cluster)

    def explain(self, effect: Effect) -> str:
        """How the price came about, in a word: a collective's algorithm."""
        return self._model(effect).explain(effect, self.mesh, self.cluster)

    def _model(self, effect: Effect) -> CostModel:
        return self._by_kind[effect.kind]

    @cached_property
    def _by_kind(self) -> Mapping[str, CostModel]:
        return {kind: model for model in reversed(self.models) for kind in model.prices}

    def bill(self, effects: Iterable[Effect], microbatches: int) -> Bill:
        """The sum over effects; those that occur once a microbatch count that often."""
        compute = communication = optimizer = once = 0.0
        resident = transient = held = again = alone = late = closing = 0
        units: dict[Collective, int] = {}
        for effect in effects:
            assert not isinstance(effect, Alongside), effect
            if isinstance(effect, Resident):
                size = math.ceil(self.cost(effect))
                if effect.what == "transient":
                    transient += size
                    again += size if effect.when in ("again", "alone") else 0
                    alone += size if effect.when == "alone" else 0
                    closing += size if effect.when == "end" else 0
                else:
                    resident += size
                    held += size if effect.what == "saved" else 0
                    late += size if effect.when == "end" else 0
                continue
            if isinstance(effect, Collective) and effect.unit:
                each_s, once_s = self._joined(effect)
                if effect.unit != BUCKET:
                    call = empty_call(effect)
                    units[call] = units.get(call, 0) + effect.bytes
            else:
                each_s, once_s = self.seconds(effect)
            once += once_s
            if isinstance(effect, Collective):
                communication += each_s * microbatches + once_s
            elif effect.phase == "optimizer":
                optimizer += once_s
            else:
                compute += each_s * microbatches + once_s
        return Bill(
            *(compute, communication, optimizer, resident, transient),
            step_s=once,
            held_bytes=held,
            again_bytes=again,
            alone_bytes=alone,
            late_bytes=late,
            closing_bytes=closing,
            units=units,
        )

    def overhead_bytes(self) -> int:
        """What every rank loses whatever the plan."""
        return sum(m.overhead_bytes(self.mesh, self.cluster) for m in self.models)


def joined_units(
    first: Mapping[Collective, int], second: Mapping[Collective, int]
) -> Mapping[Collective, int]:
    """Bytes by call, added up."""
    if not first or not second:
        return first or second
    return {call: first.get(call, 0) + second.get(call, 0) for call in {**first, **second}}


def _all_but_what(effect: Collective) -> tuple[object, ...]:
    where = effect.phase, effect.per, effect.unit, effect.hides
    return effect.op, effect.bytes, effect.axes, *where

"""The planning problem as numbers: what price hands to solve. It knows no model and no strategy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """What something costs one stage: seconds of one microbatch, seconds once a step, bytes held
    throughout, for each microbatch in flight by chunk, and for a moment; `again_bytes` more in a
    moment at which the `freed_bytes` of all are gone."""

    stage: int
    seconds: float = 0.0
    step_seconds: float = 0.0
    resident_bytes: int = 0
    held_bytes: tuple[int, ...] = ()
    transient_bytes: int = 0
    again_bytes: int = 0
    freed_bytes: int = 0


@dataclass(frozen=True)
class Stages:
    """Layers in stages. A step takes per_slowest · slowest + per_stage · Σ τ + late, of which τ is
    what a stage takes for one microbatch, slowest = max τ, and late = max (once + spare · (τ −
    slowest)) what comes once a step (`once`, which may be negative: one microbatch's window has
    weights of its own). A stage waits less for what comes late if it is faster. `in_flight`: for
    each stage, how many microbatches each of its chunks may hold at the same time."""

    per_slowest: float
    per_stage: float
    in_flight: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def count(self) -> int:
        """How many stages there are."""
        return len(self.in_flight)

    @property
    def spare(self) -> float:
        """With it a step is at least what it is with the account's own τ, which may be longer than
        the weights say: then it rises with every τ, as per_stage + spare ≥ 1."""
        return max(0.0, 1.0 - self.per_stage)

    def step_seconds(self, each: Sequence[float], once: Sequence[float]) -> float:
        """The time of a step, from what stages take for a microbatch and once a step."""
        slowest = max(each)
        late = max(o + self.spare * (e - slowest) for e, o in zip(each, once, strict=True))
        return self.per_slowest * slowest + self.per_stage * sum(each) + late


@dataclass(frozen=True)
class Choice:
    """One candidate of one slot, priced: seconds of one step (all its microbatches), bytes that one
    rank holds throughout, and bytes that it needs for a moment (only the largest counts);
    `again_bytes`: so many more in a moment at which the `freed_bytes` of all choices, which are
    among what they hold, are gone.

    Where the problem has stages, `shares` is what counts, one for each stage that it costs."""

    seconds: float
    resident_bytes: int
    transient_bytes: int
    shares: tuple[Share, ...] = ()
    again_bytes: int = 0
    freed_bytes: int = 0


@dataclass(frozen=True)
class Slot:
    """One region of one layer: exactly one of its choices is taken.

    `group` (the layer): the transient bytes of one group's slots are needed together. `is_front`:
    no choice is known to be worse in all than another that looks the same from outside."""

    name: str
    choices: tuple[Choice, ...]
    group: str = ""
    is_front: bool = False


@dataclass(frozen=True)
class Use:
    """A slot that needs a value: `layouts[c]` is the layout that its choice c needs (an index into
    the edge's layouts), or None where that choice doesn't need the value."""

    slot: int
    layouts: tuple[int | None, ...]


@dataclass(frozen=True)
class Edge:
    """A value that crosses between slots: made in one layout, needed in others.

    `source.layouts[c]` is the layout that choice c of the producing slot makes. Each distinct
    (made, needed) pair that occurs is converted once, however many uses share it, and costs
    `seconds[made][needed]` and `resident_bytes[made][needed]`; None in `seconds`: impossible.
    Where the problem has stages, the bytes and seconds are the stage's, of one microbatch, and
    `step_seconds` what is paid once a step on top (nothing, if there is no table). `is_held`: the
    bytes are there for each microbatch in flight.
    """

    name: str
    source: Use
    uses: tuple[Use, ...]
    seconds: tuple[tuple[float | None, ...], ...]
    resident_bytes: tuple[tuple[int, ...], ...]
    stage: int = 0
    step_seconds: tuple[tuple[float | None, ...], ...] = ()
    is_held: bool = False

    def costs(self, made: int, needed: int) -> tuple[float, float]:
        """Seconds of a possible conversion, and those once a step."""
        each_s = self.seconds[made][needed]
        once_s = self.step_seconds[made][needed] if self.step_seconds else 0.0
        assert each_s is not None and once_s is not None, "a forbidden pair is not converted"
        return each_s, once_s


@dataclass(frozen=True)
class Cover:
    """Something that at least one slot must use (a mesh axis, say): `takes[s]` are the choices of
    slot s that do."""

    name: str
    takes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Shared:
    """Bytes that are there once, for whoever takes them: `takes[s]` are the choices of slot s that
    do (a slot that isn't in it has none). `share`: what it costs a stage; without stages its
    resident bytes count."""

    name: str
    takes: Mapping[int, frozenset[int]]
    share: Share

    def taken(self, slot: int, choice: int) -> bool:
        """Whether a slot's choice does."""
        return choice in self.takes.get(slot, ())


@dataclass(frozen=True)
class PlanningProblem:
    """Choose one choice per slot: least seconds, memory within the limit, every cover used.

    seconds = base + Σ chosen slots' + Σ conversions';
    memory = base + Σ chosen slots' resident + Σ conversions' resident + Σ taken shared
             + max over groups of Σ chosen transient of the group's slots, or, if that is more, of
               Σ chosen transient and again of these less Σ chosen freed of all slots.

    With `stages` both are those of `Stages`, from the shares of choices and of `base`; the memory
    of the fullest stage counts.
    """

    slots: tuple[Slot, ...]
    edges: tuple[Edge, ...]
    limit_bytes: int
    base_seconds: float = 0.0
    base_bytes: int = 0
    covers: tuple[Cover, ...] = ()
    stages: Stages | None = None
    base_shares: tuple[Share, ...] = ()
    shared: tuple[Shared, ...] = ()


@dataclass(frozen=True)
class Solution:
    """The chosen index per slot, its cost recomputed from the choice alone, and a proven bound."""

    choices: tuple[int, ...]
    seconds: float
    memory_bytes: int
    bound_seconds: float


@dataclass(frozen=True)
class Infeasible:
    """Nothing fits: the least memory that any choice needs, over the limit by `short_bytes` (or
    `at_least` so many; 0: what fits is slower than asked for). `impossible`: no choice satisfies
    the edges at any memory."""

    short_bytes: int
    impossible: bool = False
    at_least: bool = False

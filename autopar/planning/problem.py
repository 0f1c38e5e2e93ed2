"""The planning problem as numbers: what price hands to solve. It knows no model and no strategy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """One candidate of one slot, priced: seconds of one step (all its microbatches), bytes that one
    rank holds throughout, and bytes that it needs for a moment (only the largest counts)."""

    seconds: float
    resident_bytes: int
    transient_bytes: int


@dataclass(frozen=True)
class Slot:
    """One region of one layer: exactly one of its choices is taken.

    `group` (the layer): the transient bytes of one group's slots are needed together."""

    name: str
    choices: tuple[Choice, ...]
    group: str = ""


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
    """

    name: str
    source: Use
    uses: tuple[Use, ...]
    seconds: tuple[tuple[float | None, ...], ...]
    resident_bytes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Cover:
    """Something that at least one slot must use (a mesh axis, say): `takes[s]` are the choices of
    slot s that do."""

    name: str
    takes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PlanningProblem:
    """Choose one choice per slot: least seconds, memory within the limit, every cover used.

    seconds = base + Σ chosen slots' + Σ conversions';
    memory = base + Σ chosen slots' resident + Σ conversions' resident
             + max over groups of Σ chosen transient of the group's slots.
    """

    slots: tuple[Slot, ...]
    edges: tuple[Edge, ...]
    limit_bytes: int
    base_seconds: float = 0.0
    base_bytes: int = 0
    covers: tuple[Cover, ...] = ()


@dataclass(frozen=True)
class Solution:
    """The chosen index per slot, its cost recomputed from the choice alone, and a proven bound."""

    choices: tuple[int, ...]
    seconds: float
    memory_bytes: int
    bound_seconds: float


@dataclass(frozen=True)
class Infeasible:
    """Nothing fits: the least memory that any choice needs, over the limit by `short_bytes`.
    `impossible`: no choice satisfies the edges at any memory."""

    short_bytes: int
    impossible: bool = False

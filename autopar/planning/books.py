"""What one stage's effects come to: seconds, bytes, and collectives by kind."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.planning.joined import whole_calls
from autopar.planning.prices import Prices
from autopar.plugin import Collective, Compute, Effect, Resident

ORDER = ("parameter", "gradient", "optimizer", "saved", "transient", "overhead")
Key = tuple[str, tuple[str, ...], str, str]
"""Of a collective: op, axes, phase, algorithm."""


@dataclass(frozen=True)
class Stage:
    """`in_flight`: how many microbatches each chunk may hold at the same time. `chunks`: the chunk
    of every layer, and of what the skeleton has in each (`skeleton_name`)."""

    in_flight: tuple[tuple[int, ...], ...]
    chunks: Mapping[str, int]


def skeleton_name(chunk: int) -> str:
    """What a chunk's part of the skeleton is called among layers' paths."""
    return "" if chunk == 0 else f"({chunk})"


@dataclass
class Books:
    """Seconds of a step by kind, of which `once_s` are paid once a step; bytes by kind; bytes,
    calls and seconds of collectives."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    once_s: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    groups: dict[Key, tuple[int, int, float]] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """The stage's own time of a step, without waiting."""
        return sum(self.seconds.values())

    @property
    def microbatch_s(self) -> float:
        """What all microbatches take together."""
        return self.step_s - self.once_s


def books_of(
    effects: Iterable[tuple[str, Effect]], stage: Stage, prices: Prices, microbatches: int
) -> Books:
    """The books of one stage."""
    books = Books()
    resident: list[tuple[str, Resident, int]] = []
    known: dict[Effect, float] = {}  # layers that run alike have equal effects
    for path, effect, calls in whole_calls(effects):
        one = one_call(effect, calls) if isinstance(effect, Collective) else effect
        if one not in known:
            known[one] = prices.cost(one)
        price = calls * known[one]
        if isinstance(effect, Collective):
            times = microbatches if effect.per == "microbatch" else 1
            books.seconds["communication"] += price * times
            books.once_s += price if effect.per == "step" else 0.0
            axes = tuple(part.axis for part in effect.axes)
            key = (effect.op, axes, effect.phase, prices.explain(one))
            size, count, spent_s = books.groups.get(key, (0, 0, 0.0))
            size, count = size + effect.bytes * times, count + calls * times
            books.groups[key] = size, count, spent_s + price * times
        elif isinstance(effect, Compute):
            late = effect.phase == "optimizer"
            books.seconds["optimizer" if late else "compute"] += price * (
                1 if late else microbatches
            )
            books.once_s += price if late else 0.0
        elif isinstance(effect, Resident):
            resident.append((path, effect, math.ceil(price)))
    books.memory = _memory(resident, stage, prices.overhead_bytes())
    return books


def _memory(
    resident: Iterable[tuple[str, Resident, int]], stage: Stage, overhead_bytes: int
) -> dict[str, int]:
    memory: Counter[str] = Counter(overhead=overhead_bytes)
    transients: Counter[str] = Counter()
    saved: Counter[int] = Counter()
    for path, effect, size in resident:
        if effect.what == "saved":
            saved[stage.chunks[path]] += size
        elif effect.what == "transient":
            transients[path] += size
        else:
            memory[effect.what] += size
    # What the skeleton needs for a moment stays for the whole step.
    skeleton = sum(transients.pop(skeleton_name(c), 0) for c in set(stage.chunks.values()))
    memory["transient"] = skeleton + max(transients.values(), default=0)
    memory["saved"] = max(
        sum(held * saved[chunk] for chunk, held in enumerate(counts)) for counts in stage.in_flight
    )
    return {kind: int(memory[kind]) for kind in ORDER if memory.get(kind)}


def one_call(total: Collective, calls: int) -> Collective:
    """One of the equal calls that a joined collective is sent in."""
    return replace(total, bytes=math.ceil(total.bytes / calls))

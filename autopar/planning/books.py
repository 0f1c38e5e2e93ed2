"""What one stage's effects come to: seconds, bytes, and collectives by kind.

Seconds are gathered in windows: what a microbatch's forward does, its backward, and the optimizer.
In each the host runs ahead, and collectives that hide run beside compute (`Alongside`). What hides
once a step does so beside the first forward or the last backward.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.planning.joined import whole_calls
from autopar.planning.prices import Prices
from autopar.planning.weights import AT_THE_END, Row, entry, window_of
from autopar.plugin import Alongside, Collective, Compute, Effect, Resident

ORDER = (
    *("parameter", "gradient", "optimizer", "master", "saved", "transient"),
    *("fragmentation", "overhead"),
)
Key = tuple[str, tuple[str, ...], str, str]
"""Of a collective: op, axes, phase, algorithm."""


@dataclass(frozen=True)
class Stage:
    """`in_flight`: how many microbatches each chunk may hold at the same time. `chunks`: the chunk
    of every layer, and of what the skeleton has in each (`skeleton_name`). `frees`: whether a
    backward frees at once what it has used (not where it comes in two halves)."""

    in_flight: tuple[tuple[int, ...], ...]
    chunks: Mapping[str, int]
    frees: bool = True


def skeleton_name(chunk: int) -> str:
    """What a chunk's part of the skeleton is called among layers' paths."""
    return "" if chunk == 0 else f"({chunk})"


@dataclass
class Window:
    """Seconds of one microbatch's phase, or of the optimizer: ops on the device, their host;
    collectives that are waited for, and the host's of all; collectives that hide, and those of them
    that come once a step."""

    compute_s: float = 0.0
    compute_host_s: float = 0.0
    waited_s: float = 0.0
    collective_host_s: float = 0.0
    hidden_s: float = 0.0
    hidden_once_s: float = 0.0

    def computing(self) -> Alongside:
        """Its ops alone."""
        return Alongside(self.compute_s, self.compute_host_s, 0.0)

    def all(self, once: bool = False) -> Alongside:
        """Everything; `once`: with what comes once a step."""
        host_s = self.compute_host_s + self.collective_host_s
        hidden_s = self.hidden_s + (self.hidden_once_s if once else 0.0)
        return Alongside(self.compute_s + self.waited_s, host_s, hidden_s)

    def row(self, once: bool = False) -> Row:
        """Seconds of device, host and network, with what comes `once` a step."""
        one = self.all(once)
        return one.device_s, one.host_s, one.network_s


@dataclass
class Books:
    """Seconds of a step by kind, of which `once_s` are paid once a step; bytes by kind; bytes,
    calls and seconds of collectives; what the seconds were made of."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    once_s: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    groups: dict[Key, tuple[int, int, float]] = field(default_factory=dict)
    plain: dict[str, Row] = field(default_factory=dict)
    """Seconds of device, host and network in a microbatch's windows without what comes once."""
    ends: dict[str, Row] = field(default_factory=dict)
    """The same with what comes once, and of the optimizer."""
    waited_once_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The stage's own time of a step, without waiting."""
        return sum(self.seconds.values())

    @property
    def memory_bytes(self) -> int:
        """All that a rank holds."""
        return sum(self.memory.values())

    @property
    def microbatch_s(self) -> float:
        """What all microbatches take together."""
        return self.step_s - self.once_s


Tally = Mapping[tuple[Effect, int], int]
"""How often each effect occurs in one stage; of a joined collective, in how many equal calls."""


def books_of(
    effects: Iterable[tuple[str, Effect]], stage: Stage, prices: Prices, microbatches: int
) -> Books:
    """The books of one stage."""
    found = list(whole_calls(effects))
    books = timed(tally(found), prices, microbatches)
    held = [(path, effect) for path, effect, _ in found if isinstance(effect, Resident)]
    books.memory = memory_of(held, stage, prices)
    return books


def tally(found: Iterable[tuple[str, Effect, int]]) -> Tally:
    """Of what takes time: layers that run alike have equal effects."""
    bare: dict[int, tuple[Effect, Effect]] = {}
    counts: Counter[tuple[Effect, int]] = Counter()
    for _, effect, calls in found:
        if isinstance(effect, Resident):
            continue
        if id(effect) not in bare:
            one = replace(effect, what="") if isinstance(effect, Collective) else effect
            bare[id(effect)] = effect, one
        counts[bare[id(effect)][1], calls] += 1
    return counts


def timed(effects: Tally, prices: Prices, microbatches: int) -> Books:
    """The books of one stage without its memory."""
    books = Books()
    windows: dict[str, Window] = defaultdict(Window)
    waited_once_s = 0.0
    for (effect, calls), count in effects.items():
        one = one_call(effect, calls) if isinstance(effect, Collective) else effect
        price, host_s = (calls * count * seconds for seconds in prices.apart(one))
        if isinstance(effect, Collective):
            times = 1 if effect.per == "step" else microbatches
            waited_once_s += enter(windows, effect, price, host_s, prices)
            sent = replace(effect, bytes=effect.bytes * count)
            _list(books, sent, calls * count, price, times, prices.explain(one))
        elif isinstance(effect, Compute):
            windows[effect.phase].compute_s += price
            windows[effect.phase].compute_host_s += host_s
    _close(books, windows, waited_once_s, prices, microbatches)
    return books


def enter(
    windows: dict[str, Window], effect: Collective, price: float, host_s: float, prices: Prices
) -> float:
    """A collective into the window that it belongs to; seconds of one that belongs to none, being
    waited for once a step."""
    work = entry(effect, prices.hides(effect), price, host_s)
    if work is None:
        return price
    window = windows[window_of(effect)]
    if effect.per == "step":
        window.hidden_once_s += work[2]
        return 0.0
    window.waited_s += work[0]
    window.collective_host_s += work[1]
    window.hidden_s += work[2]
    return 0.0


def _list(books: Books, effect: Collective, calls: int, price: float, times: int, how: str) -> None:
    key = (effect.op, tuple(part.axis for part in effect.axes), effect.phase, how)
    size, count, spent_s = books.groups.get(key, (0, 0, 0.0))
    size, count = size + effect.bytes * times, count + calls * times
    books.groups[key] = size, count, spent_s + price * times


def _close(
    books: Books,
    windows: Mapping[str, Window],
    waited_once_s: float,
    prices: Prices,
    microbatches: int,
) -> None:
    """The windows as seconds by kind. Communication is what it adds to compute."""
    for phase, window in windows.items():
        computing, all_s = prices.cost(window.computing()), prices.cost(window.all())
        more_s = prices.cost(window.all(once=True)) - all_s
        closing = phase == "optimizer"
        times = 1 if closing else microbatches
        books.seconds["optimizer" if closing else "compute"] += computing * times
        books.seconds["communication"] += (all_s - computing) * times + more_s
        books.once_s += all_s + more_s if closing else more_s
        if not closing:
            books.plain[phase] = window.row()
        books.ends[AT_THE_END.get(phase, phase)] = window.row(once=True)
    books.seconds["communication"] += waited_once_s
    books.once_s += waited_once_s
    books.waited_once_s = waited_once_s


def memory_of(held: Iterable[tuple[str, Resident]], stage: Stage, prices: Prices) -> dict[str, int]:
    """Bytes by kind: those that effects declare, and what their prices add to them."""
    declared = list(held)
    priced = [(path, replace(one, bytes=math.ceil(prices.cost(one)))) for path, one in declared]
    memory, total = Counter(_held(declared, stage)), sum(_held(priced, stage).values())
    memory["fragmentation"] = total - memory.total()
    memory["overhead"] = prices.overhead_bytes()
    return {kind: memory[kind] for kind in ORDER if memory.get(kind)}


def _held(residents: Iterable[tuple[str, Resident]], stage: Stage) -> Mapping[str, int]:
    memory: Counter[str] = Counter()
    transients: Counter[str] = Counter()
    again: Counter[str] = Counter()
    saved: dict[int, Counter[str]] = defaultdict(Counter)
    ends: Counter[tuple[str, int]] = Counter()
    for path, one in residents:
        if one.when == "end":
            ends[one.what, stage.chunks[path]] += one.bytes
        elif one.what == "saved":
            saved[stage.chunks[path]][path] += one.bytes
        elif one.what == "transient":
            (transients if one.when == "any" else again)[path] += one.bytes
        else:
            memory[one.what] += one.bytes
    # What the skeleton needs for a moment stays for the whole step, but for what ends it.
    skeleton = sum(transients.pop(skeleton_name(c), 0) for c in set(stage.chunks.values()))
    closing = sum(size for (what, _), size in ends.items() if what == "transient")
    moments = [closing + max(transients.values(), default=0)]
    for path, size in again.items():
        chunk = stage.chunks[path]
        gone = _after(path, saved[chunk]) + ends["saved", chunk] if stage.frees else 0
        moments.append(transients[path] + size - gone)
    memory["transient"] = skeleton + max(moments)
    memory["saved"] = max(
        sum(
            held * (saved[chunk].total() + ends["saved", chunk])
            for chunk, held in enumerate(counts)
        )
        for counts in stage.in_flight
    )
    return memory


def _after(path: str, saved: Mapping[str, int]) -> int:
    """What the layers after one keep, in the order of their calls: a backward that has come to it
    has freed that of its own microbatch."""
    paths = list(saved)
    later = paths[paths.index(path) + 1 :] if path in saved else []
    return sum(saved[one] for one in later)


def one_call(total: Collective, calls: int) -> Collective:
    """One of the equal calls that a joined collective is sent in."""
    return replace(total, bytes=math.ceil(total.bytes / calls))

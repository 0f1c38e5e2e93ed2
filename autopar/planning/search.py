"""The outer search: every mesh and microbatch count, cheapest bound first, an ILP for each."""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autopar.layouts.layout import Setting
from autopar.planning.deadline import NEVER, Deadline, after
from autopar.planning.no_plan import nothing_fits, nothing_legal
from autopar.planning.outer import Dropped
from autopar.planning.prices import Prices
from autopar.planning.problem import Infeasible
from autopar.planning.settle import settle, settle_whole
from autopar.planning.space import ROUNDING, Space
from autopar.planning.tried import Answer, SearchOptions, Tried, relax, sharper
from autopar.planning.unopened import OUTLINE, Unopened
from autopar.planning.watch import Progress, Watch, unwatched
from autopar.planning.weights import Weights


@dataclass(frozen=True)
class Seen:
    """A setting that the search is done with: no program of it is faster than `bound_s` (inf: there
    is none), the best that was found takes `step_s` (inf: none); with no answer, why (None: it
    can't be faster than the plan), which of some cuts alone says nothing of others."""

    asked: Setting
    bound_s: float
    step_s: float = math.inf
    result: Infeasible | None = None

    @property
    def solved(self) -> bool:
        """Whether a solver looked at it."""
        return self.result is not None or math.isfinite(self.step_s)


@dataclass(frozen=True)
class Found:
    """The best program with its prices, and everything that was tried or dropped. `winner`: the
    setting as it was asked for."""

    answer: Answer
    winner: Setting
    prices: Prices
    bound_s: float
    tried: tuple[Seen, ...]
    dropped: tuple[Dropped, ...]
    inseparable: str | None = field(default=None)


def search(space: Space, watch: Watch = unwatched) -> Found:
    """The fastest program of a space that fits. `watch` is told how far the search is.

    Errors: AutoparError where no mesh is legal (with each reason), InfeasibleError where nothing
    fits into memory (short by how much).
    """
    limit_s = space.options.time_limit_s
    state = _State(space, after(limit_s))
    half = after(None if limit_s is None else limit_s / 2)
    for one in space.settings():
        state.add(one)
    while state.queue:
        if state.best is None and half.is_over:
            state.hurry(watch)
        elif not state.deadline.is_over:
            state.look_at_next(watch)
        else:
            state.give_up()
    if not state.tried:
        raise nothing_legal(space.cluster, space.pins, state.dropped)
    best = state.best
    if best is None:
        raise nothing_fits(state.unfit, space.options)
    assert best.answer is not None
    return Found(
        best.answer,
        best.outer.asked,
        best.layered.pricer.prices,
        min(seen.bound_s for seen in state.tried),
        tuple(state.tried),
        tuple(state.dropped),
        space.inseparable,
    )


Entry = tuple[float, int, int, Unopened | Tried]
"""A bound, a size and a place in the queue, which order what has them."""


@dataclass
class _State:
    """A search under way, best first: the settings with the lowest bound are opened, relaxed if
    they are open, solved if they are relaxed, until no bound is lower than the best step by more
    than the gap. `unfit`: what doesn't fit, while nothing does."""

    space: Space
    deadline: Deadline = NEVER
    queue: list[Entry] = field(default_factory=list)
    places: Iterator[int] = field(default_factory=itertools.count)
    best: Tried | None = None
    guess: Weights | None = None
    tried: list[Seen] = field(default_factory=list)
    unfit: list[Tried] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    waiting: int = 0
    solved: int = 0
    """Of those that were tried."""

    @property
    def options(self) -> SearchOptions:
        """The search's."""
        return self.space.options

    @property
    def best_s(self) -> float:
        """The best step so far."""
        return math.inf if self.best is None else self.best.step_s

    @property
    def worth_s(self) -> float:
        """What isn't below this needs no look."""
        return self.best_s * (1 - self.options.gap)

    def add(self, one: Unopened | Tried | Dropped) -> None:
        """Into the queue, or aside."""
        if isinstance(one, Dropped):
            self.dropped.append(one)
            return
        bound_s = one.bound_s if isinstance(one, Tried) else self.space.bound_s(one)
        self.waiting += 1 if isinstance(one, Tried) else len(one.scheduled)
        size = 0 if isinstance(one, Tried) else self.space.size_of(one)
        heapq.heappush(self.queue, (bound_s, size, next(self.places), one))

    def look_at_next(self, watch: Watch) -> None:
        """What has the lowest bound."""
        self._look_at(heapq.heappop(self.queue), watch)

    def _look_at(self, entry: Entry, watch: Watch) -> None:
        bound_s, _, _, one = entry
        self._tell(watch, bound_s)
        self.waiting -= 1 if isinstance(one, Tried) else len(one.scheduled)
        if isinstance(one, Unopened):
            now_s = self.space.bound_s(one)
        else:
            now_s = one.bound_s if one.is_relaxed else self.space.sharpened_s(one)
        if now_s == math.inf and self.best is None and isinstance(one, Unopened):
            # Nothing is left that may fit: each says by how much it doesn't.
            self._look_closer(replace(one, bound_s=0.0, knows=OUTLINE))
        elif now_s >= self.worth_s:
            self._done(one, now_s)
        elif now_s > bound_s * (1 + ROUNDING):
            self.add(one if isinstance(one, Unopened) else replace(one, bound_s=now_s))
        else:
            self._look_closer(one)

    def _look_closer(self, one: Unopened | Tried) -> None:
        """The next step on its way."""
        if isinstance(one, Unopened):
            for more in self.space.open(one) if one.knows == OUTLINE else self.space.outline(one):
                self.add(more)
        elif not one.is_relaxed:
            self._relax(one)
        else:
            self._settle(one)

    def hurry(self, watch: Watch) -> None:
        """There is no answer yet, and the time for one has come: what is furthest on its way to one
        goes on."""
        first = min(self.queue, key=lambda entry: (-self._way(entry[3]), *entry[:3]))
        self.queue.remove(first)
        heapq.heapify(self.queue)
        self._look_at(first, watch)

    def _way(self, one: Unopened | Tried) -> int:
        """How many steps to an answer are done."""
        if isinstance(one, Tried):
            return OUTLINE + (4 if one.is_relaxed else 3)
        asked, outlines = one.asked, self.space.outlines
        return one.knows + outlines.is_begun(asked) + outlines.is_priced(asked)

    def give_up(self) -> None:
        """The time is over: what is left keeps its bound."""
        for bound_s, _, _, one in sorted(self.queue, key=lambda entry: entry[:3]):
            self._done(one, bound_s)
        self.queue.clear()

    def _relax(self, one: Tried) -> None:
        more = relax(one if one.seen or self.guess is None else one.by(self.guess), self.options)
        if isinstance(more, Dropped):
            self.dropped.append(more)
        elif more.result is not None:
            self._done(more, more.bound_s)
        else:
            self.space.confirm(more)
            self.add(more)

    def _settle(self, one: Tried) -> None:
        deadline, limit_s = self.deadline, self.options.time_limit_s
        if self.best is None and limit_s is not None:
            deadline = deadline.at_least(limit_s / 2)  # there must be a plan
        done = settle(one, self.options, self.best_s, deadline)
        if done.step_s < self.best_s:
            self.best = done
        again = sharper(done, self.options) if done.bound_s < self.worth_s else None
        if again is None and done.bound_s < self.worth_s and not done.is_whole:
            done = settle_whole(done, self.options, self.best_s, deadline)
            if done.step_s < self.best_s:
                self.best = done
        if again is not None:
            self.guess = again.weights
            self.add(again)
        elif done.is_guessed and not one.is_guessed:
            self.add(done)
        else:
            self._done(done, done.bound_s)

    def _done(self, one: Unopened | Tried, bound_s: float) -> None:
        if isinstance(one, Unopened):
            self.tried.extend(Seen(setting, bound_s) for setting in one.scheduled)
            return
        self.tried.append(Seen(one.outer.asked, bound_s, one.step_s, one.result))
        self.solved += self.tried[-1].solved
        self.unfit = [*self.unfit, one] if self.best is None else []

    def _tell(self, watch: Watch, bound_s: float) -> None:
        solved, done = self.solved, len(self.tried)
        every = done + self.waiting + len(self.dropped)
        best_s = self.best_s if self.best else None
        watch(Progress(every, len(self.dropped), done - solved, solved, best_s, bound_s))

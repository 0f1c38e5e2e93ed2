"""Where a plan's predicted seconds go, finer than its summary: by kind of op, what runs again, and
communication by axes.

Works of a step run beside each other, so that what each takes doesn't add up to the step. Here a
part is what the step gets shorter by when the part is taken away, one part after the other: all
parts together are the step.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from plan_cases import Asked

from autopar.layouts.program import Program
from autopar.layouts.state_ratio import StateRatio
from autopar.plan import Plan
from autopar.planning.account import step_seconds
from autopar.planning.books import Books, Tally, tally, timed
from autopar.planning.joined import whole_calls
from autopar.planning.prices import Prices
from autopar.planning.program_effects import stage_effects
from autopar.planning.realise import realise
from autopar.plugin import Collective, Compute, Effect

PRODUCTS, OTHERS, AGAIN = "products and attention", "other ops", "ops run again"
OPTIMIZER, WAITING = "optimizer", "waiting for stages"
EXPOSED = "exposed over "
"""Followed by axes: communication that shows."""

Parts = Mapping[str, float]


def parts_of(asked: Asked, plan: Plan) -> Parts:
    """The parts of a plan of a case."""
    request = asked.request({}, False, None)
    program = realise(asked.graph, plan, request.strategies)
    prices = Prices(request.cost_models, program.setting.mesh, asked.cluster)
    return step_parts(program, prices, asked.state)


def step_parts(program: Program, prices: Prices, state_ratio: StateRatio) -> Parts:
    """Seconds of the slowest stage's step by part, and what it waits for others; their sum is the
    predicted step."""
    times = program.setting.microbatches
    known: dict[frozenset[tuple[tuple[Effect, int], int]], Books] = {}
    books: list[Books] = []
    works: list[Tally] = []
    for effects in stage_effects(program, state_ratio):
        work = tally(whole_calls(effects))
        key = frozenset(work.items())
        if key not in known:  # most stages do the same
            known[key] = timed(work, prices, times)
        books.append(known[key])
        works.append(work)
    slowest = max(range(len(books)), key=lambda stage: books[stage].step_s)
    waiting_s = step_seconds(books, program.setting) - books[slowest].step_s
    parts = dict(_taken_away(works[slowest], prices, times))
    return parts if program.setting.schedule is None else {**parts, WAITING: waiting_s}


def _taken_away(work: Tally, prices: Prices, times: int) -> Iterator[tuple[str, float]]:
    """Communication first, the axes with the longest calls before others; then what runs again,
    small ops, products; the optimizer is left."""
    called: dict[str, float] = defaultdict(float)
    for (effect, calls), count in work.items():
        if isinstance(effect, Collective):
            called[_part(effect)] += prices.cost(effect) * calls * count
    axes = sorted(called, key=lambda name: -called[name])
    order = (*axes, AGAIN, OTHERS, PRODUCTS)
    step_s = timed(work, prices, times).step_s
    for name in order:
        work = {key: count for key, count in work.items() if _part(key[0]) != name}
        left_s = timed(work, prices, times).step_s
        yield name, step_s - left_s
        step_s = left_s
    yield OPTIMIZER, step_s


def _part(effect: Effect) -> str:
    if isinstance(effect, Collective):
        axes = dict.fromkeys(part.axis.partition("_")[0] for part in effect.axes)
        return EXPOSED + " · ".join(axes)
    assert isinstance(effect, Compute)
    if effect.phase == "optimizer":
        return OPTIMIZER
    if effect.again:
        return AGAIN
    return PRODUCTS if effect.op in ("matmul", "attention") else OTHERS

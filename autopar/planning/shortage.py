"""Nothing fits: which setting's smallest program is too large by the fewest bytes."""

import heapq
import math
from collections.abc import Sequence

from autopar.errors import OutOfTimeError
from autopar.layouts.stages import Cut
from autopar.planning.account import books_by_stage
from autopar.planning.anywhere import Anywhere
from autopar.planning.cuts import cuts
from autopar.planning.deadline import after
from autopar.planning.ilp import BOUNDLESS, over_bytes, smallest
from autopar.planning.problem import Infeasible
from autopar.planning.stage_price import StagePricer
from autopar.planning.tried import SearchOptions, Tried

ROUGH, CLOSE = range(2)
"""What is known of a setting's shortage: a bound at once; one by multipliers."""


def smallest_short(
    tried: Sequence[Tried], options: SearchOptions
) -> tuple[int, Tried] | OutOfTimeError | None:
    """By how many bytes the smallest program of all settings is too large, and its setting; None
    where no setting has any. Those that may lack least are looked at first, each bounded more
    closely before a solver is asked."""
    queue = [
        (t.result.short_bytes, ROUGH, i)
        for i, t in enumerate(tried)
        if isinstance(t.result, Infeasible) and not t.result.impossible
    ]
    heapq.heapify(queue)
    best: tuple[int, Tried] | None = None
    ran_out: OutOfTimeError | None = None
    deadline = after(options.time_limit_s)
    while queue:
        at_least, known, i = heapq.heappop(queue)
        if best is not None and (deadline.is_over or at_least >= best[0]):
            break
        if known == ROUGH:
            heapq.heappush(queue, (max(at_least, _over_bytes(tried[i], options)), CLOSE, i))
            continue
        try:
            short_bytes = _shortage(tried[i], options)
        except OutOfTimeError as error:
            ran_out = ran_out or error
            continue
        if short_bytes is not None and (best is None or short_bytes < best[0]):
            best = short_bytes, tried[i]
    return best or ran_out


def _over_bytes(tried: Tried, options: SearchOptions) -> int:
    """No program of a setting lacks less."""
    if tried.problem is not None:
        return math.ceil(over_bytes(tried.problem, options.solver))
    assert tried.anywhere is not None
    return math.ceil(tried.anywhere.over_bytes(options.solver))


def _shortage(tried: Tried, options: SearchOptions) -> int | None:
    """By how many bytes the smallest program of a setting is too large, as the search counts and
    its account; None where it has none."""
    places: list[Cut | None] = [None]
    if tried.problem is None:
        places = [*cuts(Anywhere(tried.layered, BOUNDLESS))]
    found = [_short_bytes(tried, cut, options) for cut in places]
    return min((short_bytes for short_bytes in found if short_bytes is not None), default=None)


def _short_bytes(tried: Tried, cut: Cut | None, options: SearchOptions) -> int | None:
    problem = tried.problem
    if cut is not None:
        problem = StagePricer((tried.layered,), cut).problem(options.limit_bytes)
    assert problem is not None
    least = smallest(problem, options.solver, options.time_limit_s)
    if isinstance(least, Infeasible):
        return None
    program = tried.layered.program(least.choices, cut)
    books = books_by_stage(program, tried.layered.pricer.prices, options.state_ratio)
    needed = max(one.memory_bytes for one in books)
    return max(needed, least.memory_bytes) - options.limit_bytes

"""A relaxed setting solved: the best program of some cuts of its layers, and what is proven."""

import math
from dataclasses import replace

import numpy as np

from autopar.errors import OutOfTimeError
from autopar.layouts.stages import Cut, make_cut
from autopar.planning.account import books_by_stage, spent_in_step, step_seconds
from autopar.planning.anywhere import Anywhere
from autopar.planning.cuts import cuts, every_cut, roomier
from autopar.planning.deadline import NEVER, Deadline
from autopar.planning.ilp import solve
from autopar.planning.kinds import Kind
from autopar.planning.layered import Layered
from autopar.planning.problem import Infeasible, PlanningProblem, Solution
from autopar.planning.relaxed import Relaxed
from autopar.planning.stage_price import StagePricer
from autopar.planning.tried import Answer, SearchOptions, Tried
from autopar.planning.whole_bound import Whole, whole_bound


def settle(
    tried: Tried, options: SearchOptions, best_s: float, deadline: Deadline = NEVER
) -> Tried:
    """The setting with its answer by its weights, if one is faster than `best_s`, and a bound that
    holds for every program of it. Cuts that there is no time for keep the bound that they have."""
    if tried.problem is not None:
        queue: list[tuple[float, Cut | None]] = [(tried.bound_s, None)]
        rest_s = math.inf
    else:
        assert tried.anywhere is not None
        found_cuts, rest_s = _cuts(tried, tried.anywhere)
        queue = [*found_cuts]
    bounds_s, result, spare_bytes, limit = [rest_s], None, 0, options.limit_bytes
    proves = math.isinf(rest_s)
    hurried = options.time_limit_s is not None and tried.layered.is_large
    if proves and hurried and not tried.is_guessed:
        return _guessed(tried, queue[:CUTS], options, best_s, deadline)
    while queue:
        bound_s, cut = queue.pop(0)
        low_s = max(tried.bound_s, bound_s)
        worth_s = min(best_s, tried.step_s) * (1 - options.gap)
        if low_s >= worth_s or (deadline.is_over and len(bounds_s) > 1):
            bounds_s.append(low_s)
            break  # those that follow have no lower bounds
        # The first time the weights are a guess: half the gap is for what they don't see.
        gap = options.gap / 2 if tried.seen else options.gap
        mine = replace(options, gap=gap, time_limit_s=deadline.left_s)
        try:
            tried, found = _with_cut(tried, cut, mine, options, worth_s, proves)
        except OutOfTimeError:
            bounds_s.append(low_s)
            continue
        if isinstance(found, Infeasible):
            fits = not found.impossible and found.short_bytes == 0
            bounds_s.append(max(low_s, worth_s) if fits else math.inf)
            result = found if result is None or fits else result
            if fits and not proves:
                tried = _with_slower(tried, cut, mine, options)
            if not fits and not proves and queue and spare_bytes < MOST_SPARE * limit:
                # The fastest cut doesn't fit: before the smallest, the fastest that has more room.
                spare_bytes = max(found.short_bytes, 2 * spare_bytes, limit // 100)
                queue[:0] = _roomier(tried, spare_bytes)
            continue
        bounds_s.append(max(low_s, found.bound_seconds))
    proven_s = max(tried.bound_s, min(bounds_s))
    result = None if tried.answer else result or tried.result
    return replace(
        tried,
        bound_s=proven_s,
        result=result,
        rounds=tried.rounds + 1,
        every_cut=proves and tried.anywhere is not None and not tried.layered.is_large,
    )


def _with_cut(
    tried: Tried,
    cut: Cut | None,
    own: SearchOptions,
    options: SearchOptions,
    worth_s: float,
    proves: bool,
) -> tuple[Tried, Solution | Infeasible]:
    """The setting with the best program of a cut, and what was found. Errors: OutOfTimeError."""
    layered, found = _of_cut(tried, cut, own, worth_s, proves)
    if isinstance(found, Solution):
        tried = _answered(tried, layered, found, cut, options)
        if tried.result is not None:
            # The search rounds bytes apart from the account: once more with what it lacks less.
            less = replace(own, limit_bytes=own.limit_bytes - tried.result.short_bytes)
            layered, again = _of_cut(tried, cut, less, worth_s, proves)
            if isinstance(again, Solution):
                tried = _answered(tried, layered, again, cut, options)
    return tried, found


def _roomier(tried: Tried, spare_bytes: int) -> list[tuple[float, Cut | None]]:
    assert tried.anywhere is not None
    more = roomier(tried.anywhere, spare_bytes)
    return [(tried.bound_s, more)] if more else []


def _with_slower(
    tried: Tried, cut: Cut | None, own: SearchOptions, options: SearchOptions
) -> Tried:
    """The setting with a program that is slower than asked for, where no faster one was found and
    that proves nothing: weights that are sharp for it may."""
    try:
        layered, found = _of_cut(tried, cut, own, math.inf, proves=False)
    except OutOfTimeError:
        return tried
    return _answered(tried, layered, found, cut, options) if isinstance(found, Solution) else tried


def settle_whole(
    tried: Tried, options: SearchOptions, best_s: float, deadline: Deadline = NEVER
) -> Tried:
    """A setting of which not each cut was looked at, with a bound of whole layers, and the best
    program of the cut that may be the best by it, of what layers do there."""
    tried = replace(tried, is_whole=True)
    anywhere, worth_s = tried.anywhere, min(best_s, tried.step_s) * (1 - options.gap)
    if anywhere is None or tried.every_cut or deadline.is_over:
        return tried
    whole = whole_bound(anywhere, worth_s, deadline)
    if whole is None:
        return tried
    tried = replace(tried, bound_s=max(tried.bound_s, whole.seconds))
    if tried.bound_s >= worth_s or not whole.layers or tried.layered.inside_groups:
        return tried
    cut = make_cut(tried.layered.pricer.model.skeleton, anywhere.counts_of(whole.layers))
    layered = _with_columns(tried.layered, cut, whole)
    problem = StagePricer((layered,), cut).problem(options.limit_bytes)
    for _ in range(PROGRAMS):
        mine = replace(options, gap=options.gap / 2, time_limit_s=deadline.left_s)
        faster_s = min(best_s, tried.step_s) * (1 - options.gap / 10)
        try:
            found = _solved(problem, None, mine, faster_s, proves=True, most_nodes=NODES)
        except OutOfTimeError:
            return tried
        if not isinstance(found, Solution):
            break
        tried = _answered(tried, layered, found, cut, options)
        if tried.bound_s >= tried.step_s * (1 - options.gap):
            break
    return tried


PROGRAMS, NODES = 3, 200
"""So many programs of a whole bound's columns are looked for, each faster than those before, and so
far."""


def _with_columns(layered: Layered, cut: Cut, whole: Whole) -> Layered:
    """Layers of a cut with the columns that they have on their stage in a whole bound's best."""
    order = {id(kind): number for number, kind in enumerate(layered.every)}
    stages, given, made = len(whole.layers), {}, dict[tuple[int, int], Kind]()
    for path, kind in layered.kinds.items():
        key = cut.part_of(path) % stages, order[id(kind)]
        if key not in made:
            made[key] = kind.only(np.array(whole.columns[key[0]][key[1]]))
        given[path] = made[key]
    return replace(layered, given=given)


CUTS = 4
"""So many cuts are looked at for a guess at most."""


def _guessed(
    tried: Tried,
    queue: list[tuple[float, Cut | None]],
    options: SearchOptions,
    best_s: float,
    deadline: Deadline,
) -> Tried:
    """The setting with an answer of a few columns, and nothing proven: what is sharp for it is then
    worth a proof, and what is slower needs none."""
    for bound_s, cut in queue:
        worth_s = min(best_s, tried.step_s) * (1 - options.gap)
        if max(tried.bound_s, bound_s) >= worth_s or deadline.is_over:
            break
        mine = replace(options, time_limit_s=deadline.left_s)
        try:
            layered, found = _of_cut(tried, cut, mine, worth_s, proves=False)
        except OutOfTimeError:
            break
        if isinstance(found, Solution):
            tried = _answered(tried, layered, found, cut, options)
            break
    return replace(tried, is_guessed=True, rounds=tried.rounds + 1)


MOST_SPARE = 0.04
"""Of the memory: no cut is looked for that leaves more of it free."""
WIDTH = 1e-3
"""Of the bound: so far above it choices are looked at first."""


def _of_cut(
    tried: Tried, cut: Cut | None, options: SearchOptions, worth_s: float, proves: bool
) -> tuple[Layered, Solution | Infeasible]:
    """The best program of a cut (None: without stages), and the layers whose columns its choices
    are: first of those that may have a part in a program that is little slower than the bound.
    Where other cuts have no bound of their own, and nothing can be proven (not `proves`), a few
    stand for all. Errors: OutOfTimeError."""
    anywhere = tried.anywhere
    if cut is None or anywhere is None:
        assert tried.problem is not None
        problem = replace(tried.problem, limit_bytes=options.limit_bytes)
        return tried.layered, _solved(problem, tried.low, options, worth_s, proves)
    if proves and tried.by_stage:
        by_stage = StagePricer(tried.layered_by_stage, cut)
        problem = by_stage.problem(options.limit_bytes)
        return by_stage.layered, _solved(problem, None, options, worth_s, proves, lightest=True)
    if proves:
        layered, others_s = anywhere.narrowed(WIDTH * tried.bound_s, options.solver)
    else:
        layered, others_s = anywhere.few(), math.inf
    if layered.is_possible:
        problem = StagePricer((layered,), cut).problem(options.limit_bytes)
        found = _solved(problem, None, options, min(worth_s, others_s), proves)
        if isinstance(found, Solution):
            bound_s = min(found.bound_seconds, others_s)
            return layered, replace(found, bound_seconds=bound_s)
        if math.isfinite(worth_s) and worth_s <= others_s:
            return layered, found
    problem = StagePricer((tried.layered,), cut).problem(options.limit_bytes)
    return tried.layered, _solved(problem, None, options, worth_s, proves)


def _cuts(tried: Tried, anywhere: Anywhere) -> tuple[list[tuple[float, Cut | None]], float]:
    """Cuts with their bounds, lowest first, and the bound of all others."""
    skeleton = tried.layered.pricer.model.skeleton
    every = every_cut(anywhere)
    if every is None:
        return [(tried.bound_s, cut) for cut in cuts(anywhere)], tried.bound_s
    return [(bound_s, make_cut(skeleton, counts)) for bound_s, counts in every], math.inf


def _solved(
    problem: PlanningProblem,
    low: Relaxed | None,
    options: SearchOptions,
    worth_s: float,
    proves: bool,
    lightest: bool = False,
    most_nodes: int | None = None,
) -> Solution | Infeasible:
    return solve(
        problem,
        solver=options.solver,
        gap=options.gap,
        time_limit_s=options.time_limit_s,
        cutoff_s=worth_s if math.isfinite(worth_s) else None,
        low=low,
        proves=proves,
        measure=False,
        lightest=lightest,
        most_nodes=most_nodes,
    )


def _answered(
    tried: Tried, layered: Layered, found: Solution, cut: Cut | None, options: SearchOptions
) -> Tried:
    """With the program of a solution, if the account says that it is faster than what is there, and
    that it fits: the search's count is meant to be above the account's, and must not be trusted."""
    program = layered.program(found.choices, cut)
    books = books_by_stage(program, tried.layered.pricer.prices, options.state_ratio)
    step_s, spent = step_seconds(books, program.setting), spent_in_step(books, program.setting)
    answer = tried.answer
    sharp = answer and step_s == answer.step_s and found.seconds > answer.solution.seconds
    over_bytes = max(one.memory_bytes for one in books) - options.limit_bytes
    if over_bytes <= 0 and (step_s < tried.step_s or sharp):
        answer = Answer(program, found, step_s)
    result = Infeasible(over_bytes, at_least=True) if over_bytes > 0 else None
    return replace(tried, answer=answer, seen=(*tried.seen, spent), result=result)

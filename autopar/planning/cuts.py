"""Where to cut the layers: parts of about equal time that fit into memory, by dynamic programming.

The times are those of each region's fastest choice. The programme then chooses with the cut fixed:
a choice that is slower but smaller may have made another cut better.
"""

import itertools
import math
from collections.abc import Callable, Sequence

from autopar.errors import AutoparError
from autopar.layouts.stages import Cut, make_cut
from autopar.planning.price import Pricer
from autopar.planning.problem import PlanningProblem
from autopar.planning.stage_price import StagePricer
from autopar.planning.staged import Sums, empty

Cost = Callable[[int, int, int], float]
"""Of part p with the layers from i up to j."""


def cuts(pricer: Pricer, limit_bytes: int) -> tuple[Cut, ...]:
    """The cut whose slowest part is fastest among those that may fit, and, if it is another, the
    one whose fullest part is smallest.

    Errors: AutoparError where a weight would lie in two parts of one stage.
    """
    schedule = pricer.setting.schedule
    assert schedule is not None
    table, skeleton = schedule.table, pricer.model.skeleton
    count = len(pricer.model.layers)
    even = [count * (p + 1) // table.parts - count * p // table.parts for p in range(table.parts)]
    trial = make_cut(skeleton, even)
    _check_weights(trial, table.stages, pricer)
    least = _least(StagePricer(pricer, trial), limit_bytes)
    layers = [path for paths in trial.layers for path in paths]
    # A part's cost is that of its layers and of what the skeleton has in it, wherever it is cut.
    times = _prefix([least[path].seconds for path in layers])
    own = [least[f"({part})"] for part in range(table.parts)]
    sizes = [
        _prefix([_bytes(least[path], table.in_flight(part % table.stages)) for path in layers])
        for part in range(table.parts)
    ]

    def seconds(part: int, i: int, j: int) -> float:
        if size(part, i, j) > limit_bytes:
            return math.inf
        return times[j] - times[i] + own[part].seconds

    def size(part: int, i: int, j: int) -> float:
        fixed = _bytes(own[part], table.in_flight(part % table.stages))
        return sizes[part][j] - sizes[part][i] + fixed

    found = [_partition(cost, count, table.parts) for cost in (seconds, size)]
    return tuple(
        make_cut(skeleton, counts) for counts in dict.fromkeys(c for c in found if c is not None)
    )


def _check_weights(cut: Cut, stages: int, pricer: Pricer) -> None:
    block = pricer.model.skeleton
    for placeholder, name in block.params.items():
        parts = cut.parts.get(placeholder, ())
        if len({part % stages for part in parts}) < len(parts):
            raise AutoparError(
                f"{name} is used in parts {', '.join(map(str, parts))} of the model, of which two "
                f"lie on one of {stages} stages: give each stage one piece of the model (1f1b)"
            )


def _least(stages: StagePricer, limit_bytes: int) -> dict[str, Sums]:
    """By layer, and by part for the skeleton ("(0)", "(1)" …), the least that it can cost."""
    problem = stages.problem(limit_bytes)
    out: dict[str, Sums] = {f"({part})": _nothing(problem) for part in range(stages.cut.count)}
    keys = list(stages.pricer.candidates)
    for (path, _), slot in zip(keys, problem.slots, strict=True):
        for k in range(len(slot.choices[0].shares)):
            shares = [choice.shares[k] for choice in slot.choices]
            if path and shares[0].stage != stages.stage_of_layer(path):
                continue  # what a neighbour sends back
            # The skeleton has a share in each part.
            sums = out.setdefault(path or f"({k})", _nothing(problem))
            sums.seconds += min(s.seconds for s in shares)
            sums.resident_bytes += min(s.resident_bytes for s in shares)
            for chunk in range(len(sums.held_bytes)):
                sums.held_bytes[chunk] += min(s.held_bytes[chunk] for s in shares)
    for part in range(stages.cut.count):
        out[f"({part})"].resident_bytes += stages.pricer.prices.overhead_bytes()
    return out


def _nothing(problem: PlanningProblem) -> Sums:
    assert problem.stages is not None
    return empty(problem.stages)[0]


def _bytes(sums: Sums, in_flight: Sequence[Sequence[int]]) -> float:
    """For any chunk: how the bytes lie there isn't known before the cut."""
    held = sum(sums.held_bytes)
    return sums.resident_bytes + held * max(max(counts) for counts in in_flight)


def _prefix(numbers: Sequence[float]) -> list[float]:
    return [0.0, *itertools.accumulate(numbers)]


def _partition(cost: Cost, count: int, parts: int) -> tuple[int, ...] | None:
    """Layers of each part, at least one, so that the largest cost is least; None where all are
    infinite."""
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(math.inf, 0)] * count]
    for part in range(parts):
        row = []
        for j in range(count + 1):
            ways = [(max(best[-1][i][0], cost(part, i, j)), i) for i in range(j)]
            row.append(min(ways, default=(math.inf, 0)))
        best.append(row)
    if not math.isfinite(best[parts][count][0]):
        return None
    counts, end = [], count
    for part in reversed(range(parts)):
        start = best[part + 1][end][1]
        counts.append(end - start)
        end = start
    return tuple(reversed(counts))

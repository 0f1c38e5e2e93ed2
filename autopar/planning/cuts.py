"""Where to cut the layers: into parts of about equal time that fit into memory, by dynamic
programming over what each part takes at least with every run of layers (`anywhere`)."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.errors import AutoparError
from autopar.layouts.stages import Cut, make_cut
from autopar.planning.anywhere import Anywhere, even_counts
from autopar.planning.layered import Layered
from autopar.planning.price import Pricer
from autopar.planning.schedules import spread

Floats = NDArray[np.float64]


def check_weights(pricer: Pricer) -> None:
    """Errors: AutoparError where a weight would lie in two parts of one stage."""
    schedule, block = pricer.setting.schedule, pricer.model.skeleton
    assert schedule is not None
    table = schedule.brief
    cut = make_cut(block, even_counts(len(pricer.model.layers), table.parts))
    for placeholder, name in block.params.items():
        parts = cut.parts.get(placeholder, ())
        if len({part % table.stages for part in parts}) < len(parts):
            raise AutoparError(
                f"{name} is used in parts {', '.join(map(str, parts))} of the model, of which two "
                f"lie on one of {table.stages} stages: give each stage one piece of the model "
                "(1f1b)"
            )


def check_groups(layered: Layered) -> None:
    """Errors: AutoparError where some layers that run again together would lie in two parts."""
    schedule, inside = layered.pricer.setting.schedule, layered.inside_groups
    assert schedule is not None
    table, count = schedule.brief, len(layered.kinds)
    least, most = spread(table, count)
    ends = {0}
    for _ in range(table.parts):
        ends = {
            last
            for first in ends
            for last in range(first + least, min(first + most, count) + 1)
            if last not in inside
        }
    if inside and count not in ends:
        layers = max(n for kind in layered.kinds.values() for n in kind.together)
        raise AutoparError(
            f"{layers} layers that run again together would lie in different parts of "
            f"{schedule.name}: {count} layers can't be cut between such groups into {table.parts} "
            "parts. Take fewer together, fewer stages, or recompute each layer by itself"
        )


FEW = 300
"""So many cuts, each with a bound of its own, are looked at one by one."""


def every_cut(anywhere: Anywhere) -> list[tuple[float, tuple[int, ...]]] | None:
    """How many layers the parts of each cut have, with its bound in seconds, lowest first; None
    where there are too many."""
    spread, count = anywhere.spread, len(anywhere.layered.kinds)
    if anywhere.schedule.brief.chunks > 1:
        return _every_of_chunks(anywhere)
    found = list(itertools.islice(_counts(spread, count), FEW + 1))
    if len(found) > FEW:
        return None
    bounds = [(anywhere.bound_of(counts), counts) for counts in found]
    return sorted(one for one in bounds if one[0] < np.inf)


SMALL, LAYERS = 40, 40
"""Of several parts a stage so many cuts of so many layers are looked at one by one: with more
layers the solver takes minutes to prove what it found, and a bound of whole layers says nearly as
much."""


def _every_of_chunks(anywhere: Anywhere) -> list[tuple[float, tuple[int, ...]]] | None:
    """The same of several parts a stage, where cuts have no bound of their own: what a stage needs
    isn't the sum of what its parts need. First the one that is likely to be best."""
    layered = anywhere.layered
    if layered.inside_groups or layered.is_large or len(layered.kinds) > LAYERS:
        return None
    found = list(itertools.islice(_counts(anywhere.spread, len(layered.kinds)), SMALL + 1))
    if len(found) > SMALL:
        return None
    first = anywhere.balanced()
    return [(0.0, counts) for counts in sorted(found, key=lambda counts: counts != first)]


def _counts(spread: Sequence[tuple[int, int]], count: int) -> Iterator[tuple[int, ...]]:
    """Every way to give so many layers to parts."""
    if not spread:
        if count == 0:
            yield ()
        return
    (least, most), rest = spread[0], spread[1:]
    for own in range(least, min(most, count - sum(low for low, _ in rest)) + 1):
        for others in _counts(rest, count - own):
            yield (own, *others)


def cuts(anywhere: Anywhere) -> tuple[Cut, ...]:
    """The cut whose slowest part is fastest among those that may fit (of several the one with the
    fastest parts together), and, if it is another, the one whose fullest part is smallest. Of
    several parts a stage: the one whose slowest stage is about as fast as it can be."""
    skeleton = anywhere.layered.pricer.model.skeleton
    if anywhere.schedule.brief.chunks > 1 and not anywhere.layered.inside_groups:
        return (make_cut(skeleton, anywhere.balanced()),)
    spans = anywhere.spans
    found = [_evenest(costs) for costs in (spans.seconds, spans.over_bytes)]
    return tuple(make_cut(skeleton, counts) for counts in dict.fromkeys(found) if counts)


def roomier(anywhere: Anywhere, spare_bytes: float) -> Cut | None:
    """The cut whose slowest part is fastest among those whose parts may leave so much memory: where
    one that may fit doesn't, by so much."""
    spans = anywhere.spans
    counts = _evenest(np.where(spans.over_bytes <= -spare_bytes, spans.seconds, np.inf))
    return None if counts is None else make_cut(anywhere.layered.pricer.model.skeleton, counts)


def _evenest(costs: Floats) -> tuple[int, ...] | None:
    """How many layers parts have whose largest cost is the least, and then all together."""
    worst = least_cut(costs, np.maximum)
    if worst is None:
        return None
    total = least_cut(np.where(costs <= worst[0], costs, np.inf), np.add)
    assert total is not None
    return total[1]


def least_cut(costs: Floats, join: np.ufunc) -> tuple[float, tuple[int, ...]] | None:
    """The least that costs of all parts, joined, can come to, and how many layers each part then
    has; None where all cuts are infinite. `costs`: [part, first layer, layer after the last]."""
    count = costs.shape[1] - 1
    best = np.full(count + 1, np.inf)
    best[0] = -np.inf if join is np.maximum else 0.0
    starts = []
    for own in costs:
        ways = join(best[:, None], own)
        starts.append(np.argmin(ways, axis=0))
        best = np.min(ways, axis=0)
    if not np.isfinite(best[count]):
        return None
    counts, end = [], count
    for start in reversed(starts):
        counts.append(end - int(start[end]))
        end = int(start[end])
    return float(best[count]), tuple(reversed(counts))

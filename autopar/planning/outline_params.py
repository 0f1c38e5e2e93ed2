"""What the parameters of each layer come to at least on a mesh: the part that outlines leave out.

A region's parameters lie as one of its candidates says, whatever its ops do; layers are the sums of
their regions. Each of these is on the front of what can be had: seconds a microbatch, seconds a
step and bytes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopar.graph.model_graph import ModelGraph
from autopar.layouts.layout import Setting
from autopar.layouts.state_ratio import StateRatio
from autopar.planning.columns import ALONE, EACH_S, ONCE_S, RESIDENT, TRANSIENT
from autopar.planning.pareto import pareto
from autopar.planning.pins import Pins
from autopar.planning.plain_axes import candidates_of
from autopar.planning.price import Layouts, Pricer
from autopar.planning.rate import rate, stages_in
from autopar.planning.refine_mesh import refined_choices
from autopar.planning.region_effects import param_layouts
from autopar.planning.rooms import FACTORS
from autopar.planning.schedules import spread
from autopar.planning.works import Works
from autopar.plugin import Candidate, Strategy

OF_PARAMS = ("dims", "state")
"""The tiers on which it depends how parameters live."""
MOST = 12
"""Rows of a front; of more, neighbours become one that is no worse than either."""

Front = NDArray[np.float64]
"""One row a way to keep parameters, as `columns.Costs`."""


@dataclass(frozen=True)
class ParamFronts:
    """The fronts of a model's layers by mesh, and whether there are several microbatches."""

    model: ModelGraph
    strategies: Sequence[Strategy]
    pins: Pins
    works: Works
    state_ratio: StateRatio
    known: dict[Setting, Mapping[str, Front]] = field(default_factory=dict)

    def of(self, setting: Setting) -> Mapping[str, Front]:
        """By layer, the front of what its parameters come to under a setting."""
        # More microbatches than two need more bytes to add gradients up, and nothing less.
        one = replace(setting, microbatches=min(setting.microbatches, 2), schedule=None)
        if one not in self.known:
            self.known[one] = self._made(one)
        return self.known[one]

    def floor_s(self, setting: Setting, limit_bytes: int) -> float:
        """Seconds of a step that parameters add at least to what their ops take, in memory that
        they have for themselves, all stages together; inf where they don't fit."""
        fronts = self.of(setting)
        if not fronts:
            return 0.0  # no layers
        each, once = rate(setting)
        stages = stages_in(setting)
        # A stage has room for the layer that needs most for a moment: no less than their mean.
        most = len(fronts)
        if setting.schedule is not None:
            brief = setting.schedule.brief
            most = brief.chunks * spread(brief, len(fronts))[1]
        free = stages * (limit_bytes - self.works.prices.overhead_bytes())
        counts = Counter(map(id, fronts.values()))
        every = [(counts[key], one) for key, one in {id(f): f for f in fronts.values()}.items()]
        seconds = [one[:, EACH_S] * each + one[:, ONCE_S] * once for _, one in every]
        sizes = [one[:, RESIDENT] + one[:, TRANSIENT] / most for _, one in every]
        times = [count for count, _ in every]
        if _least(times, sizes) > free:
            return np.inf
        pace = max(
            float(s.mean() / max(b.mean(), 1.0)) for s, b in zip(seconds, sizes, strict=True)
        )
        return max(
            _least(times, [s + x * b for s, b in zip(seconds, sizes, strict=True)]) - x * free
            for x in (0.0, *(pace * factor for factor in FACTORS))
        )

    def _made(self, setting: Setting) -> Mapping[str, Front]:
        args = (self.model, setting, self.strategies, self.pins, OF_PARAMS)
        choices = {key: one for key, one in candidates_of(*args).items() if key[0]}
        finer, refined = refined_choices(setting, choices)
        prices = self.works.prices.on(finer.mesh)
        pricer = Pricer(self.model, finer, prices, refined, self.state_ratio, self.works)
        fronts: dict[int, Front] = {}
        layers: dict[str, list[tuple[Candidate, ...]]] = {}
        for (path, _), candidates in refined.items():
            layers.setdefault(path, []).append(candidates)
            if id(candidates) not in fronts:
                fronts[id(candidates)] = _front_of(pricer, path, candidates)
        sums: dict[tuple[int, ...], Front] = {}
        for regions in layers.values():
            alike = tuple(map(id, regions))
            if alike not in sums:
                sums[alike] = _summed([fronts[one] for one in alike])
        return {path: sums[tuple(map(id, regions))] for path, regions in layers.items()}


def _front_of(pricer: Pricer, path: str, candidates: Sequence[Candidate]) -> Front:
    """Of one region: one row a candidate, but for those that are no better than another."""
    block, times, rows = pricer.block(path), pricer.setting.microbatches, []
    known: dict[Candidate, Layouts] = {}
    for candidate in candidates:
        only = pricer.works.only(candidate)
        if only not in known:
            known[only] = tuple(param_layouts(block, pricer.typing(block, only)).items())
        bill = pricer.params_bill(block, known[only], candidate.params, True)
        sizes = (bill.lasting_bytes, bill.held_bytes, bill.transient_bytes, bill.brief_bytes)
        rows.append((bill.each_s(times), bill.step_s, *sizes))
    return _best(np.array(rows))


def _least(times: Sequence[int], each: Sequence[Front]) -> float:
    return float(sum(count * one.min() for count, one in zip(times, each, strict=True)))


def _best(rows: Front) -> Front:
    return _fewer(rows[pareto(rows)])


def _summed(fronts: Sequence[Front]) -> Front:
    total = np.zeros((1, ALONE))
    for front in fronts:
        total = _best((total[:, None, :] + front[None, :, :]).reshape(-1, ALONE))
    return total


def _fewer(rows: Front) -> Front:
    """At most `MOST` rows, of which one is no worse than each that was given."""
    if len(rows) <= MOST:
        return rows
    ordered = rows[np.argsort(rows[:, 2], kind="stable")]
    merged = np.array([some.min(axis=0) for some in np.array_split(ordered, MOST)])
    return merged[pareto(merged)]

"""The settings of a search, opened one by one: each has a bound before anything of it is priced.

That bound follows from what is known of the same work elsewhere, since prices are subadditive: a
part of an op costs at least its share of the whole. So what a step's microbatches come to is no
less than the whole batch on one device, shared out among all (before anything is known of a mesh),
nor than with fewer, larger microbatches on the same mesh (once those are priced). A cost model by
which cutting an op makes it cheaper than its share would make the bound wrong, and is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.cluster import ClusterSpec
from autopar.errors import AutoparError
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.layout import Setting
from autopar.mesh import Mesh
from autopar.planning.layered import Layered
from autopar.planning.meshes import axes_in_order, settings
from autopar.planning.outer import (
    Dropped,
    Outer,
    check_layers,
    open_setting,
    pointless,
    with_schedule,
)
from autopar.planning.outline import Outlines
from autopar.planning.outline_params import ParamFronts
from autopar.planning.pins import Pins
from autopar.planning.plain_axes import plain_axes
from autopar.planning.price import Pricer
from autopar.planning.prices import Prices
from autopar.planning.rate import LeastWork, stages_in, step_bound
from autopar.planning.schedules import scheduled
from autopar.planning.separable import why_inseparable
from autopar.planning.stage_price import least_work
from autopar.planning.tried import SearchOptions, Tried, least_of
from autopar.planning.unopened import PARAMS, ROUGHLY, Unopened
from autopar.planning.weights import beside, first_guess
from autopar.planning.works import Works, least_factor
from autopar.plugin import CostModel, Refusal, Schedule, Strategy

ROUNDING = 1e-6
Priced = tuple[Outer, Pricer, LeastWork]
"""A setting's candidates, their prices, and what they take at least."""


@dataclass(frozen=True)
class Space:
    """All settings of a search, and what is known of their work: by mesh, numbers of microbatches
    with the least seconds of a step's microbatches and of what is done once, of all stages."""

    model: ModelGraph
    cluster: ClusterSpec
    strategies: Sequence[Strategy]
    cost_models: Sequence[CostModel]
    pins: Pins
    options: SearchOptions
    inseparable: str | None
    works: Works
    outlines: Outlines
    whole_s: float = 0.0
    known: dict[Mesh, list[tuple[int, LeastWork]]] = field(default_factory=dict)
    priced: dict[tuple[Setting, bool], "Priced | Dropped"] = field(default_factory=dict)
    opened: dict[Mesh, list[tuple[int, float]]] = field(default_factory=dict)
    """Of those that were opened, seconds of a step's microbatches by rough prices."""

    def settings(self) -> Iterator[Unopened | Dropped]:
        """All of them; what can't run at once is dropped."""
        layers = len(self.model.layers)
        sizes = (self.pins.axes, self.pins.microbatches, self.model.batch_size, layers)
        useless: dict[Mesh, bool] = {}
        known: dict[Schedule, Schedule] = {}
        for asked in settings(axes_in_order(self.strategies), self.cluster.devices, *sizes):
            if asked.mesh not in useless:
                args = (self.model, asked, self.strategies, self.pins.axes)
                useless[asked.mesh] = pointless(*args)
            if useless[asked.mesh]:
                continue
            found = list(scheduled(asked, self.strategies, self.pins, layers))
            for one in found:
                if isinstance(one, Refusal):
                    yield Dropped(asked, one.reason)
            offered = tuple(_sharing(one, known) for one in found if isinstance(one, Setting))
            if offered:
                yield Unopened(asked, offered)

    def bound_s(self, unopened: Unopened) -> float:
        """Seconds that no program of these settings beats."""
        least = self._at_least(unopened.scheduled[0])
        bounds_s = (step_bound(setting, least) for setting in unopened.scheduled)
        return max(unopened.bound_s, min(bounds_s))

    def size_of(self, unopened: Unopened) -> int:
        """Into how many pieces its outline cuts what all others do whole: of settings with equal
        bounds the one with the least says most about the rest."""
        return self.outlines.of(unopened.asked).mesh.world

    def outline(self, unopened: Unopened) -> Iterator[Unopened]:
        """The same with a sharper bound, or one for each schedule."""
        if not self.outlines.is_priced(unopened.asked):
            self.outlines.price(unopened.asked)
            yield unopened
            return
        limit_bytes, solver = self.options.limit_bytes, self.options.solver
        if unopened.knows < PARAMS:
            for one in unopened.scheduled:
                bound_s = step_bound(one, (self._each_s(one) / one.microbatches, 0.0))
                bound_s += self.outlines.params.floor_s(one, limit_bytes)
                bound_s = max(bound_s, unopened.bound_s)
                yield replace(unopened, scheduled=(one,), bound_s=bound_s, knows=PARAMS)
            return
        (one,), knows = unopened.scheduled, unopened.knows + 1
        if knows == ROUGHLY:
            bound_s = self.outlines.rough_s(one, limit_bytes)
        else:
            bound_s = self.outlines.bound_s(one, limit_bytes, solver)
        yield replace(unopened, bound_s=max(bound_s, self.bound_s(unopened)), knows=knows)

    def _at_least(self, setting: Setting) -> LeastWork:
        """Seconds of a microbatch and of what is done once, of all stages, as far as is known."""
        each_s, once_s = self._each_s(setting), 0.0
        for fewer, work in self.known.get(setting.mesh, ()):
            if setting.microbatches % fewer == 0:
                each_s, once_s = max(each_s, work[0]), max(once_s, work[1])
        return each_s / setting.microbatches, once_s

    def _each_s(self, setting: Setting) -> float:
        """The same of a step's microbatches, without parameters."""
        known_s = self.outlines.least_s(setting) * setting.microbatches
        return max(self._share_s(setting), known_s)

    def _share_s(self, setting: Setting) -> float:
        """A step's microbatches, of all stages, by the whole batch on one device."""
        return self.whole_s / (setting.mesh.world / stages_in(setting))

    def learn(self, setting: Setting, work: LeastWork) -> None:
        """What a microbatch and a step of a setting take at least, of all stages."""
        step = (work[0] * setting.microbatches, work[1])
        self.known.setdefault(setting.mesh, []).append((setting.microbatches, step))

    def confirm(self, tried: Tried) -> None:
        """Learns what a relaxed setting takes. Errors: as `_check`, by what its outline said, where
        it counts by the same weights."""
        setting, work = tried.outer.asked, least_of(tried.layered)
        least_s = self.outlines.least_s(setting)
        alike = tried.layered.pricer.prices.weights == self.works.prices.weights
        if alike and work[0] < least_s * (1 - ROUNDING):
            raise _not_subadditive(setting, work[0], least_s)
        if tried.layered.pricer.prices.weights.are_even:
            # Else what comes once a step says nothing of smaller microbatches.
            self.learn(setting, work)

    def _check(self, setting: Setting, work: LeastWork) -> None:
        """Errors: AutoparError where the same by the same weights says that prices aren't so."""
        step_s = work[0] * setting.microbatches
        shares = [self._share_s(setting)]
        # Of what isn't cut further, a microbatch is no part: 5 may fill tiles that 2 don't.
        opened = self.opened.get(setting.mesh, ())
        shares += [s for fewer, s in opened if setting.microbatches % fewer == 0]
        if step_s < max(shares) * (1 - ROUNDING):
            raise _not_subadditive(setting, step_s, max(shares))
        self.opened.setdefault(setting.mesh, []).append((setting.microbatches, step_s))

    def open(self, unopened: Unopened) -> Iterator[Tried | Dropped]:
        """The settings with their candidates and rough bounds."""
        least_s = self.bound_s(unopened)
        for setting in unopened.scheduled:
            found = self._priced(setting)
            if isinstance(found, Dropped):
                yield replace(found, setting=setting)
                continue
            outer, pricer, work = found
            outer = with_schedule(outer, setting)
            layered = Layered(pricer.at(outer.setting))
            yield Tried(outer, layered, max(least_s, step_bound(setting, work)))

    def sharpened_s(self, tried: Tried) -> float:
        """The bound of an opened setting by what was learnt since."""
        setting = tried.outer.asked
        return max(tried.bound_s, step_bound(setting, self._at_least(setting)))

    def whole_work_s(self) -> float:
        """Seconds of the whole batch on one device at least; 0 where a single one can't run it."""
        free = Pins({}, None, {}, ())
        outer = open_setting(
            self.model, Setting(Mesh(()), (), 1), self.strategies, free, self.inseparable
        )
        return 0.0 if isinstance(outer, Dropped) else self._pricer(outer)[1][0]

    def _priced(self, setting: Setting) -> Priced | Dropped:
        # What a schedule allows depends on how it makes gradients alone.
        halves = setting.schedule is not None and setting.schedule.splits_backward
        key = (replace(setting, schedule=None), halves)
        if key not in self.priced:
            self.priced[key] = self._open(setting)
        return self.priced[key]

    def _open(self, setting: Setting) -> Priced | Dropped:
        args = (self.model, setting, self.strategies, self.pins, self.inseparable)
        outer = open_setting(*args)
        if isinstance(outer, Dropped):
            return outer
        pricer, work = self._pricer(outer)
        self._check(setting, work)
        self.learn(setting, work)
        return outer, pricer, work

    def _pricer(self, outer: Outer) -> tuple[Pricer, LeastWork]:
        prices = self.works.prices.on(outer.setting.mesh)
        pricer = Pricer(
            *(self.model, outer.setting, prices, outer.candidates),
            *(self.options.state_ratio, self.works),
        )
        return pricer, least_work(pricer)


def _sharing(setting: Setting, known: dict[Schedule, Schedule]) -> Setting:
    """The same with the schedule that equal settings have, whose tables are made once."""
    if setting.schedule is None:
        return setting
    return replace(setting, schedule=known.setdefault(setting.schedule, setting.schedule))


def _not_subadditive(setting: Setting, cost_s: float, least_s: float) -> AutoparError:
    return AutoparError(
        f"the cost models price the ops of {setting.mesh} with {setting.microbatches} microbatches "
        f"at {cost_s:.6g} s, less than their share of the whole batch or of larger microbatches "
        f"({least_s:.6g} s): a part of an op must cost at least its share of the whole"
    )


def space_of(
    model: ModelGraph,
    cluster: ClusterSpec,
    strategies: Sequence[Strategy],
    cost_models: Sequence[CostModel],
    pins: Pins,
    options: SearchOptions,
) -> Space:
    """The space of a search. Errors: AutoparError for a pin of layers that names none."""
    check_layers(model, pins)
    inseparable = why_inseparable(model)
    prices = Prices(cost_models, Mesh(()), cluster, first_guess(beside(cost_models).rows(cluster)))
    works = Works(prices)
    plain = plain_axes(model, strategies, pins, least_factor(cluster.devices))
    params = ParamFronts(model, strategies, pins, works, options.state_ratio)
    outlines = Outlines(model, strategies, pins, works, options.state_ratio, plain, params)
    args = (model, cluster, strategies, cost_models, pins, options, inseparable, works, outlines)
    return replace(Space(*args), whole_s=Space(*args).whole_work_s())

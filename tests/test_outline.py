"""Outlines: settings without data parallelism and parameters, whose bounds hold for all."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from clusters import cluster
from families import llama_405b
from models import Job, classifier, deep_classifier, gpt2, llama
from moe import grouped
from test_space import OPTIONS
from wide_ffn import WideFfn

import autopar
from autopar.capture import capture
from autopar.cluster import ClusterSpec, resolve_cluster
from autopar.graph.analyse import analyse
from autopar.layouts.stages import make_cut
from autopar.planning import cuts as cuts_module
from autopar.planning import settle as settle_module
from autopar.planning.anywhere import Anywhere
from autopar.planning.decide import _alternative
from autopar.planning.layered import Layered
from autopar.planning.outer import Dropped
from autopar.planning.pins import read_pins
from autopar.planning.price import Pricer
from autopar.planning.problem import Infeasible
from autopar.planning.relaxed import relaxed
from autopar.planning.search import Seen
from autopar.planning.settle import settle
from autopar.planning.space import Space, space_of
from autopar.planning.stage_price import StagePricer
from autopar.planning.tried import Tried, least_of, relax
from autopar.planning.unopened import OUTLINE, Unopened
from autopar.planning.weights import WINDOWS, Weights
from autopar.plugin import Strategy
from autopar.registry import select_cost_models, select_strategies

JOBS: dict[str, Callable[[], Job]] = {
    "gpt2": gpt2,
    "llama": llama,
    "mixtral": lambda: grouped("mixtral"),
}
SPECS = {"in sequence": resolve_cluster(cluster()), "beside": resolve_cluster("h100:4")}
TIGHT_BYTES = {"gpt2": 500_000, "llama": 300_000, "mixtral": 300_000}
"""So little that something must run again or be sharded in most settings; overheads come on top."""


def space(
    job: Job,
    spec: ClusterSpec,
    limit_bytes: int = OPTIONS.limit_bytes,
    more: tuple[Strategy, ...] = (),
    pin: Mapping[str, int] | None = None,
) -> Space:
    graph = analyse(capture(job.model, job.batch, job.loss))
    strategies, models = (*select_strategies(), *more), select_cost_models()
    options = replace(OPTIONS, limit_bytes=limit_bytes)
    return space_of(graph, spec, strategies, models, read_pins(pin, (), strategies), options)


def outlined(found: Space, unopened: Unopened) -> Iterator[Unopened]:
    """What becomes of a setting before it is opened: one for each schedule."""
    todo = [unopened]
    while todo:
        one = todo.pop()
        if one.knows == OUTLINE:
            yield one
        else:
            todo.extend(found.outline(one))


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", JOBS)
def test_no_outline_is_above_what_comes_of_the_setting(name: str, spec: str, tight: bool) -> None:
    """Neither its relaxation nor, for every third, the best program that a solver finds."""
    resolved = SPECS[spec]
    found = space(JOBS[name](), resolved)
    if tight:
        overhead = found.works.prices.overhead_bytes()
        found = space(JOBS[name](), resolved, overhead + TIGHT_BYTES[name])
    opened = sharper = full = 0
    for unopened in found.settings():
        if isinstance(unopened, Dropped):
            continue
        before_s = found.bound_s(unopened)
        for one in outlined(found, unopened):
            sharper += one.bound_s > before_s * (1 + 1e-6)
            for tried in found.open(one):
                if not isinstance(tried, Tried):
                    continue
                more = relax(tried, found.options)
                if isinstance(more, Dropped):
                    continue
                assert one.bound_s <= more.bound_s * (1 + 1e-9), one.scheduled
                opened += 1
                full += more.result is not None
                if opened % 3 == 0 and more.result is None:
                    done = settle(more, found.options, float("inf"))
                    assert one.bound_s <= done.step_s * (1 + 1e-9), one.scheduled
    assert opened > 20 and sharper > 10
    assert bool(full) == tight


@pytest.mark.parametrize("name", JOBS)
def test_the_multipliers_of_other_settings_give_a_bound_that_is_no_better(name: str) -> None:
    """Of most settings with stages they are known, and say nearly as much."""
    found = space(JOBS[name](), SPECS["in sequence"], pin={"pp": 2})
    limit_bytes, near, every = OPTIONS.limit_bytes, 0, 0
    for unopened in found.settings():
        for setting in unopened.scheduled if isinstance(unopened, Unopened) else ():
            found.outlines.price(setting)
            if not found.outlines.is_priced(setting):
                found.outlines.price(setting)
            rough_s = found.outlines.rough_s(setting, limit_bytes)
            bound_s = found.outlines.bound_s(setting, limit_bytes, "highs")
            assert rough_s <= bound_s * (1 + 1e-5), setting
            near += rough_s > 0.9 * bound_s
            every += 1
    assert every > 20 and near > 0.6 * every


def test_by_other_weights_a_setting_may_take_less_than_its_outline() -> None:
    """Each is a bound; only by the same weights does less say that prices aren't subadditive."""
    found = space(gpt2(), SPECS["beside"])
    unopened = next(one for one in found.settings() if isinstance(one, Unopened))
    (one,) = outlined(found, unopened)
    (tried,) = found.open(one)
    assert isinstance(tried, Tried)
    lighter = Weights(tuple((0.9, 0.0, 0.0) for _ in WINDOWS))
    less = relax(tried.by(lighter), found.options)
    assert isinstance(less, Tried)
    assert least_of(less.layered)[0] < found.outlines.least_s(less.outer.asked)
    found.confirm(less)
    same = replace(less, layered=replace(less.layered, pricer=_called(less, tried)))
    with pytest.raises(autopar.AutoparError, match="a part of an op must cost at least its share"):
        found.confirm(same)


def _called(less: Tried, as_other: Tried) -> Pricer:
    """The lighter prices under the others' name."""
    pricer = less.layered.pricer
    weights = as_other.layered.pricer.prices.weights
    return replace(pricer, prices=replace(pricer.prices, weights=weights))


def test_axes_that_split_nothing_but_samples_are_plain() -> None:
    """ep splits experts as well; a stranger's strategy may want dp for weights."""
    spec = resolve_cluster(cluster())
    assert space(gpt2(), spec).outlines.plain == {"dp", "ep"}
    assert space(grouped("mixtral"), spec).outlines.plain == {"dp"}
    assert space(classifier(), spec).outlines.plain == {"dp", "ep"}
    assert space(classifier(), spec, more=(WideFfn(),)).outlines.plain == {"ep"}


@pytest.mark.parametrize(
    ("name", "spec", "pin"),
    [("mixtral", "h100:4", {}), ("llama", "h100:8", {}), ("405b", "h100:128", {"cp": 16, "pp": 1})],
)
def test_no_outline_is_above_a_finer_one(name: str, spec: str, pin: dict[str, int]) -> None:
    """Llama-3-405B's queries that share a head of keys are exchanged for positions where a rank has
    one such head: under tp 8 · cp 16, not under tp 4. What is cut more may do more then, and faster
    than its share of the other."""
    job = JOBS.get(name, functools.partial(llama_405b, 16, 2))()
    found = space(job, resolve_cluster(spec), pin=pin)
    settings = [one.asked for one in found.settings() if isinstance(one, Unopened)]
    for asked in settings:
        while not found.outlines.is_priced(asked):
            found.outlines.price(asked)
    for asked in settings:
        pricer = found.outlines.priced[found.outlines.of(asked)]
        if pricer is not None and (layered := Layered(pricer)).is_possible:
            assert 0 < found.outlines.least_s(asked) <= least_of(layered)[0] * (1 + 1e-9), asked
    assert len(found.outlines.least) > 3


def test_outlines_are_shared() -> None:
    """4 data ranks with 2 microbatches each run what 2 with 4 do, in any number of stages."""
    found = space(gpt2(layers=4), resolve_cluster(cluster()))
    alike: dict[object, set[tuple[int, int]]] = {}
    for unopened in found.settings():
        if isinstance(unopened, Unopened):
            asked = unopened.asked
            sizes = (asked.mesh.size("pp"), asked.mesh.size("dp"))
            alike.setdefault(found.outlines.of(asked), set()).add(sizes)
    assert max(map(len, alike.values())) >= 3


@pytest.mark.parametrize("limit", [OPTIONS.limit_bytes, 0])
def test_no_cut_into_several_parts_a_stage_is_below_the_bound(limit: int) -> None:
    """Over all cuts whose parts differ by one layer at most; `balanced` is the best of them."""
    found = space(gpt2(layers=6), resolve_cluster(cluster()))
    if not limit:
        limit = found.works.prices.overhead_bytes() + 2_200_000
        found = space(gpt2(layers=6), resolve_cluster(cluster()), limit)
    looked_at = 0
    for unopened in found.settings():
        chunked = [
            setting
            for setting in (unopened.scheduled if isinstance(unopened, Unopened) else ())
            if setting.schedule is not None and setting.schedule.table.chunks == 2
        ]
        if not chunked or chunked[0].mesh.size("pp") != 2 or not isinstance(unopened, Unopened):
            continue
        for tried in found.open(replace(unopened, scheduled=(chunked[0],))):
            if not isinstance(tried, Tried):
                continue
            more = relax(tried, found.options)
            if isinstance(more, Dropped) or more.anywhere is None or more.result is not None:
                continue
            skeleton = tried.layered.pricer.model.skeleton
            each = {}
            for counts in itertools.product((1, 2), repeat=4):
                if sum(counts) == 6:
                    pricer = StagePricer((tried.layered,), make_cut(skeleton, counts))
                    each[counts] = relaxed(pricer.problem(limit), "highs").bound_s
            assert more.bound_s <= min(each.values()) * (1 + 1e-9)
            chosen = more.anywhere.balanced()
            assert each[chosen] <= min(each.values()) * 1.02
            looked_at += 1
    assert looked_at >= 4


def test_a_time_limit_returns_the_best_plan_so_far_with_its_gap() -> None:
    job = gpt2()
    whole = autopar.compile(job.model, "h100:8", job.batch, progress=False).plan.certificate
    short = autopar.compile(job.model, "h100:8", job.batch, progress=False, time_limit_s=0.2)
    certificate = short.plan.certificate
    assert certificate.candidates == whole.candidates
    assert certificate.solved < whole.solved or certificate.gap > whole.gap
    assert certificate.bound_s <= whole.bound_s * (1 + 1e-9)
    assert short.plan.predicted.step_s * (1 - certificate.gap) == pytest.approx(certificate.bound_s)


def test_a_cut_that_doesnt_fit_says_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several parts a stage one cut of many is looked at: if it doesn't fit, the setting keeps
    its bound, which counts in the certificate, and the plan says that it was one cut."""
    monkeypatch.setattr(cuts_module, "SMALL", 0)
    found = space(gpt2(layers=6), resolve_cluster(cluster()), pin={"pp": 2})
    short = lambda tried, *_: (tried.layered, Infeasible(7))  # noqa: E731
    monkeypatch.setattr(settle_module, "_of_cut", short)
    seen = {}
    for unopened in found.settings():
        for setting in unopened.scheduled if isinstance(unopened, Unopened) else ():
            chunks = setting.schedule.brief.chunks if setting.schedule else 0
            (tried,) = found.open(Unopened(setting, (setting,)))
            if chunks in (1, 2) and isinstance(tried, Tried):
                more = relax(tried, found.options)
                assert isinstance(more, Tried)
                done = settle(more, found.options, float("inf"))
                seen[chunks] = _alternative(Seen(setting, done.bound_s, result=done.result))
                if chunks == 2:
                    assert done.bound_s == more.bound_s < float("inf")
    assert seen[2].bound_s is not None and "the cut that was looked at: short" in seen[2].why
    assert seen[1].bound_s is None and seen[1].why == "short by 7 bytes of memory"


def test_of_few_cuts_of_several_parts_each_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut that is likely to be best doesn't fit here: with that one alone the gap is 3.6 %, but
    for the bound of whole layers."""
    job, spec = deep_classifier(torch.float32, layers=5), cluster(4, memory_bytes=18_000)
    plan = autopar.compile(job.model, spec, job.batch, loss=job.loss, progress=False).plan
    assert plan.certificate.gap <= 1e-3
    monkeypatch.setattr(cuts_module, "SMALL", 0)
    whole = autopar.compile(job.model, spec, job.batch, loss=job.loss, progress=False).plan
    assert whole.certificate.gap <= 1.001e-3
    assert whole.predicted.step_s == pytest.approx(plan.predicted.step_s, rel=1e-3)
    monkeypatch.setattr(settle_module, "whole_bound", lambda *_: None)
    one = autopar.compile(job.model, spec, job.batch, loss=job.loss, progress=False).plan
    assert one.certificate.gap > 0.02 and one.predicted.step_s >= plan.predicted.step_s


def test_cuts_that_dont_fit_come_after_those_that_do() -> None:
    """Of nine layers in four stages most cuts don't fit here: the bound of one is no number to sort
    by, and the search ends where cuts are sorted wrongly with a plan that is 8 % slower."""
    job, pin = gpt2(layers=9), {"pp": 4, "microbatches": 4, "schedule": "1f1b"}
    again, spec = {**pin, "recompute": "selective"}, resolve_cluster("cpu:4")
    other = autopar.compile(job.model, spec, job.batch, loss=job.loss, pin=again).plan
    limit = 6 * other.predicted.memory_bytes // 5
    little = replace(spec, device=replace(spec.device, memory_bytes=limit))
    plan = autopar.compile(
        job.model, little, job.batch, loss=job.loss, pin=pin, memory_fraction=1.0
    ).plan
    assert plan.certificate.bound_s <= other.predicted.step_s
    assert plan.predicted.step_s < 0.97 * other.predicted.step_s


def test_every_cut_is_looked_at_in_the_order_of_bounds() -> None:
    found = space(gpt2(layers=9), resolve_cluster(cluster()), OPTIONS.limit_bytes, pin={"pp": 4})
    limit = found.works.prices.overhead_bytes() + 2_286_182
    compared = 0
    for unopened in found.settings():
        for tried in found.open(unopened) if isinstance(unopened, Unopened) else ():
            if isinstance(tried, Tried) and tried.outer.setting.schedule is not None:
                every = cuts_module.every_cut(Anywhere(tried.layered, limit))
                if every is not None and tried.layered.schedule.brief.chunks == 1:
                    bounds = [bound_s for bound_s, _ in every]
                    assert bounds == sorted(bounds) and all(map(math.isfinite, bounds))
                    compared += 0 < len(bounds) < 56
    assert compared > 3

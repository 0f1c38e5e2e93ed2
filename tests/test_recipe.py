"""The practitioner's recipe: its steps in order, the first that fits, and plans beside it."""

from dataclasses import replace
from typing import Any

import pytest
from clusters import cluster
from models import classifier, deep_classifier, gpt2
from moe import grouped

import autopar
from autopar import AutoparError, InfeasibleError
from autopar.cluster import resolve_cluster
from autopar.errors import OutOfTimeError
from autopar.plan import Plan
from autopar.planning import limited
from autopar.planning.limited import faster, plan_in_time
from autopar.planning.pins import read_pins
from autopar.planning.recipe import levels, plan_by_recipe, step_text, uneven_stages
from autopar.planning.request import Request, make_plan
from autopar.planning.watch import Watch


@pytest.fixture(scope="module")
def compiled() -> autopar.Compiled:
    """GPT-2 of four layers, planned for four devices with plenty of memory."""
    job = gpt2(layers=4)
    return autopar.compile(job.model, cluster(), job.batch, pin={"dp": 4, "zero": False})


def request_of(compiled: autopar.Compiled, limit: int | None = None, **changes: Any) -> Request:
    """What was planned, with another limit of memory."""
    assert compiled.request is not None
    options = compiled.request.options
    if limit is not None:
        options = replace(options, limit_bytes=limit)
    return replace(compiled.request, options=options, **changes)


def need(compiled: autopar.Compiled, step: Any) -> int:
    """Bytes that the smallest plan of a step takes."""
    request = request_of(compiled, 1)
    with pytest.raises(InfeasibleError) as error:
        make_plan(replace(request, pins=read_pins(step, (), request.strategies)))
    return 1 + error.value.short_bytes


def texts(request: Request) -> list[list[list[str]]]:
    return [[[step_text(s) for s in lane] for lane in level] for level in levels(request)]


# ---------------------------------------------------------------- its steps


def test_steps_on_two_nodes_of_eight(compiled: autopar.Compiled) -> None:
    """Tensor in the node, then stages or ZeRO 3, then both again with recompute."""
    request = request_of(compiled, cluster=resolve_cluster("h100:16"))
    tensor, deep, *again = texts(request)
    assert tensor == [
        [
            "dp 16",
            "dp 8 · tp 2",
            "dp 4 · tp 4",
            "dp 2 · tp 8",
        ]
    ]
    assert deep == [
        ["pp 2 · tp 8 by 1f1b"],
        ["dp 2 · tp 8, zero 3"],
    ]
    assert again == [
        [[f"{step}, recompute full" for step in lane] for lane in level] for level in (tensor, deep)
    ]


def test_stages_go_up_to_the_layers_and_share_optimizer_state(compiled: autopar.Compiled) -> None:
    request = request_of(compiled, cluster=resolve_cluster("h100:64"))
    staged = texts(request)[1][0]
    assert staged == [
        "pp 2 · dp 4 · tp 8 by 1f1b, zero 1",
        "pp 4 · dp 2 · tp 8 by 1f1b, zero 1",
    ], "four layers are at most four stages"


def test_experts_go_inside_the_node_instead_of_tensor() -> None:
    job = grouped("mixtral")
    compiled = autopar.compile(job.model, cluster(), job.batch, pin={"dp": 4, "zero": False})
    request = request_of(compiled, cluster=resolve_cluster("h100:16"))
    lane = texts(request)[0][0]
    assert lane[0] == "dp 16" and lane[-1] == "dp 2 · ep 8"


def test_only_strategies_at_hand_are_named() -> None:
    job = classifier()
    compiled = autopar.compile(
        job.model, cluster(), job.batch, loss=job.loss, strategies=["data", "tensor"]
    )
    steps = [step for level in levels(request_of(compiled)) for lane in level for step in lane]
    assert {name for step in steps for name in step} == {"dp", "tp"}


# ---------------------------------------------------------------- the first that fits


def test_each_limit_has_the_first_step_that_fits(compiled: autopar.Compiled) -> None:
    """Exhaustively: every step planned by itself says whether it fits."""
    needs = {
        step_text(step): need(compiled, step)
        for level in levels(request_of(compiled))
        for lane in level
        for step in lane
    }
    order = list(needs)
    assert len(order) == 8
    for limit in sorted(set(needs.values())):
        fits = [what for what in order if needs[what] <= limit]
        plan = plan_by_recipe(request_of(compiled, limit))
        assert plan.assumptions[-1].endswith(f": {fits[0]}"), (limit, needs)
        assert plan.predicted.memory_bytes <= limit
        assert (plan.certificate.solver, plan.alternatives) == ("none", ())
    least = min(needs.values())
    with pytest.raises(
        InfeasibleError, match="no step of the recipe fits: the smallest, "
    ) as found:
        plan_by_recipe(request_of(compiled, least - 1))
    assert found.value.short_bytes == 1


def test_of_stages_and_zero_the_faster_is_taken() -> None:
    """Where a node is one device, nothing lies inside it, and both may fit."""
    job, spec = deep_classifier(layers=4), cluster()
    inner = {"name": "none", "devices": 1, "latency_s": 1e-6, "bytes_per_s": 1e10}
    spec["links"] = [inner, *spec["links"]]
    compiled = autopar.compile(job.model, spec, job.batch, loss=job.loss, pin={"dp": 4})
    (plain,), (staged, (spread,)) = list(levels(request_of(compiled)))[:2]
    assert [step_text(step) for step in (*plain, *staged, spread)] == [
        "dp 4",
        "pp 2 · dp 2 by 1f1b, zero 1",
        "pp 4 by 1f1b",
        "dp 4, zero 3",
    ]
    limit = max(need(compiled, step) for step in (*staged, spread))
    assert limit < need(compiled, plain[0])
    each = [
        make_plan(replace(r, pins=read_pins(step, (), r.strategies)))
        for r in [request_of(compiled, limit)]
        for step in (staged[0], spread)
    ]
    plan = plan_by_recipe(request_of(compiled, limit))
    assert plan.predicted == min(each, key=lambda one: one.predicted.step_s).predicted
    assert each[0].predicted.step_s != each[1].predicted.step_s


def test_forbidden_names_are_left_out(compiled: autopar.Compiled) -> None:
    (first, *_) = next(iter(levels(request_of(compiled))))[0]
    limit = need(compiled, first) - 1
    assert plan_by_recipe(request_of(compiled, limit)).axes["tp"] > 1
    without = plan_by_recipe(request_of(compiled, limit), ["tp"])
    assert without.axes["tp"] == 1 and without.assumptions[-1].endswith("zero 3")


def test_nothing_legal() -> None:
    job = classifier()
    batch = {name: tensor[:7] for name, tensor in job.batch.items()}
    with pytest.raises(AutoparError, match=r"no step of the recipe can run on this cluster:\n"):
        autopar.recipe(job.model, cluster(), batch, loss=job.loss, strategies=["data"])


# ---------------------------------------------------------------- as a program


def test_recipe_is_a_program_like_any_other() -> None:
    job = classifier()
    made = autopar.recipe(job.model, cluster(), job.batch, loss=job.loss)
    pin = {"dp": 4, "zero": False, "recompute": False}
    pinned = autopar.compile(job.model, cluster(), job.batch, loss=job.loss, pin=pin)
    assert made.source == pinned.source
    assert made.plan.predicted == pinned.plan.predicted
    assert "Certificate: none, no search made this plan." in made.plan.summary()
    assert autopar.emit(job.model, made.plan, loss=job.loss).plan == made.plan


def test_a_search_that_ran_out_of_time_gives_no_slower_plan_than_the_recipe(
    compiled: autopar.Compiled,
) -> None:
    """With what the search proved; of a finished search, or with pins, the plan stands."""
    pins = read_pins(None, (), request_of(compiled).strategies)
    free = request_of(compiled, pins=pins)
    recipe = plan_by_recipe(free)
    slow = make_plan(replace(free, pins=read_pins({"tp": 4}, (), free.strategies)))
    assert recipe.predicted.step_s < slow.predicted.step_s
    bound_s = 0.5 * recipe.predicted.step_s
    proven = replace(
        slow.certificate, bound_s=bound_s, gap=1 - bound_s / slow.predicted.step_s, candidates=77
    )
    found = replace(slow, certificate=proven)
    better = faster(found, recipe)
    assert (better.axes, better.regions) == (recipe.axes, recipe.regions)
    assert better.predicted == recipe.predicted
    assert better.certificate.gap == pytest.approx(0.5) and better.certificate.candidates == 77
    assert any("time limit" in note for note in better.assumptions)
    assert faster(better, recipe) is better and faster(recipe, found) is recipe


def test_where_the_search_has_no_time_the_recipe_stands(compiled: autopar.Compiled) -> None:
    """Unless something is pinned, which the recipe doesn't know of."""
    free = request_of(compiled, pins=read_pins(None, (), request_of(compiled).strategies))
    recipe = plan_by_recipe(free)

    def without_time(request: Request, watch: Watch) -> Plan:
        raise OutOfTimeError("too short")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limited, "plan_or_explain", without_time)
        options = replace(free.options, time_limit_s=60.0)
        found = plan_in_time(replace(free, options=options))
        assert (found.axes, found.predicted) == (recipe.axes, recipe.predicted)
        pinned = read_pins({"tp": 4}, (), free.strategies)
        with pytest.raises(OutOfTimeError):
            plan_in_time(replace(free, options=options, pins=pinned))


def test_stages_that_nobody_would_have_so_are_no_step_of_the_recipe(
    compiled: autopar.Compiled,
) -> None:
    """Four layers in two stages: at most three in one."""
    request = request_of(compiled)
    plan = make_plan(replace(request, pins=read_pins({"pp": 2}, (), request.strategies)))
    assert plan.schedule is not None and not uneven_stages(plan)
    every = tuple(path for part in plan.schedule.parts for path in part)
    lopsided = replace(plan, schedule=replace(plan.schedule, parts=(every[:1], every[1:])))
    assert not uneven_stages(lopsided)
    one = replace(plan, schedule=replace(plan.schedule, parts=((), every)))
    assert uneven_stages(one) == "it fits only with 0 to 4 layers a stage"

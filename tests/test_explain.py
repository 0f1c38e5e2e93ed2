"""Why this plan: the recipe and the best on other meshes beside it, with figures of their own."""

import json
from dataclasses import replace

import pytest
import torch
from clusters import cluster
from models import classifier
from pool import Pool

import autopar
from autopar import AutoparError, Plan
from autopar.planning.explain import explained
from autopar.why import PARTS

LIMIT = 34_000


@pytest.fixture(scope="module")
def compiled() -> autopar.Compiled:
    job = classifier()
    return autopar.compile(job.model, cluster(memory_bytes=LIMIT), job.batch, loss=job.loss)


@pytest.fixture(scope="module")
def plan(compiled: autopar.Compiled) -> Plan:
    """The plan with two other meshes and the recipe."""
    return compiled.explained(meshes=2)


def test_only_the_comparison_is_new(compiled: autopar.Compiled, plan: Plan) -> None:
    assert (compiled.plan.recipe, compiled.plan.runners_up) == (None, ())
    before, after = (json.loads(one.to_json()) for one in (compiled.plan, plan))
    assert {key for key in after if after[key] != before[key]} == {
        "recipe",
        "runners_up",
        "region_costs",
    }
    assert Plan.from_json(plan.to_json()) == plan


def test_the_recipe_is_that_of_recipe(plan: Plan) -> None:
    job = classifier()
    made = autopar.recipe(job.model, cluster(memory_bytes=LIMIT), job.batch, loss=job.loss).plan
    assert plan.recipe is not None
    assert plan.recipe.predicted == made.predicted
    assert (dict(plan.recipe.mesh), plan.recipe.microbatches) == (
        dict(made.axes),
        made.microbatches,
    )
    assert made.certificate.objective_s >= plan.certificate.bound_s


def test_each_runner_up_is_the_best_on_its_mesh(plan: Plan) -> None:
    job = classifier()
    assert len(plan.runners_up) == 2
    meshes = [dict(rival.mesh) for rival in plan.runners_up]
    assert dict(plan.axes) not in meshes and meshes[0] != meshes[1]
    for rival in plan.runners_up:
        pinned = autopar.compile(
            job.model, cluster(memory_bytes=LIMIT), job.batch, loss=job.loss, pin=dict(rival.mesh)
        ).plan
        assert rival.predicted is not None
        assert rival.predicted.memory_bytes <= LIMIT
        # A pinned tp also turns tensor on wherever it is legal.
        assert rival.predicted.step_s <= pinned.predicted.step_s * (1 + 1e-3)
        assert rival.predicted.step_s >= plan.certificate.bound_s
        regions = sum(len(choice.layers) for choice in pinned.regions)
        assert rival.used and max(rival.used.values()) <= regions


def test_the_summary_says_what_each_loses_on(plan: Plan) -> None:
    text = " ".join(plan.summary().split())
    assert plan.recipe is not None and plan.recipe.predicted is not None
    times = plan.recipe.predicted.step_s / plan.predicted.step_s
    assert f"Predicted {times:.2f} times as fast as the recipe (" in text
    assert "compared with" in text and "loses on" in text
    for rival in (plan.recipe, *plan.runners_up):
        assert rival.predicted is not None
        apart = {
            name: getattr(rival.predicted, key) - getattr(plan.predicted, key)
            for key, name in PARTS.items()
        }
        assert sum(apart.values()) == pytest.approx(
            rival.predicted.step_s - plan.predicted.step_s
        ), "the parts are the whole"
        worst = max(apart, key=lambda name: apart[name])
        assert f"{worst} +" in text


def test_a_faster_rival_is_owned_up_to(plan: Plan) -> None:
    """What the solver's objective leaves out may turn the order."""
    said = "A rival is faster by its whole account."
    rivals = [rival for rival in (plan.recipe, *plan.runners_up) if rival is not None]
    steps = [rival.predicted.step_s for rival in rivals if rival.predicted]
    assert (said in " ".join(plan.summary().split())) is (min(steps) < plan.predicted.step_s)
    slower = replace(plan, predicted=replace(plan.predicted, step_s=2 * max(steps)))
    assert said in " ".join(slower.summary().split())
    quicker = replace(plan, predicted=replace(plan.predicted, step_s=min(steps) / 2))
    assert said not in " ".join(quicker.summary().split())


def test_a_plan_that_is_edited_is_compared_with_nothing(plan: Plan) -> None:
    job = classifier()
    assert autopar.emit(job.model, plan, loss=job.loss).plan == plan
    again = autopar.emit(job.model, plan, loss=job.loss, optimizer=torch.optim.SGD).plan
    assert (again.recipe, again.runners_up, again.region_costs) == (None, (), ())


def test_where_the_recipe_fits_nowhere(compiled: autopar.Compiled) -> None:
    assert compiled.request is not None
    options = replace(compiled.request.options, limit_bytes=1000)
    plan = explained(replace(compiled.request, options=options), compiled.plan, 0)
    assert plan.recipe is not None and plan.runners_up == ()
    assert plan.recipe.predicted is None
    assert plan.recipe.why.startswith("no step of the recipe fits: the smallest, ")
    assert "The recipe has no plan: no step of the recipe fits" in plan.summary()
    assert Plan.from_json(plan.to_json()) == plan


def test_what_came_from_outside_was_not_searched(plan: Plan) -> None:
    emitted = autopar.emit(classifier().model, plan, loss=classifier().loss)
    with pytest.raises(AutoparError, match="only what compile and recipe return can be explained"):
        emitted.explained()
    for meshes in (-1, 2.0, True, "2"):
        with pytest.raises(
            AutoparError, match=f"meshes must be a whole number, .*, not {meshes!r}"
        ):
            emitted.explained(meshes)  # type: ignore[arg-type]
    with pytest.raises(AutoparError, match="clip_norm must be above 0"):
        autopar.emit(classifier().model, plan, loss=classifier().loss, clip_norm=-1.0)


def explained_here() -> str:
    """A task for the pool: what the summary of the explained plan says, or why there is none."""
    job = classifier()
    made = autopar.compile(job.model, cluster(), job.batch, loss=job.loss, pin={"dp": 4})
    try:
        return made.explained(meshes=0).summary()
    except AutoparError as error:
        return str(error)


def test_rank_0_explains(pool4: Pool) -> None:
    first, *others = pool4.run(explained_here)
    assert "times as fast as the recipe" in first
    assert {text[:44] for text in others} == {"only what compile and recipe return can be e"}

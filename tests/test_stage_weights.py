"""In stages too no weights of the programme count more than the account."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from models import Job, gpt2, llama
from moe import grouped
from test_outline import space

import autopar
from autopar.cluster import resolve_cluster
from autopar.layouts.convert import ImpossibleError
from autopar.layouts.stages import make_cut
from autopar.planning.account import books_by_stage, spent_in_step, step_seconds
from autopar.planning.anywhere import even_counts
from autopar.planning.evaluate import evaluate
from autopar.planning.layered import Layered
from autopar.planning.stage_price import StagePricer
from autopar.planning.tried import Tried
from autopar.planning.unopened import Unopened
from autopar.planning.weights import WINDOWS, Row, Weights, sharpest

JOBS: dict[str, Callable[[], Job]] = {
    "gpt2": lambda: gpt2(layers=4),
    "llama": llama,
    "mixtral": lambda: grouped("mixtral"),
}


def drawn(draw: random.Random, rows: tuple[Row, ...]) -> Weights:
    return Weights(tuple(draw.choice(rows) for _ in WINDOWS))


@pytest.mark.parametrize("name", JOBS)
def test_no_weights_count_more_than_the_account(name: str) -> None:
    """Of random programs, by random rows in each window and by those that are the largest on the
    slowest stage: which make the programme sharp."""
    draw, found = random.Random(1), space(JOBS[name](), resolve_cluster("h100:4"))
    compared, shares = 0, []
    names = set()
    for unopened in found.settings():
        if not isinstance(unopened, Unopened) or unopened.asked.microbatches > 4:
            continue
        staged = tuple(one for one in unopened.scheduled if one.schedule is not None)
        for tried in found.open(replace(unopened, scheduled=staged)) if staged else ():
            if not isinstance(tried, Tried):
                continue
            schedule = tried.outer.setting.schedule
            assert schedule is not None
            pricer, parts = tried.layered.pricer, schedule.table.parts
            cut = make_cut(pricer.model.skeleton, even_counts(len(pricer.model.layers), parts))
            weights = drawn(draw, pricer.prices.rows)
            for again in range(2):
                layered = Layered(pricer.weighing(weights))
                if not layered.is_possible:
                    break
                problem = replace(StagePricer(layered, cut).problem(2**60), covers=())
                choices = [draw.randrange(len(slot.choices)) for slot in problem.slots]
                cost = evaluate(problem, choices)
                if cost is None:
                    continue
                program = layered.program(choices, cut)
                try:
                    books = books_by_stage(program, pricer.prices, found.options.state_ratio)
                except ImpossibleError:
                    continue
                step_s = step_seconds(books, program.setting)
                assert cost[0] <= step_s * (1 + 1e-9), (program.setting, weights)
                compared += 1
                names.add(schedule.name)
                if again:
                    shares.append(cost[0] / step_s)
                spent = spent_in_step(books, program.setting)
                weights = sharpest(pricer.prices.rows, [spent], "highs")
    assert compared > 20 and names >= {"1f1b", "gpipe"}
    assert sorted(shares)[len(shares) // 2] > 0.8


def test_many_cuts_are_one_round() -> None:
    """Where the host is what a step waits for, the first guess of the weights misses nearly all of
    it: they are sharpened however many cuts of the layers the first round tried."""
    job = gpt2(layers=16)
    pin = {"pp": 2, "tp": 2, "microbatches": 2, "schedule": "1f1b", "recompute": "full"}
    plan = autopar.compile(job.model, "a100:4", job.batch, loss=job.loss, pin=pin).plan
    assert plan.certificate.gap <= 1.001e-3, plan.certificate

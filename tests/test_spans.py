"""What a part takes with a run of layers is never more than the best choices that fit take."""

import itertools
import math
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar.planning import spans
from autopar.planning.loose import BRIEF, HELD, RESIDENT, SECONDS, STEP, TRANSIENT, moments
from autopar.planning.rooms import room_of
from autopar.planning.spans import layers_of, runs_of, span_of

LAYERS, CHOICES = 5, 3
Rows = NDArray[np.float64]


def drawn(rng: random.Random, choices: int) -> Rows:
    """Costs of some choices: the slower, the less is held."""
    row = np.zeros((choices, BRIEF + 1))
    row[:, SECONDS] = sorted(rng.uniform(1.0, 8.0) for _ in range(choices))
    row[:, STEP] = [rng.uniform(0.0, 1.0) for _ in range(choices)]
    row[:, RESIDENT] = [rng.randint(0, 3) for _ in range(choices)]
    row[:, HELD] = sorted((rng.randint(1, 9) for _ in range(choices)), reverse=True)
    row[:, TRANSIENT] = [rng.randint(0, 9) for _ in range(choices)]
    row[:, BRIEF] = [rng.randint(0, int(most)) for most in row[:, TRANSIENT]]
    return row


def best_of(
    layers: list[Rows],
    skeleton: list[Rows],
    base: Rows,
    in_flight: float,
    limit_bytes: int,
    freed: float,
) -> tuple[float, float, float]:
    """By brute force: seconds, those once a step, and bytes over the limit, each at its least."""
    seconds = once = over = math.inf
    for taken in itertools.product(*layers, *skeleton):
        rows, own = np.array(taken[: len(layers)]), taken[len(layers) :]
        every = np.vstack([rows[:, :BRIEF], *own])
        brief, most = float(rows[:, BRIEF].max()), float(rows[:, TRANSIENT].max())
        moment = max(brief, most - freed, sum(float(one[TRANSIENT]) for one in own))
        need = float((every[:, RESIDENT] + every[:, HELD] * in_flight).sum()) + moment
        need += float(base[RESIDENT] + base[HELD] * in_flight)
        once = min(once, float(every[:, STEP].sum() + base[STEP]))
        over = min(over, need - limit_bytes)
        if need <= limit_bytes:
            seconds = min(seconds, float(every[:, SECONDS].sum() + base[SECONDS]))
    return seconds, once, over


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_no_run_of_layers_is_below_what_its_span_says(
    kinds: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few kinds of layers, or each run told apart as where there are many."""
    if apart:
        monkeypatch.setattr(spans, "FEW", 0)
    near = every = 0
    for seed in range(25):
        rng = random.Random(seed)
        rows = [drawn(rng, CHOICES) for _ in range(kinds)]
        order = [rng.randrange(kinds) for _ in range(LAYERS - kinds)] + list(range(kinds))
        freed = rng.choice((0.0, 3.0))
        base = np.array([0.5, 0.25, 2.0, min(moments(row, freed).min() for row in rows), 1.0])
        skeleton = [drawn(rng, 2)[:, :BRIEF] for _ in range(rng.randint(0, 1))]
        in_flight, runs, limit_bytes = rng.randint(1, 3), runs_of(order), rng.randint(20, 90)
        free = limit_bytes - float(base[RESIDENT] + base[HELD] * in_flight)
        typical = float(moments(np.concatenate(rows), freed).mean())
        room = room_of(
            float(base[SECONDS]), free, np.array([in_flight]), skeleton, typical, [freed]
        )
        layers = layers_of(runs, rows)
        own_s = float(base[STEP]) + sum(float(one[:, STEP].min()) for one in skeleton)
        found = span_of(layers, room, 0)
        step_s = layers.step_s + own_s
        for first, last in itertools.combinations(range(LAYERS + 1), 2):
            place = runs.place[first, last]
            seconds, over = (float(each[place]) for each in found)
            once = float(step_s[place])
            mine = [rows[kind] for kind in order[first:last]]
            best = best_of(mine, skeleton, base, in_flight, limit_bytes, freed)
            assert seconds <= best[0] * (1 + 1e-9) and over <= best[2] + 1e-6, (seed, first, last)
            assert once == pytest.approx(best[1])
            if math.isfinite(best[0]):
                every += 1
                near += seconds >= 0.8 * best[0]
    assert every > 100 and near > 0.8 * every

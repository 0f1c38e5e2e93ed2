"""Fits constants of devices, links and software on half of the published runs.

    python benchmarks/fidelity_fit.py               # how well the written constants do
    python benchmarks/fidelity_fit.py --write       # fit, into constants.json and the presets
    python benchmarks/fidelity_fit.py --leave-out   # each source predicted without itself
    python benchmarks/fidelity_fit.py --ablate      # the error without each term

Robust least squares on the logarithm of predicted over measured, each source weighing as the root
of its number of runs, with a pull towards the values stated beforehand.
"""

import argparse
import hashlib
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
from fidelity import prepare_all, usable
from fidelity_predict import Constants, Prepared, constants, owners, stated, timed_s, written
from fidelity_presets import write_presets
from fidelity_terms import TERMS
from published_runs import DATA, Run, read_runs
from rich.console import Console
from rich.table import Table

PULL, ROBUST = 0.12, 0.1
"""Weight of a constant's logarithm against a run's; from where on an error counts linearly."""

STEP = 0.01
"""Of a logarithm, for slopes."""

REPORTED = ("dense_maxtext", "moe_", "dense_nvidia_blackwell", "tpu")
"""Beginnings of sources without a target."""

SHARES = frozenset(
    {
        *("sustained", "memory", "fp8", "fp8_rows", "at_500_w", "tile_128", "tile_64"),
        *("aligned_16", "unaligned", "attention", "attention_backward", "rate"),
    }
)
"""Constants that can't be above 1."""

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """Runs to fit constants of these names on, and each run's weight. A point is the logarithms of
    the constants over their stated values."""

    prepared: Sequence[Prepared]
    weights: Sequence[float]
    names: Sequence[str]

    def values(self, at: Vector) -> dict[str, float]:
        """The constants of a point."""
        before = stated()
        found = {n: before[n] * math.exp(x) for n, x in zip(self.names, at, strict=True)}
        return {**before, **found}

    def most(self) -> Vector:
        """The highest point."""
        before = stated()
        shares = [name.split(".")[1] in SHARES for name in self.names]
        tops = [math.log(max(1.0, 1.001 * before[n]) / before[n]) for n in self.names]
        return np.array([top if s else 1.6 for top, s in zip(tops, shares, strict=True)])

    def residuals(self, at: Vector) -> Vector:
        """Weighted errors of runs, then the pull on each constant."""
        values = self.values(at)
        own = [w * _log_error(p, values) for p, w in zip(self.prepared, self.weights, strict=True)]
        return np.concatenate([np.array(own), PULL * at])

    def slope(self, at: Vector, now: Vector, i: int) -> Vector:
        """By one constant, which not all runs depend on."""
        moved = at.copy()
        moved[i] += STEP
        values, owner = self.values(moved), self.names[i].split(".")[0]
        changed = now.copy()
        for j, (one, weight) in enumerate(zip(self.prepared, self.weights, strict=True)):
            if owner in owners(one.run):
                changed[j] = weight * _log_error(one, values)
        changed[len(self.prepared) + i] += PULL * STEP
        return np.asarray((changed - now) / STEP)


def _log_error(one: Prepared, values: Constants) -> float:
    assert one.run.step_s is not None
    return math.log(timed_s(one, values) / one.run.step_s)


def _cost(residuals: Vector) -> float:
    return float(np.sum(2 * ROBUST**2 * (np.sqrt(1 + (residuals / ROBUST) ** 2) - 1)))


def fit(prepared: Sequence[Prepared], start: Constants, steps: int) -> dict[str, float]:
    """The constants that fit best, by Levenberg-Marquardt; those that no run depends on stay as
    stated."""
    counts: dict[str, int] = {}
    used: dict[str, None] = {}
    for one in prepared:
        counts[one.run.source] = counts.get(one.run.source, 0) + 1
        used.update(dict.fromkeys(owners(one.run)))
    names = [name for name in stated() if name.split(".")[0] in used]
    problem = Problem(prepared, [counts[p.run.source] ** -0.25 for p in prepared], names)
    most, damping = problem.most(), 0.1
    at = np.array([math.log(start[name] / stated()[name]) for name in names])
    now = problem.residuals(at)
    for _ in range(steps):
        slopes = np.stack([problem.slope(at, now, i) for i in range(len(names))], axis=1)
        scale = (1 + (now / ROBUST) ** 2) ** -0.25
        weighted, target = slopes * scale[:, None], now * scale
        better = 0.0
        while damping < 1e4 and not better:
            matrix = weighted.T @ weighted
            move = np.linalg.solve(
                matrix + damping * np.diag(np.diag(matrix) + 1e-6), -weighted.T @ target
            )
            tried = np.clip(at + move, -1.6, most)
            then = problem.residuals(tried)
            better = max(0.0, _cost(now) - _cost(then))
            if better:
                at, now, damping = tried, then, damping / 4
            else:
                damping *= 4
        if better < 1e-3 * _cost(now):
            break
    return problem.values(at)


def sample(runs: Sequence[Run], most: int) -> set[str]:
    """Names of the fitted half's runs with a target, at most so many of a source, in the order of
    their names' hashes."""
    found: set[str] = set()
    chosen = [r for r in runs if r.fitted and not r.source.startswith(REPORTED)]
    for source in dict.fromkeys(run.source for run in chosen):
        mine = [run.name for run in chosen if run.source == source]
        found |= set(sorted(mine, key=lambda n: hashlib.sha256(n.encode()).hexdigest())[:most])
    return found


# ---------------------------------------------------------------- reports


def by_source(prepared: Sequence[Prepared], seconds: Sequence[float]) -> dict[str, float]:
    """Mean absolute error by source."""
    found: dict[str, list[float]] = {}
    for one, s in zip(prepared, seconds, strict=True):
        assert one.run.step_s is not None
        found.setdefault(one.run.source, []).append(abs(s / one.run.step_s - 1))
    return {source: statistics.fmean(errors) for source, errors in found.items()}


def _scored(prepared: Sequence[Prepared], values: Constants) -> dict[str, float]:
    return by_source(prepared, [timed_s(one, values) for one in prepared])


def _shown(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def score_table(prepared: Sequence[Prepared], values: Constants, left_out: Constants) -> Table:
    """One line a source. `left_out`: its error with constants fitted without it."""
    table = Table(title="mean absolute error of the step's time")
    for heading in ("source", "runs", "raw", "fitted half", "other half", "fitted without it"):
        table.add_column(heading)
    raw = _scored(prepared, stated())
    halves = [_scored([p for p in prepared if p.run.fitted == h], values) for h in (True, False)]
    for source in raw:
        count = sum(p.run.source == source for p in prepared)
        cells = (raw.get(source), *(h.get(source) for h in halves), left_out.get(source))
        table.add_row(source, str(count), *map(_shown, cells))
    return table


def ablation_table(prepared: Sequence[Prepared], values: Constants) -> Table:
    """The error without each term, by source."""
    whole = _scored(prepared, values)
    table = Table(title="mean absolute error without a term")
    for heading in ("without", *whole):
        table.add_column(heading)
    table.add_row("nothing", *map(_shown, whole.values()))
    for name, seconds in TERMS.items():
        found = by_source(prepared, [seconds(one, values) for one in prepared])
        changes = [found[s] - whole[s] for s in whole]
        table.add_row(name, *(f"{100 * change:+.1f}" for change in changes))
    return table


def leave_out(
    prepared: Sequence[Prepared], names: set[str], found: Constants, steps: int
) -> dict[str, float]:
    """Each source's error with constants fitted without it."""
    errors: dict[str, float] = {}
    for source in dict.fromkeys(p.run.source for p in prepared):
        others = [p for p in prepared if p.run.name in names and p.run.source != source]
        values = fit(others, found, steps)
        errors |= _scored([p for p in prepared if p.run.source == source], values)
    return errors


def write(found: Constants) -> None:
    """Into constants.json, and what the presets have of it."""
    now = {name: {**one, "fitted": float(f"{found[name]:.4g}")} for name, one in written().items()}
    text = json.dumps(now, indent=2, sort_keys=True)
    (DATA / "constants.json").write_text(text + "\n", encoding="utf-8")
    date = datetime.now(UTC).date().isoformat()
    write_presets({name: one["fitted"] for name, one in now.items()}, date)


def main() -> None:
    """Fit, and say how well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--most", type=int, default=1000, help="runs of a source to fit on")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    console, start = Console(width=200), time.perf_counter()
    runs = [r for r in read_runs() if usable(r)]
    prepared = [p for p in prepare_all(runs, options.jobs) if isinstance(p, Prepared)]
    console.print(
        f"{len(prepared)} of {len(runs)} runs, {time.perf_counter() - start:.0f} s to prepare"
    )
    names: Mapping[str, float] | set[str] = sample([p.run for p in prepared], options.most)
    values: Constants = constants()
    if options.write:
        chosen = [p for p in prepared if p.run.name in names]
        values = fit(chosen, values, options.steps)
        for name, value in values.items():
            console.print(f"{name:32s} {stated()[name]:12.4g} -> {value:12.4g}", highlight=False)
        write(values)
    without = leave_out(prepared, set(names), values, options.steps) if options.leave_out else {}
    console.print(score_table(prepared, values, without))
    if options.ablate:
        console.print(ablation_table(prepared, values))
    console.print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

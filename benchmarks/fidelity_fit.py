"""Fits constants of devices, links and software on half of the published runs.

    python benchmarks/fidelity_fit.py --write       # into benchmarks/data/constants.json
    python benchmarks/fidelity_fit.py --ablate      # the error without each term
    python benchmarks/fidelity_fit.py --leave-out   # each source predicted without itself

A run's effects are worked out once, by planning's code; then only their prices change. Robust least
squares on the logarithm of predicted over measured, each source weighing as the root of its number
of runs, with a pull towards the presets' values.
"""

import argparse
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from fidelity import Prepared, constants, owners, prepare, timed_s
from published_runs import DATA, Run, read_runs
from rich.console import Console

PULL, ROBUST = 0.12, 0.1
"""Weight of a constant's logarithm against a run's; from where on an error counts linearly."""

Constants = Mapping[str, float]
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """Runs with their effects, and each run's weight."""

    prepared: Sequence[Prepared]
    weights: Sequence[float]

    def errors(self, values: Constants, name: str = "", known: Vector | None = None) -> Vector:
        """Weighted logarithms of predicted over measured; `known` where only `name` differs, which
        not all runs depend on."""
        found = []
        for i, (one, weight) in enumerate(zip(self.prepared, self.weights, strict=True)):
            if known is not None and name.split(".")[0] not in owners(one.run):
                found.append(known[i])
                continue
            assert one.run.step_s is not None
            found.append(weight * math.log(timed_s(one, values) / one.run.step_s))
        return np.array(found)


def fit(
    prepared: Sequence[Prepared], start: Constants, names: Sequence[str], steps: int
) -> dict[str, float]:
    """The constants with those of these names that fit best, by Levenberg-Marquardt in their
    logarithms."""
    counts: dict[str, int] = {}
    for one in prepared:
        counts[one.run.source] = counts.get(one.run.source, 0) + 1
    problem = Fit(prepared, [counts[p.run.source] ** -0.25 for p in prepared])
    at, damping = np.zeros(len(names)), 0.1

    def values(x: Vector) -> dict[str, float]:
        found = {n: start[n] * math.exp(v) for n, v in zip(names, x, strict=True)}
        return {**start, **found}

    def slope(i: int) -> Vector:
        moved = at.copy()
        moved[i] += 0.01
        known = now[: len(problem.prepared)]
        errors = problem.errors(values(moved), names[i], known)
        return (np.concatenate([errors, PULL * moved]) - now) / 0.01

    def residuals(x: Vector) -> Vector:
        return np.concatenate([problem.errors(values(x)), PULL * x])

    def cost(r: Vector) -> float:
        return float(np.sum(2 * ROBUST**2 * (np.sqrt(1 + (r / ROBUST) ** 2) - 1)))

    now = residuals(at)
    for _ in range(steps):
        slopes = np.stack([slope(i) for i in range(len(names))], axis=1)
        scale = (1 + (now / ROBUST) ** 2) ** -0.25
        weighted, target = slopes * scale[:, None], now * scale
        while damping < 1e4:
            matrix = weighted.T @ weighted
            step = np.linalg.solve(
                matrix + damping * np.diag(np.diag(matrix) + 1e-6), -weighted.T @ target
            )
            tried = np.clip(at + step, -1.6, 1.6)
            then = residuals(tried)
            if cost(then) < cost(now):
                better = cost(now) - cost(then)
                at, now, damping = tried, then, damping / 4
                break
            damping *= 4
        else:
            break
        print(f"cost {cost(now):.4f}", flush=True)
        if better < 1e-3 * cost(now):
            break
    return values(at)


def mean_errors(prepared: Sequence[Prepared], values: Constants) -> dict[str, float]:
    """Mean absolute error by source."""
    found: dict[str, list[float]] = {}
    for one in prepared:
        assert one.run.step_s is not None
        found.setdefault(one.run.source, []).append(timed_s(one, values) / one.run.step_s - 1)
    return {source: sum(map(abs, e)) / len(e) for source, e in found.items()}


def shown(errors: Mapping[str, float]) -> str:
    """For reading."""
    return ", ".join(f"{source} {100 * error:.1f} %" for source, error in errors.items())


def usable(run: Run) -> bool:
    """Whether its time is known, and every field but what was recomputed (assumed: nothing)."""
    unknown = set(run.assumed) - {"parallel.recompute isn't stated"}
    return run.step_s is not None and not run.unsupported and not unknown


def main() -> None:
    """Fit, and say how well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", default="", help="constants to fit, separated by commas")
    parser.add_argument("--source", default="", help="only sources whose names start so")
    parser.add_argument("--most", type=int, default=60, help="runs of a source to fit on")
    options = parser.parse_args()
    console = Console(width=160)
    runs = [r for r in read_runs() if usable(r) and r.source.startswith(options.source)]
    if not (options.ablate or options.leave_out):  # only what is fitted on
        runs = _sample([r for r in runs if r.fitted], options.most)
    runs.sort(key=lambda r: (repr(r.shape), r.batch))
    prepared = [p for p in map(prepare, runs) if isinstance(p, Prepared)]
    console.print(f"{len(prepared)} of {len(runs)} runs are predicted")
    start = constants()
    names = sorted(options.only.split(",") if options.only else start)
    half = [p for p in prepared if p.run.fitted]
    rest = [p for p in prepared if not p.run.fitted]
    kept = {run.name for run in _sample([p.run for p in half], options.most)}
    sample = [p for p in half if p.run.name in kept]
    fits = options.write or options.leave_out
    found = fit(sample, start, names, options.steps) if fits else dict(start)
    for name, value in found.items():
        console.print(f"{name:32s} {start[name]:12.5g} -> {value:12.5g}", highlight=False)
    for what, some in (("fitted half", half), ("other half", rest)):
        if not some:
            continue
        console.print(f"{what}: {shown(mean_errors(some, found))}", highlight=False)
    if options.write:
        text = json.dumps(found, indent=2, sort_keys=True)
        (DATA / "constants.json").write_text(text + "\n", encoding="utf-8")
    if options.ablate:
        for name, change in TERMS.items():
            console.print(f"without {name}: {shown(mean_errors(prepared, change(found)))}")
        console.print(f"with all: {shown(mean_errors(prepared, found))}", highlight=False)
    for source in dict.fromkeys(p.run.source for p in prepared) if options.leave_out else ():
        others = [p for p in sample if p.run.source != source]
        mine = [p for p in prepared if p.run.source == source]
        without = fit(others, start, names, options.steps)
        console.print(f"fitted without it: {shown(mean_errors(mine, without))}", highlight=False)


def _sample(runs: Sequence[Run], most: int) -> list[Run]:
    """At most so many of a source, in the order of their names' hashes."""
    found = []
    for source in dict.fromkeys(run.source for run in runs):
        mine = [run for run in runs if run.source == source]
        mine.sort(key=lambda run: hashlib.sha256(run.name.encode()).hexdigest())
        found += mine[:most]
    return found


TERMS: Mapping[str, Callable[[Constants], Constants]] = {
    "host time": lambda v: {k: 0.0 if ".op_s" in k else x for k, x in v.items()},
    "what collectives take beside their algorithm": lambda v: {
        k: 0.0 if "collective_s" in k else x for k, x in v.items()
    },
    "alignment": lambda v: {k: 1.0 if "aligned" in k else x for k, x in v.items()},
    "smaller tiles' efficiency": lambda v: {k: 1.0 if "tile_" in k else x for k, x in v.items()},
    "a tile's prologue": lambda v: {k: 1e-9 if "prologue" in k else x for k, x in v.items()},
    "sharing of network cards": lambda v: {k: 1.0 if "shared" in k else x for k, x in v.items()},
    "bytes between products": lambda v: {k: 1e9 if "memory" in k else x for k, x in v.items()},
    "slow-down by overlap": lambda v: {k: 0.0 if "slowdown" in k else x for k, x in v.items()},
}


if __name__ == "__main__":
    main()

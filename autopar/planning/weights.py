"""What a second of each kind of work counts in the programme, where works that run at the same time
don't add up.

The account's price of a window (a microbatch's forward, its backward) is the largest of a few
weighted sums of the device's, the host's and the network's seconds (`CostModel.rows`). Any one of
these sums, and any mixture of them, is never above the largest: priced by it, every program costs
at most what the account says, and the programme stays linear and its bound a bound. It is sharp
where the weights are those of the largest sum at the optimum. So the search starts from a guess,
looks at what the found programs do in each window, and takes the mixture by which the cheapest of
them costs most (`sharpest`, Kelley's cutting planes).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import pulp

from autopar.errors import AutoparError
from autopar.planning.solvers import run
from autopar.plugin import Alongside, Collective, Compute, CostModel

Row = tuple[float, float, float]
"""Weights of the device's, the host's and the network's seconds."""
IN_SEQUENCE: Row = (1.0, 1.0, 1.0)
WINDOWS = ("forward", "backward", "optimizer", "first forward", "last backward")
AT_THE_END: Mapping[str, str] = MappingProxyType(
    {"forward": "first forward", "backward": "last backward"}
)
"""A microbatch's windows, of which one has what hides once a step as well: that one is a window of
its own."""


@dataclass(frozen=True)
class Weights:
    """The weights in each window."""

    rows: tuple[Row, ...] = (IN_SEQUENCE,) * len(WINDOWS)

    def of(self, window: str) -> Row:
        """Those of one window."""
        return self.rows[WINDOWS.index(window)]

    def at_the_end(self, window: str) -> Row:
        """Those of the one that has what hides once a step as well."""
        return self.of(AT_THE_END.get(window, window))

    @property
    def are_even(self) -> bool:
        """Whether a microbatch's windows all count the same."""
        return all(self.of(window) == self.at_the_end(window) for window in AT_THE_END)


Spent = tuple[Mapping[str, Row], float]
"""What a program does in a step: by window the seconds of device, host and network (not weights),
and seconds that are waited for and run beside nothing."""


def window_of(effect: Compute | Collective) -> str:
    """Where an effect runs: sums of gradients beside the backward."""
    return "backward" if effect.phase == "grad_sync" else effect.phase


def comes_once(effect: Compute | Collective) -> bool:
    """Whether it happens once a step, not for each microbatch."""
    return effect.phase == "optimizer" if isinstance(effect, Compute) else effect.per == "step"


def entry(effect: Compute | Collective, hides: bool, price: float, host_s: float) -> Row | None:
    """An effect's seconds of device, host and network in its window; None for what is waited for
    once a step, and so runs beside nothing. `hides`: of a collective."""
    if isinstance(effect, Compute):
        return price, host_s, 0.0
    once = effect.per == "step"
    if once:
        return (0.0, 0.0, price) if hides else None
    return (0.0, host_s, price) if hides else (price, host_s, 0.0)


def beside(models: Sequence[CostModel]) -> CostModel:
    """The model that prices what runs at the same time."""
    return next(model for model in models if Alongside.kind in model.prices)


def first_guess(rows: Sequence[Row]) -> Weights:
    """The device is busy, and what hides is hidden: the least of the rows in which a second of the
    device counts whole."""
    if not rows:
        raise AutoparError(
            'the cost model that prices "alongside" gives no rows: its price must be the largest '
            "of weighted sums (`CostModel.rows`), which the planner's programme needs"
        )
    whole = max(row[0] for row in rows)
    row = min((row for row in rows if row[0] == whole), key=lambda row: (row[2], row[1]))
    return Weights((row,) * len(WINDOWS))


def seconds_of(spent: Spent, weights: Weights) -> float:
    """What the weights make of it."""
    windows, waited_s = spent
    return waited_s + sum(weighted(weights.of(name), work) for name, work in windows.items())


def sharpest(rows: Sequence[Row], seen: Sequence[Spent], solver: str) -> Weights:
    """The mixture of rows in each window by which the cheapest of the seen programs costs most."""
    found = _largest(rows, seen[0]) if len(seen) == 1 else _mixture(rows, seen, solver)
    for window, ends in AT_THE_END.items():
        if all(windows.get(window, _NOTHING) == _NOTHING for windows, _ in seen):
            found[window] = found[ends]  # of one microbatch, the only one: it says as much
    return Weights(tuple(found[name] for name in WINDOWS))


def _largest(rows: Sequence[Row], spent: Spent) -> dict[str, Row]:
    windows = spent[0]
    return {name: largest(rows, windows.get(name, _NOTHING)) for name in WINDOWS}


def _mixture(rows: Sequence[Row], seen: Sequence[Spent], solver: str) -> dict[str, Row]:
    programme = pulp.LpProblem("sharpest", pulp.LpMaximize)
    least = programme.add_variable("least")
    shares = {
        (name, r): programme.add_variable(f"share_{name}_{r:02}", 0.0)
        for name in WINDOWS
        for r in range(len(rows))
    }
    unit = 1.0 / max(1e-12, *(waited_s + sum(map(sum, w.values())) for w, waited_s in seen))
    for k, (windows, waited_s) in enumerate(seen):
        terms = [
            (shares[name, r], -unit * weighted(row, work))
            for name, work in windows.items()
            for r, row in enumerate(rows)
        ]
        least_is = pulp.LpAffineExpression([(least, 1.0), *terms])
        programme.addConstraint(
            pulp.LpConstraint(least_is, pulp.LpConstraintLE, f"seen_{k}", unit * waited_s)
        )
    for name in WINDOWS:
        every = pulp.LpAffineExpression([(shares[name, r], 1.0) for r in range(len(rows))])
        programme.addConstraint(pulp.LpConstraint(every, pulp.LpConstraintEQ, f"whole_{name}", 1.0))
    programme.setObjective(pulp.LpAffineExpression([(least, 1.0)]))
    outcome = run(programme, solver, gap=0.0)
    assert outcome.status == "solved", outcome
    return {
        name: _mixed(rows, [max(0.0, float(shares[name, r].varValue)) for r in range(len(rows))])
        for name in WINDOWS
    }


_NOTHING: Row = (0.0, 0.0, 0.0)


def weighted(row: Row, work: Row) -> float:
    """Σ weight · seconds."""
    return sum(weight * seconds for weight, seconds in zip(row, work, strict=True))


def scaled(row: Row, times: float) -> Row:
    """So many times the seconds."""
    return row[0] * times, row[1] * times, row[2] * times


def largest(rows: Sequence[Row], work: Row) -> Row:
    """The weights by which the work costs most: the price is theirs."""
    return max(rows, key=lambda row: weighted(row, work))


def _mixed(rows: Sequence[Row], shares: Sequence[float]) -> Row:
    total = sum(shares)
    device, host, network = (
        sum(share * row[i] for share, row in zip(shares, rows, strict=True)) / total
        for i in range(3)
    )
    return device, host, network

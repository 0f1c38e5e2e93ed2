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


Place = tuple[int, str]
"""A stage's window; without stages the only one is stage 0."""


@dataclass(frozen=True)
class Spent:
    """What a step takes of a program: by window the seconds of device, host and network (not
    weights), how often the step waits for it (0: something else takes longer), and seconds that are
    waited for and run beside nothing. By the largest rows it comes to the step."""

    windows: Mapping[Place, Row]
    times: Mapping[Place, float]
    waited_s: float = 0.0

    @property
    def waited(self) -> dict[Place, Row]:
        """The windows that are waited for, as often as they are."""
        return {p: scaled(self.windows[p], times) for p, times in self.times.items() if times}

    def on_one_stage(self) -> "Spent":
        """As if all of it were one stage's."""
        windows: dict[Place, Row] = {}
        for (_, name), (device, host, network) in self.waited.items():
            before = windows.get((0, name), (0.0, 0.0, 0.0))
            windows[0, name] = before[0] + device, before[1] + host, before[2] + network
        for (_, name), work in self.windows.items():
            windows.setdefault((0, name), work)
        times = {(0, name): 1.0 for _, name in self.waited}
        return Spent(windows, times, self.waited_s)


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


def seconds_of(spent: Spent, every: Sequence[Weights]) -> float:
    """What the weights make of it: each stage's, or of all stages the same."""
    return spent.waited_s + sum(
        weighted((every[0] if len(every) == 1 else every[stage]).of(name), work)
        for (stage, name), work in spent.waited.items()
    )


def sharpest(rows: Sequence[Row], seen: Sequence[Spent], solver: str) -> Weights:
    """The mixture of rows in each window, on all stages the same, by which the cheapest of the seen
    programs costs most."""
    return sharpest_of_stages(rows, [spent.on_one_stage() for spent in seen], 1, solver)[0]


def sharpest_of_stages(
    rows: Sequence[Row], seen: Sequence[Spent], stages: int, solver: str
) -> tuple[Weights, ...]:
    """The same of so many stages, each with weights of its own. A window for which no step waits
    has those by which it costs most in the last program: it counts where others take less."""
    found = {place: largest(rows, work) for place, work in seen[-1].windows.items()}
    found |= _mixture(rows, seen, solver) if len(seen) > 1 else {}
    return tuple(
        Weights(tuple(found.get((stage, name), rows[0]) for name in WINDOWS))
        for stage in range(stages)
    )


def _mixture(rows: Sequence[Row], seen: Sequence[Spent], solver: str) -> dict[Place, Row]:
    programme = pulp.LpProblem("sharpest", pulp.LpMaximize)
    least = programme.add_variable("least")
    every = [spent.waited for spent in seen]
    places = list(dict.fromkeys(place for waited in every for place in waited))
    shares = {
        (place, r): programme.add_variable(f"share_{p:03}_{r:02}", 0.0)
        for p, place in enumerate(places)
        for r in range(len(rows))
    }
    unit = 1.0 / max(1e-12, *(sum(map(sum, waited.values())) for waited in every))
    for k, (spent, waited) in enumerate(zip(seen, every, strict=True)):
        terms = [
            (shares[place, r], -unit * weighted(row, work))
            for place, work in waited.items()
            for r, row in enumerate(rows)
        ]
        least_is = pulp.LpAffineExpression([(least, 1.0), *terms])
        limit = unit * spent.waited_s
        programme.addConstraint(
            pulp.LpConstraint(least_is, pulp.LpConstraintLE, f"seen_{k}", limit)
        )
    for p, place in enumerate(places):
        whole = pulp.LpAffineExpression([(shares[place, r], 1.0) for r in range(len(rows))])
        row_of = pulp.LpConstraint(whole, pulp.LpConstraintEQ, f"whole_{p:03}", 1.0)
        programme.addConstraint(row_of)
    programme.setObjective(pulp.LpAffineExpression([(least, 1.0)]))
    outcome = run(programme, solver, gap=0.0)
    assert outcome.status == "solved", outcome
    return {
        place: _mixed(rows, [max(0.0, float(shares[place, r].varValue)) for r in range(len(rows))])
        for place in places
    }


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

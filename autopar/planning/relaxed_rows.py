"""The linear programme behind `relaxed` and its dual values: by HiGHS itself, which takes matrices,
or by CBC through PuLP."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
import pulp
from numpy.typing import NDArray

from autopar.planning.quiet_highs import QuietHighs
from autopar.planning.solvers import duals

Name = tuple[str, int, int]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """Σ columns · y + Σ others · variable ≥ right (or `equal` to it); no columns: none counts."""

    name: Name
    columns: Floats
    others: Mapping[str, float]
    right: float
    equal: bool = False


@dataclass(frozen=True)
class Linear:
    """Minimise Σ columns · y + Σ objective · variable over the rows, all at least 0 but those that
    are `free`. `names`: the variables beside y."""

    names: Sequence[str]
    free: Sequence[str]
    objective: Mapping[str, float]
    columns: Floats
    rows: Sequence[Row]


Duals = tuple[dict[Name, float], float]
"""Dual values of the rows, and the least value."""


def solved_duals(linear: Linear, solver: str) -> Duals | None:
    """The dual values; None where no values satisfy the rows."""
    return _by_highs(linear) if solver == "highs" else _by_pulp(linear, solver)


def _by_highs(linear: Linear) -> Duals | None:
    names, columns, rows = linear.names, linear.columns, linear.rows
    count, place = len(columns), {name: len(columns) + k for k, name in enumerate(names)}
    table = np.zeros((len(rows), count + len(names)))
    for r, row in enumerate(rows):
        if len(row.columns):
            table[r, :count] = row.columns
        for name, factor in row.others.items():
            table[r, place[name]] = factor
    where = np.nonzero(table)
    right = np.array([row.right for row in rows])
    most = np.where([row.equal for row in rows], right, np.inf)
    programme = highspy.HighsLp()
    programme.num_col_, programme.num_row_ = table.shape[1], table.shape[0]
    programme.col_cost_ = np.concatenate(
        [columns, [linear.objective.get(name, 0.0) for name in names]]
    )
    programme.col_lower_ = np.array(
        [0.0] * count + [-np.inf if name in linear.free else 0.0 for name in names]
    )
    programme.col_upper_ = np.full(table.shape[1], np.inf)
    programme.row_lower_, programme.row_upper_ = right, most
    programme.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    programme.a_matrix_.start_ = np.searchsorted(where[0], np.arange(len(rows) + 1))
    programme.a_matrix_.index_ = where[1]
    programme.a_matrix_.value_ = table[where]
    infeasible = (
        highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,  # no objective here falls for ever
    )
    highs = _run(programme, "choose")
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        # With presolve it has lost solutions, or its way, now and then.
        highs = _run(programme, "off")
    if highs.getModelStatus() in infeasible:
        return None
    # Any dual values give a bound: these are no worse where it stopped before it was sure.
    found = highs.getSolution().row_dual
    values = {row.name: float(x) for row, x in zip(rows, found, strict=True)}
    return values, float(highs.getInfo().objective_function_value)


def _run(programme: highspy.HighsLp, presolve: str) -> Any:
    highs: Any = QuietHighs()  # type: ignore[no-untyped-call]
    options = {"output_flag": False, "parallel": "off", "random_seed": 0, "presolve": presolve}
    for option, value in options.items():
        highs.setOptionValue(option, value)
    highs.passModel(programme)
    highs.run()
    return highs


def _by_pulp(linear: Linear, solver: str) -> Duals | None:
    columns, rows = linear.columns, linear.rows
    model = pulp.LpProblem("relaxed", pulp.LpMinimize)
    taken = [model.add_variable(f"y_{j:05}", 0.0) for j in range(len(columns))]
    others = {
        name: model.add_variable(name, None if name in linear.free else 0.0)
        for name in linear.names
    }
    texts = {row.name: "_".join(map(str, row.name)) for row in rows}
    for row in rows:
        terms = [(y, float(x)) for y, x in zip(taken, row.columns, strict=False) if x]
        terms += [(others[name], factor) for name, factor in row.others.items()]
        sense = pulp.LpConstraintEQ if row.equal else pulp.LpConstraintGE
        expression = pulp.LpAffineExpression(terms)
        model.addConstraint(pulp.LpConstraint(expression, sense, texts[row.name], float(row.right)))
    costs = [(y, float(x)) for y, x in zip(taken, columns, strict=True) if x]
    costs += [(others[name], factor) for name, factor in linear.objective.items() if factor]
    model.setObjective(pulp.LpAffineExpression(costs))
    found = duals(model, solver, texts.values())
    if found is None:
        return None
    return {name: found[text] for name, text in texts.items()}, float(pulp.value(model.objective))

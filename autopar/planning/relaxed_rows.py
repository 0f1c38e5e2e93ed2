"""The linear programme behind `relaxed`, in PuLP, and its dual values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pulp
from numpy.typing import NDArray

from autopar.planning.solvers import duals

Name = tuple[str, int, int]


@dataclass(frozen=True)
class Row:
    """Σ columns · y + Σ others · variable ≥ right (or `equal` to it); no columns: none counts."""

    name: Name
    columns: NDArray[np.float64]
    others: Mapping[str, float]
    right: float
    equal: bool = False


def solved_duals(
    names: Sequence[str],
    objective: Mapping[str, float],
    columns: NDArray[np.float64],
    rows: Sequence[Row],
    solver: str,
) -> tuple[dict[Name, float], float] | None:
    """Dual values of the rows, and the least value of Σ columns · y + Σ objective · variable, all
    at least 0; None where no values satisfy the rows."""
    model = pulp.LpProblem("relaxed", pulp.LpMinimize)
    taken = [model.add_variable(f"y_{j:05}", 0.0) for j in range(len(columns))]
    others = {name: model.add_variable(name, 0.0) for name in names}
    texts = {row.name: "_".join(map(str, row.name)) for row in rows}
    for row in rows:
        terms = [(y, float(x)) for y, x in zip(taken, row.columns, strict=False) if x]
        terms += [(others[name], factor) for name, factor in row.others.items()]
        sense = pulp.LpConstraintEQ if row.equal else pulp.LpConstraintGE
        expression = pulp.LpAffineExpression(terms)
        model.addConstraint(pulp.LpConstraint(expression, sense, texts[row.name], float(row.right)))
    costs = [(y, float(x)) for y, x in zip(taken, columns, strict=True) if x]
    costs += [(others[name], factor) for name, factor in objective.items() if factor]
    model.setObjective(pulp.LpAffineExpression(costs))
    found = duals(model, solver, texts.values())
    if found is None:
        return None
    return {name: found[text] for name, text in texts.items()}, float(pulp.value(model.objective))

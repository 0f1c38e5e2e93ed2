"""Runs one PuLP model on HiGHS or CBC and says what was proven; only here, and for bounds
in `relaxed_rows`, is a solver known.

Both work on one thread from a fixed seed and stop on the gap, so the same model has the same
answer. A time limit breaks that promise, so there is none unless the user asks for it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import pulp

from autopar.errors import AutoparError
from autopar.planning.deadline import after
from autopar.planning.quiet_highs import NODES_RAN_OUT, QuietPulpHighs

_CBC_INCREMENT = 1e-5  # CBC's default: what is better by less it doesn't look for
_TOLERANCE = 1e-7  # of rows in a unit of thousands: bounds are then sure to 1e-9
_FEASIBLE = 2  # highspy.SolutionStatus.kSolutionStatusFeasible


@dataclass(frozen=True)
class Outcome:
    """What was proven about a minimisation.

    "solved": the variables hold a solution within the gap. "stopped": the time or the nodes ran
    out, and they hold one if `has_values`. "infeasible": there is none. No solution's objective is
    below `bound` (in the model's unit; -inf where nothing was proven).
    """

    status: Literal["solved", "stopped", "infeasible"]
    has_values: bool
    bound: float


@dataclass(frozen=True)
class Limits:
    """When a solver stops; the arguments of `run`."""

    gap: float = 0.0
    gap_abs: float = 0.0
    time_limit_s: float | None = None
    most_nodes: int | None = None
    sure: bool = True


def check_solver(solver: str) -> None:
    """Errors: AutoparError where no solver is called so."""
    if solver not in ("highs", "cbc"):
        raise AutoparError(f'no solver is called {solver!r}: choose "highs" or "cbc"')


def run(
    model: pulp.LpProblem,
    solver: str,
    *,
    gap: float,
    gap_abs: float = 0.0,
    time_limit_s: float | None = None,
    most_nodes: int | None = None,
    sure: bool = True,
) -> Outcome:
    """Minimise until objective − bound <= max(gap · |objective|, gap_abs), or until so many nodes
    of the search tree were looked at: the same on any machine, which a time limit isn't. Not
    `sure`: that there is no solution needn't be proven twice.

    Errors: AutoparError where `solver` is neither "highs" nor "cbc".
    """
    limits = Limits(gap, gap_abs, time_limit_s, most_nodes, sure)
    if solver == "highs":
        return _run_highs(model, limits)
    check_solver(solver)
    return _run_cbc(model, limits)


def _run_highs(model: pulp.LpProblem, limits: Limits) -> Outcome:
    deadline = after(limits.time_limit_s)
    status = _solve_highs(model, limits, "choose")
    if status == "Infeasible" and limits.sure:
        # HiGHS 1.15's presolve said so of a programme with solutions: only the search proves it.
        status = _solve_highs(model, replace(limits, time_limit_s=deadline.left_s), "off")
    highs: Any = model.solverModel
    info = highs.getInfo()
    if status == "Infeasible":
        return Outcome("infeasible", False, math.inf)
    if status == "Optimal":
        is_mip = any(variable.cat == pulp.LpInteger for variable in model.variables())
        bound = info.mip_dual_bound if is_mip else info.objective_function_value
        return Outcome("solved", True, bound)
    if status in ("Time limit reached", NODES_RAN_OUT):
        return Outcome("stopped", info.primal_solution_status == _FEASIBLE, info.mip_dual_bound)
    raise AssertionError(f"HiGHS ended with {status!r} on the programme {model.name!r}")


def _solve_highs(model: pulp.LpProblem, limits: Limits, presolve: str) -> str:
    """HiGHS's own status: PuLP calls a time limit "Optimal", with values (zeros) where nothing was
    found."""
    # Not threads=1: HiGHS refuses to run where this process has used it with another number.
    solver = QuietPulpHighs(
        msg=False,
        gapRel=limits.gap,
        gapAbs=limits.gap_abs,
        timeLimit=limits.time_limit_s,
        parallel="off",
        random_seed=0,
        presolve=presolve,
        mip_feasibility_tolerance=_TOLERANCE,
        **({} if limits.most_nodes is None else {"mip_max_nodes": limits.most_nodes}),
    )
    model.solve(solver)
    highs: Any = model.solverModel
    return str(highs.modelStatusToString(highs.getModelStatus()))


def _run_cbc(model: pulp.LpProblem, limits: Limits) -> Outcome:
    model.solve(_cbc(limits))
    if model.status == pulp.LpStatusInfeasible:
        return Outcome("infeasible", False, math.inf)
    objective = pulp.value(model.objective)
    if model.sol_status == pulp.LpSolutionOptimal:
        allowed = max(limits.gap * abs(objective), limits.gap_abs, _CBC_INCREMENT)
        return Outcome("solved", True, objective - allowed)
    stopped = (pulp.LpSolutionIntegerFeasible, pulp.LpSolutionNoSolutionFound)
    assert model.sol_status in stopped, f"CBC ended with {model.sol_status} on {model.name!r}"
    has_values = model.sol_status == pulp.LpSolutionIntegerFeasible
    return Outcome("stopped", has_values, _relaxed_bound(model, limits.time_limit_s))


def _relaxed_bound(model: pulp.LpProblem, time_limit_s: float | None) -> float:
    """The linear relaxation's optimum: PuLP doesn't hand out CBC's own bound. Keeps the values."""
    values = {variable: variable.varValue for variable in model.variables()}
    model.solve(_cbc(Limits(time_limit_s=time_limit_s), mip=False))
    bound = -math.inf
    if model.sol_status == pulp.LpSolutionOptimal:
        bound = pulp.value(model.objective)
    for variable, value in values.items():
        variable.varValue = value
    return bound


def _cbc(limits: Limits, mip: bool = True) -> pulp.COIN_CMD:
    # Not threads=1: with any number CBC starts a pool, which now and then waits 10 s for nothing.
    # No preprocessing: CBC 2.10.3's lost the optimum of 1 in 700 small problems.
    return pulp.COIN_CMD(
        path=pulp.PULP_CBC_CMD.pulp_cbc_path,
        msg=False,
        mip=mip,
        gapRel=limits.gap,
        gapAbs=limits.gap_abs,
        timeLimit=limits.time_limit_s,
        maxNodes=limits.most_nodes,
        options=["randomSeed 1", "randomCbcSeed 1", "preprocess off"],
    )


def duals(model: pulp.LpProblem, solver: str, rows: Iterable[str]) -> Mapping[str, float] | None:
    """The dual values of rows of a linear programme, by name; None where it has no solution."""
    if solver == "highs":
        status = _solve_highs(model, Limits(), "choose")
        if status in ("Infeasible", "Primal infeasible or unbounded"):
            return None  # no objective here falls for ever
        assert status == "Optimal", status
    else:
        model.solve(_cbc(Limits(), mip=False))
        if model.status == pulp.LpStatusInfeasible:
            return None
        assert model.status == pulp.LpStatusOptimal, model.status
    return {name: model.get_constraint_by_name(name).pi for name in rows}

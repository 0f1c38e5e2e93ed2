"""HiGHS without its header: it prints one on stdout when callbacks are set, which `highspy.Highs()`
does before anyone can turn its output off."""

from typing import Any

import highspy
import pulp

NODES_RAN_OUT = "Solution limit reached"
"""HiGHS's word for several limits."""


class QuietHighs(highspy.Highs):
    """HiGHS that says nothing from its first moment."""

    def enableCallbacks(self) -> None:  # noqa: N802 (highspy's name)
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


class QuietPulpHighs(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's interface to it, which knows a limit of nodes too."""

    def createAndConfigureSolver(self, lp: Any) -> None:  # noqa: N802 (PuLP's name)
        highs: Any = QuietHighs()  # type: ignore[no-untyped-call]
        options = {
            "mip_rel_gap": self.gapRel,
            "mip_abs_gap": self.gapAbs,
            "time_limit": None if self.timeLimit is None else float(self.timeLimit),
            **self.optionsDict,
        }
        for option, value in options.items():
            if value is not None:
                highs.setOptionValue(option, value)
        lp.solverModel = highs

    def findSolutionValues(self, lp: Any) -> Any:  # noqa: N802 (PuLP's name)
        try:
            return super().findSolutionValues(lp)
        except KeyError:  # of the status: the values are there
            status = lp.solverModel.getModelStatus()
            if lp.solverModel.modelStatusToString(status) != NODES_RAN_OUT:
                raise
            return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible

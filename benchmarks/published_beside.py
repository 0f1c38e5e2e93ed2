"""The lines of published configurations, case by case: pinned rows beside the free plan."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from published_plans_why import Line

LARGEST = 10
WHY = "why "
"""Begins the name, among a case's, of what each pin of a row costs."""


@dataclass(frozen=True)
class Beside:
    """A case's lines: those pinned, and the free plan, where it was asked for."""

    name: str
    rows: tuple[Line, ...]
    free: Line | None
    rungs: Mapping[str, Sequence[Line]]
    """By row: its plans with one pin less each."""

    @property
    def best(self) -> Line | None:
        """The fastest row that fits."""
        able = [row for row in self.rows if "step_s" in row]
        return min(able, key=lambda row: row["step_s"], default=None)

    @property
    def free_s(self) -> float | None:
        """The free plan's step, where there is one."""
        return None if self.free is None else self.free.get("step_s")

    @property
    def ratio(self) -> float | None:
        """The best row's step over the free plan's."""
        best, free_s = self.best, self.free_s
        return None if best is None or free_s is None else best["step_s"] / free_s


def by_case(lines: Sequence[Line]) -> tuple[Beside, ...]:
    """Lines by what they have one free plan for."""
    rows: dict[str, list[Line]] = defaultdict(list)
    free: dict[str, Line] = {}
    rungs: dict[str, dict[str, Sequence[Line]]] = defaultdict(dict)
    for line in lines:
        case, _, what = line["id"].rpartition("/")
        if what == "free":
            free[case] = line
        elif what.startswith(WHY):
            rungs[case][what.removeprefix(WHY)] = line.get("rungs", ())
        else:
            rows[case].append(line)
    return tuple(Beside(case, tuple(rows[case]), free.get(case), rungs[case]) for case in rows)


def remarkable(found: Sequence[Beside]) -> tuple[Beside, ...]:
    """The cases with the largest differences, and the one with the largest of each source."""
    able = [one for one in found if one.ratio is not None]
    able.sort(key=lambda one: -(one.ratio or 0.0))
    sources: dict[str, Beside] = {}
    for one in able:
        sources.setdefault(source_of(one), one)
    return tuple({one.name: one for one in [*able[:LARGEST], *sources.values()]}.values())


def source_of(one: Beside) -> str:
    """Whose figures a case is of."""
    return one.name.partition("/")[0]

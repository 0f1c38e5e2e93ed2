"""Published configurations beside free plans, as the tables of docs/published-plans.md."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plan_cases import apart, decided, spent
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from autopar.text import seconds, size

Line = Mapping[str, Any]
LARGEST = 10
GAP = 1e-3
"""By which a search may miss the best plan."""

WIDTH = 10_000
"""Of a console that wraps nothing."""


@dataclass(frozen=True)
class Beside:
    """A case's lines: those pinned, and the free plan, where it was asked for."""

    name: str
    rows: tuple[Line, ...]
    free: Line | None

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
    for line in lines:
        case, _, what = line["id"].rpartition("/")
        rows[case] += [line] if what != "free" else []
        if what == "free":
            free[case] = line
    return tuple(Beside(case, tuple(found), free.get(case)) for case, found in rows.items())


def show(lines: Sequence[Line], every: bool) -> None:
    """All tables; with `every`, each row too."""
    console = Console(width=WIDTH, highlight=False, color_system=None)
    found = by_case(lines)
    console.print(_sources(found), _faults(found), _slower(found), _largest(found), sep="\n")
    if every:
        console.print(_every(found))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=f"{title}\n", title_justify="left", title_style="", box=MARKDOWN)
    for name in columns:
        table.add_column(name)
    return table


def _sources(found: Sequence[Beside]) -> Table:
    table = _table(
        "## By source",
        *("source", "rows", "solve", "don't fit", "can't run", "free plans", "at least as fast"),
        *("best row over free plan: median", "largest", "largest proven gap"),
    )
    sources: dict[str, list[Beside]] = defaultdict(list)
    for one in found:
        sources[one.name.partition("/")[0]].append(one)
    for source, cases in sources.items():
        rows = [row for one in cases for row in one.rows]
        kinds = Counter(_kind(row) for row in rows)
        ratios = [one.ratio for one in cases if one.ratio is not None]
        gaps = [one.free["gap"] for one in cases if one.free and "gap" in one.free]
        asked = [one for one in cases if one.free is not None]
        fast = [ratio for ratio in ratios if ratio >= 1 - GAP]
        table.add_row(
            source,
            *(str(n) for n in (len(rows), kinds["solves"], kinds["short"], kinds["can't"])),
            f"{sum(one.free_s is not None for one in asked)} of {len(cases)}",
            f"{len(fast)} of {len(ratios)}",
            f"{statistics.median(ratios):.3f}" if ratios else "–",
            f"{max(ratios):.3f}" if ratios else "–",
            f"{max(gaps):.2%}" if gaps else "–",
        )
    return table


def _kind(row: Line) -> str:
    if "step_s" in row:
        return "solves"
    return "short" if row.get("short_bytes") else "can't"


def _faults(found: Sequence[Beside]) -> Table:
    table = _table("## Rows that have no plan", "source", "rows", "why", "for example")
    reasons: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for one in found:
        for row in one.rows:
            if "step_s" not in row:
                reasons[one.name.partition("/")[0], _reason(row)].append(row)
    for (source, why), rows in sorted(reasons.items()):
        first = rows[0]["id"].rpartition("/")[2]
        if rows[0].get("short_bytes"):
            short = [row["short_bytes"] for row in rows]
            why += f": by {size(min(short))} to {size(max(short))}"
            spare = [row["roomy"].get("memory", {}).get("fragmentation", 0) for row in rows]
            fit = sum(a <= b for a, b in zip(short, spare, strict=True))
            why += f"; {fit} would if memory weren't fragmented"
        table.add_row(source, str(len(rows)), why, first)
    return table


def _reason(row: Line) -> str:
    if "ended" in row:
        return str(row["ended"])
    if row.get("short_bytes"):
        again = any(name.startswith("recompute") for name in row["roomy"]["used"])
        open_ = any("recompute" in text for text in row["assumed"])
        how = "whatever is recomputed" if open_ else "with" if again else "without"
        return f"doesn't fit {how}{'' if open_ else ' recompute'}"
    return str(row["fault"]).partition("\n")[0][:200]


def _slower(found: Sequence[Beside]) -> Table:
    table = _table(
        "## Free plans that are slower than a row", "case", "row", "free", "gap", "the row has"
    )
    for one in found:
        if one.ratio is not None and one.ratio < 1 - GAP:
            assert one.best is not None and one.free is not None
            table.add_row(
                one.name,
                f"{seconds(one.best['step_s'])}: {decided(one.best)}",
                f"{seconds(one.free['step_s'])}: {decided(one.free)}",
                f"{one.free['gap']:.2%}",
                apart(one.best, one.free),
            )
    return table


def _largest(found: Sequence[Beside]) -> Table:
    table = _table(
        "## The ten largest differences",
        *("case", "best row over free", "the best row", "the free plan", "the row has"),
    )
    able = [one for one in found if one.ratio is not None]
    for one in sorted(able, key=lambda one: -(one.ratio or 0))[:LARGEST]:
        assert one.best is not None and one.free is not None
        table.add_row(
            f"{one.best['group']} × {one.best['cluster']}",
            f"{one.ratio:.3f}",
            f"{seconds(one.best['step_s'])}: {decided(one.best)} ({spent(one.best)})",
            f"{seconds(one.free['step_s'])}: {decided(one.free)} ({spent(one.free)})",
            apart(one.best, one.free),
        )
    return table


def _every(found: Sequence[Beside]) -> Table:
    table = _table("## Every row", "row", "measured", "pinned", "free", "ratio", "pinned plan")
    for cells in (cells for one in found for cells in _rows(one)):
        table.add_row(*cells)
    return table


def _rows(one: Beside) -> Iterator[tuple[str, ...]]:
    free = "–" if one.free_s is None else seconds(one.free_s)
    for row in one.rows:
        measured = "–" if row.get("measured_s") is None else seconds(row["measured_s"])
        name = row["id"].rpartition("/")[2]
        if "step_s" not in row:
            yield name, measured, "none", free, "–", _reason(row)
            continue
        ratio = "–" if one.free_s is None else f"{row['step_s'] / one.free_s:.3f}"
        yield name, measured, seconds(row["step_s"]), free, ratio, decided(row)

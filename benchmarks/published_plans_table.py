"""Published configurations beside free plans, as the tables of docs/published-plans.md."""

import io
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from plan_cases import apart, decided
from published_beside import LARGEST, Beside, by_case, remarkable, source_of
from published_plans_why import KINDS, Line, explain, share_cells
from published_runs import Run
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from autopar.text import seconds, size

GAP = 1e-3
"""By which a search may miss the best plan."""

WIDTH = 10_000
"""Of a console that wraps nothing."""


def show(lines: Sequence[Line], runs: Sequence[Run], every: bool) -> None:
    """All tables, or with `every` that of each row. `runs`: all that is published."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, highlight=False, color_system=None)
    found = by_case(lines)
    console.print(_commits(lines))
    if every:
        console.print(_every(found))
    else:
        console.print(_left_out(runs), _sources(found), _won(found), sep="\n")
        console.print(_faults(found), _slower(found), sep="\n")
        _largest(found, console)
    lines_of = [line.rstrip() for line in out.getvalue().splitlines()]
    if every:  # so long that its columns aren't filled up
        lines_of = [re.sub("-{4,}", "---", re.sub(" {2,}", " ", line)) for line in lines_of]
    text = "\n".join(lines_of)
    print(re.sub("\n{3,}", "\n\n", text))


def _commits(lines: Sequence[Line]) -> str:
    counts = Counter(line.get("commit", "?") for line in lines)
    told = ", ".join(f"{commit} ({count})" for commit, count in counts.most_common())
    return f"Planned at commit (lines): {told}.\n"


def _left_out(runs: Sequence[Run]) -> Table:
    able = [run for run in runs if not run.unsupported]
    title = f"## Left out: {len(runs) - len(able)} of {len(runs)} published configurations"
    table = _table(title, "why", "configurations", "of")
    why: dict[str, Counter[str]] = defaultdict(Counter)
    for run in runs:
        if run.unsupported:
            why[run.unsupported][run.source] += 1
    for text, sources in sorted(why.items(), key=lambda item: -item[1].total()):
        of = ", ".join(f"{source} {count}" for source, count in sources.most_common())
        table.add_row(text, str(sources.total()), of)
    return table


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
        sources[source_of(one)].append(one)
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


def _won(found: Sequence[Beside]) -> Table:
    table = _table(
        "## Where the seconds are won: mean share of what free plans win, where it is over 1 %",
        *("source", "cases", *KINDS),
    )
    sources: dict[str, list[tuple[Line, Line]]] = defaultdict(list)
    for one in found:
        if one.ratio is not None and one.ratio > 1.01 and one.best and one.free:
            sources[source_of(one)].append((one.best, one.free))
    for source, pairs in sources.items():
        table.add_row(source, str(len(pairs)), *share_cells(pairs))
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
                reasons[source_of(one), _reason(row)].append(row)
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
        "## Free plans that are slower than a row",
        *("case", "row", "free", "the search", "the row has"),
    )
    for one in found:
        if one.ratio is not None and one.ratio < 1 - GAP:
            assert one.best is not None and one.free is not None
            table.add_row(
                one.name,
                f"{seconds(one.best['step_s'])}: {decided(one.best)}",
                f"{seconds(one.free['step_s'])}: {decided(one.free)}",
                _search(one.best, one.free),
                apart(one.best, one.free),
            )
    return table


def _search(row: Line, free: Line) -> str:
    bound_s = free["step_s"] * (1 - free["gap"])
    if row["step_s"] < bound_s * (1 - 1e-9):
        return f"is wrong: its bound is {seconds(bound_s)}"
    done = f"{free['solved']} of {free['candidates']} settings solved in {free['took_s']:.0f} s"
    return f"{done}; nothing below {seconds(bound_s)} (gap {free['gap']:.1%})"


def _largest(found: Sequence[Beside], console: Console) -> None:
    """Each of the largest differences with its reasons."""
    chosen = remarkable(found)
    console.print("## The ten largest differences\n")
    for place, one in enumerate(chosen):
        if place == LARGEST:
            console.print("## The largest of each other source\n")
        assert one.best is not None and one.free is not None
        rungs = one.rungs.get(one.best["id"].rpartition("/")[2], ())
        explain(one.best, one.free, rungs, console)


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

"""Known answers beside plans, as the text of docs/known-answers.md."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from known_cases import CASES, KEPT, RIVALS, Case
from plan_cases import apart, decided, spent
from published_plans_why import differs, won
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from autopar.text import seconds, size

Lines = Mapping[str, Mapping[str, Any]]
GAP = 1e-3
"""By which a search may miss the best plan."""

WIDTH = 10_000
"""Of a console that wraps nothing."""


def show(lines: Lines) -> None:
    """A table of all cases, then each with its plans and its reason."""
    console = Console(width=WIDTH, highlight=False, color_system=None)
    console.print(_summary(lines))
    for case in CASES:
        if f"{case.name}/free" in lines:
            console.print("\n".join(_case(case, lines)), markup=False)


def verdict(case: Case, lines: Lines) -> str:
    """Whether the free plan is the known answer, and if not, what it gains."""
    free = lines.get(f"{case.name}/free", {})
    known = lines.get(f"{case.name}/known", {})
    if "step_s" not in free:
        return "no plan"
    times = known["step_s"] / free["step_s"] if "step_s" in known else math.inf
    same = "yes" if case.holds(free) else "no"
    if times < 1 - free["gap"]:
        return f"{same}, and a fault: the known answer is faster than the search's bound"
    if times < 1 - GAP:
        return f"{same}, but time ran out: the known answer is {1 - times:.1%} faster"
    if same == "yes":
        return same
    gain = "it doesn't fit" if math.isinf(times) else f"{times - 1:.1%} faster than it"
    return f"no: {gain}"


def _summary(lines: Lines) -> Table:
    table = Table(box=MARKDOWN)
    for name in ("model", "cluster", "batch", "known answer", "so planned", "plan", "gap", "in"):
        table.add_column(name)
    for case in CASES:
        free = lines.get(f"{case.name}/free")
        if free is None:
            continue
        plan = decided(free) if "step_s" in free else free.get("ended") or free["fault"]
        gap = f"{free['gap']:.2%}" if "gap" in free else "–"
        took = f"{free.get('took_s', 0):.0f} s"
        head = case.model, case.cluster, str(case.samples), case.answer
        table.add_row(*head, verdict(case, lines), plan, gap, took)
    return table


def _case(case: Case, lines: Lines) -> Iterator[str]:
    free = lines[f"{case.name}/free"]
    yield f"\n### {case.model} on {case.cluster}: {case.answer}?\n"
    yield f"{case.source}.\n"
    if "step_s" not in free:
        yield f"- no plan: {free.get('ended') or free['fault']}"
        return
    yield f"- plan: {_line(free)}"
    for what in case.pins:
        if what != "free" and (other := lines.get(f"{case.name}/{what}")):
            yield f"- {what.replace('_', ' ')}: {_beside(other, free)}"
    for what in RIVALS:
        if other := lines.get(f"{case.name}/{what}"):
            yield f"- {what} mesh: {_beside(other, free)}"
    kept = lines.get(f"{case.name}/{KEPT}", {})
    if "step_s" in kept:
        needs = size(kept["memory_bytes"])
        yield f"- without recompute its mesh needs {needs}: {_line(kept)}"


def _line(one: Mapping[str, Any]) -> str:
    return f"{seconds(one['step_s'])}, {decided(one)} ({spent(one)})"


def _beside(other: Mapping[str, Any], free: Mapping[str, Any]) -> str:
    if "step_s" in other:
        times = other["step_s"] / free["step_s"]
        is_slower = times > 1 + GAP and "parts" in other and "parts" in free
        why = f"{differs(other, free)}. {won(other, free)}" if is_slower else apart(other, free)
        return f"{_line(other)}: {times:.3f} times the plan's step: {why}"
    if "roomy" in other:
        roomy = other["roomy"]
        short = size(other["short_bytes"])
        return f"doesn't fit by {short}; with more memory {_line(roomy)}: {apart(roomy, free)}"
    return str(other.get("ended") or other["fault"]).partition("\n")[0]

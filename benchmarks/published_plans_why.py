"""Why a free plan is faster than a published configuration, in words and figures that follow from
both plans' lines: what was decided otherwise, where the seconds are won, and what each pin costs.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plan_cases import Asked, Found, decided, planned
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from step_parts import AGAIN, EXPOSED, OPTIMIZER, OTHERS, PRODUCTS, WAITING, Parts

from autopar.text import seconds, short_mesh, size

Line = Mapping[str, Any]
PINS = (
    ("recompute", ("recompute", "layers")),
    ("ZeRO", ("zero",)),
    ("splits of sequences", ("sequence", "context")),
    ("microbatches and schedule", ("microbatches", "pipeline")),
)
"""What is freed one after the other; the mesh is last, which leaves the free plan."""
EXPOSED_ALL = "exposed communication"
KINDS = (PRODUCTS, OTHERS, AGAIN, EXPOSED_ALL, WAITING, OPTIMIZER)
LEAST = 5e-3
"""Of a step: what is worth a word."""


def freed(pins: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What is no longer pinned, with the pins that are left; what pins nothing is left out."""
    left = dict(pins)
    for name, keys in PINS:
        if any(key in left for key in keys):
            left = {key: value for key, value in left.items() if key not in keys}
            yield name, left


def ladder(asked: Asked, pins: Mapping[str, Any], limit_s: float) -> list[Found]:
    """A configuration's plans with one pin less each; "freed" says which."""
    return [{"freed": name, **planned(asked, left, limit_s)} for name, left in freed(pins)]


# ---------------------------------------------------------------- as text


def explain(row: Line, free: Line, rungs: Sequence[Line], console: Console) -> None:
    """Both plans, what differs, and where the seconds are won."""
    ratio, name = row["step_s"] / free["step_s"], row["id"].rpartition("/")[2]
    console.print(f"### {row['group']} × {row['cluster']}: {ratio:.3f} times as fast\n")
    console.print(f"{name}: {decided(row)}; {size(row['memory_bytes'])} a device.\n")
    console.print(f"Free: {decided(free)}; {size(free['memory_bytes'])} a device.\n")
    console.print(f"Otherwise: {differs(row, free)}. {won(row, free)}\n")
    if rungs:
        console.print(f"Pins lifted one after the other: {steps(row, free, rungs)}.\n")
    table = Table(box=MARKDOWN)
    for column in ("part of the step", "pinned", "free", "won"):
        table.add_column(column)
    for part, before_s, after_s in moved(row["parts"], free["parts"]):
        less = f"{'' if before_s >= after_s else '−'}{seconds(abs(before_s - after_s))}"
        table.add_row(part, seconds(before_s), seconds(after_s), less)
    console.print(table)


def differs(row: Line, free: Line) -> str:
    """What the free plan decides otherwise."""
    words = []
    theirs, own = _families(row), _families(free)
    for name, before, after in (
        ("mesh", short_mesh(row["axes"]), short_mesh(free["axes"])),
        ("schedule", row["schedule"] or "none", free["schedule"] or "none"),
        ("microbatches", row["microbatches"], free["microbatches"]),
    ):
        if before != after:
            words.append(f"{name} {before} → {after}")
    for name in sorted({*theirs, *own}):
        before, after = theirs.get(name, "none"), own.get(name, "none")
        if before != after:
            words.append(f"{name} {before} → {after}")
    return "; ".join(words) or "the same decisions"


def _families(one: Line) -> Mapping[str, str]:
    """A plan's strategies with their options, by name; not those that the mesh says."""
    found: dict[str, list[str]] = {}
    for text, count in one["used"].items():
        name, _, options = text.partition(" ")
        if name not in ("data", "expert", "pipeline"):
            found.setdefault(name, []).append(f"{options} ×{count}".strip())
    return {name: ", ".join(texts) for name, texts in found.items()}


def moved(row: Parts, free: Parts) -> Sequence[tuple[str, float, float]]:
    """Parts with both plans' seconds, the most that is won first; trifles left out."""
    names = dict.fromkeys([*row, *free])
    every = [(name, row.get(name, 0.0), free.get(name, 0.0)) for name in names]
    least = LEAST * sum(free.values())
    able = [one for one in every if max(one[1], one[2]) > least]
    return sorted(able, key=lambda one: one[2] - one[1])


def won(row: Line, free: Line) -> str:
    """Of the seconds between two plans, which part is won where, and what is paid for it."""
    apart_s = row["step_s"] - free["step_s"]
    found = moved(row["parts"], free["parts"])
    least = LEAST * free["step_s"]
    less = [(name, before - after) for name, before, after in found if before - after > least]
    more = [(name, after - before) for name, before, after in found if after - before > least]
    gains = ", ".join(f"{name} {seconds(value)} ({value / apart_s:.0%})" for name, value in less)
    costs = ", ".join(f"{name} {seconds(value)}" for name, value in reversed(more))
    text = f"Of {seconds(apart_s)} it wins {gains}" if less else f"It wins {seconds(apart_s)}"
    return f"{text}; it pays {costs}." if more else f"{text}."


def shares(pairs: Sequence[tuple[Line, Line]]) -> Mapping[str, float]:
    """Of the seconds that free plans win over rows (both of each pair), the share of each part; all
    communication is one. A case counts as much as another, however long its step."""
    total: dict[str, float] = defaultdict(float)
    for row, free in pairs:
        apart_s = row["step_s"] - free["step_s"]
        for name in {*row["parts"], *free["parts"]}:
            less_s = row["parts"].get(name, 0.0) - free["parts"].get(name, 0.0)
            part = EXPOSED_ALL if name.startswith(EXPOSED) else name
            total[part] += less_s / apart_s / len(pairs)
    return total


def share_cells(pairs: Sequence[tuple[Line, Line]]) -> Sequence[str]:
    """The shares in KINDS' order, as text."""
    found = shares(pairs)
    return [f"{found.get(kind, 0.0):.0%}" for kind in KINDS]


def steps(row: Line, free: Line, rungs: Sequence[Line]) -> str:
    """The step's seconds as one pin after the other is lifted; what a pin costs is the seconds that
    its lifting wins."""
    words, before_s = [f"pinned {seconds(row['step_s'])}"], row["step_s"]
    for name, one in [*((r["freed"], r) for r in rungs), ("mesh", free)]:
        if "step_s" not in one:
            words.append(f"without that of {name}: none ({one['fault'].partition(chr(10))[0]})")
            continue
        apart_s = one["step_s"] - before_s
        sign = "−" if apart_s <= 0 else "+"
        words.append(f"{name} {seconds(one['step_s'])} ({sign}{seconds(abs(apart_s))})")
        before_s = one["step_s"]
    return " → ".join(words)

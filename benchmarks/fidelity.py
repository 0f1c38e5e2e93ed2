"""Predicts published runs with the code that plans, and compares: step time, memory, order.

    python benchmarks/fidelity.py                    # every source, one line each
    python benchmarks/fidelity.py --source bloom -v  # one source, run by run
    python benchmarks/fidelity_fit.py                # fits, leaves sources and terms out

Sources: benchmarks/data/README.md.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from fidelity_predict import Outcome, Prepared, constants, outcome, prepare, preset_of, stated
from published_runs import Run, read_runs
from rich.console import Console
from rich.table import Table

GUESSED = "parallel.recompute isn't stated"
"""What no run of a source says is assumed alike for all of it (nothing is recomputed)."""


def usable(run: Run) -> bool:
    """Whether its time is known, and every field but what was recomputed."""
    return run.step_s is not None and not run.unsupported and not set(run.assumed) - {GUESSED}


def prepare_all(runs: Sequence[Run], jobs: int) -> list[Prepared | str]:
    """In the order of `runs`; those of one model together, which is captured once."""
    order = sorted(range(len(runs)), key=lambda i: (repr(runs[i].shape), runs[i].batch))
    sorted_runs = [runs[i] for i in order]
    if jobs == 1:
        done = [prepare(run) for run in sorted_runs]
    else:
        with ProcessPoolExecutor(jobs) as pool:
            done = list(pool.map(prepare, sorted_runs, chunksize=24))
    found = dict(zip(order, done, strict=True))
    return [found[i] for i in range(len(runs))]


# ---------------------------------------------------------------- scores


def percent(values: Sequence[float]) -> str:
    """The mean, for reading."""
    return f"{100 * statistics.fmean(values):.1f} %" if values else "–"


def errors(outcomes: Sequence[Outcome], half: bool | None = None) -> list[float]:
    """Of the step's time, relative and without sign; of one half, where it is given."""
    chosen = [o for o in outcomes if half is None or o.run.fitted == half]
    return [abs(o.error) for o in chosen if o.error is not None]


def ordered(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Of all pairs that differ by more than 5 %, how many are in the right order."""
    known = [(o.run.step_s, o.step_s) for o in outcomes if o.run.step_s and not o.fault]
    right = pairs = 0
    for i, (true, guess) in enumerate(known):
        for other, its in known[i + 1 :]:
            if max(true, other) > 1.05 * min(true, other):
                pairs += 1
                right += (true > other) == (guess > its)
    return right, pairs


def regret(outcomes: Sequence[Outcome], top: int = 3) -> float:
    """How much slower the best of the predicted `top` is than the best of all, as measured."""
    known = [(o.step_s, o.run.step_s) for o in outcomes if o.run.step_s and not o.fault]
    return min(true for _, true in sorted(known)[:top]) / min(true for _, true in known) - 1


def too_large(one: Outcome) -> bool:
    """Whether the plan would be refused on its device, though it ran."""
    assert one.memory is not None
    return sum(one.memory.values()) > preset_of(one.run).device.memory_bytes


# ---------------------------------------------------------------- tables


def _by_source(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    for source in dict.fromkeys(o.run.source for o in outcomes):
        yield source, [o for o in outcomes if o.run.source == source]


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading)
    return table


def time_table(raw: Sequence[Outcome], fitted: Sequence[Outcome]) -> Table:
    """Errors of step times, before and after the fit. Runs with a field that isn't published are
    lines of their own."""
    table = _table(
        "error of the step's time (mean, absolute)",
        *("source", "runs", "raw", "fitted half", "other half", "bias", "not predicted"),
    )
    for known, note in ((True, ""), (False, ", with a guess")):
        before = [o for o in raw if usable(o.run) == known]
        after = [o for o in fitted if usable(o.run) == known]
        for source, mine in _by_source([o for o in after if o.run.step_s is not None]):
            if not known and all(o.fault for o in mine):
                table.add_row(source, "0", "", "", "", "", str(len(mine)))
                continue
            table.add_row(
                source + note,
                str(len(errors(mine))),
                percent(errors([o for o in before if o.run.source == source])),
                percent(errors(mine, True)),
                percent(errors(mine, False)),
                percent([o.error for o in mine if o.error is not None]),
                str(sum(bool(o.fault) for o in mine)),
            )
    return table


def memory_table(outcomes: Sequence[Outcome]) -> Table:
    """Errors of memory, and how many plans that ran would have been refused."""
    table = _table("memory", "source", "runs", "error", "bias", "called too large, though they ran")
    for source, mine in _by_source([o for o in outcomes if not o.fault]):
        found = [o.memory_error for o in mine if o.memory_error is not None]
        large = sum(too_large(o) for o in mine)
        table.add_row(
            source,
            str(len(found)),
            percent([abs(e) for e in found]),
            percent(found),
            f"{large} of {len(mine)}",
        )
    return table


def order_table(outcomes: Sequence[Outcome]) -> Table:
    """Plans of one model on one cluster: are they in the right order?"""
    table = _table(
        "order within a group of plans",
        *("group", "plans", "pairs in order", "", "best of the top three is off by"),
    )
    for group in dict.fromkeys((o.run.source, o.run.group) for o in outcomes):
        mine = [o for o in outcomes if (o.run.source, o.run.group) == group and o.error is not None]
        if group[0] in ("vtrain_multi", "bloom") and len(mine) >= 6:
            right, pairs = ordered(mine)
            table.add_row(
                group[1],
                str(len(mine)),
                f"{right} / {pairs}",
                f"{100 * right / pairs:.1f} %",
                f"{100 * regret(mine):.2f} %",
            )
    return table


def line(one: Outcome) -> str:
    """One run, for reading."""
    run = one.run
    pins = " ".join(
        f"{key} {value}"
        for key, value in run.pins.items()
        if key != "layers" and value is not False and (key == "zero" or value is True or value != 1)
    )
    if one.fault:
        return f"{run.name}: {one.fault}"
    text = f"{run.name}, {pins}:"
    if one.error is not None and one.seconds is not None:
        parts = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in one.seconds.items())
        text += f" {run.step_s:.3f} s, predicted {one.step_s:.3f} ({100 * one.error:+.1f} %)"
        text += f": {parts}"
    if one.memory_error is not None and run.memory_bytes and one.memory is not None:
        parts = ", ".join(f"{kind} {size / 2**30:.1f}" for kind, size in one.memory.items())
        text += f"; {run.memory_bytes / 2**30:.1f} GiB, predicted {one.counted_bytes / 2**30:.1f} "
        text += f"({100 * one.memory_error:+.1f} %): {parts}"
    return text + "".join(f"; {guess}" for guess in run.assumed)


def main() -> None:
    """Predict and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", default="", help="only sources whose name starts so")
    parser.add_argument("--verbose", "-v", action="store_true", help="every run")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    console = Console(width=160)
    start = time.perf_counter()
    runs = [r for r in read_runs() if r.source.startswith(options.source)]
    prepared = prepare_all(runs, options.jobs)
    raw = [outcome(one, run, stated()) for one, run in zip(prepared, runs, strict=True)]
    fitted = [outcome(one, run, constants()) for one, run in zip(prepared, runs, strict=True)]
    for one in fitted if options.verbose else ():
        console.print(line(one), highlight=False, soft_wrap=True)
    console.print(time_table(raw, fitted), memory_table(fitted), order_table(fitted))
    faults = dict.fromkeys(o.fault for o in fitted if o.fault)
    for fault in faults:
        count = sum(o.fault == fault for o in fitted)
        console.print(f"not predicted, {count}: {fault}", highlight=False, soft_wrap=True)
    console.print(f"{len(runs)} runs in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

"""Every score of the published runs, as docs/fidelity.md has them.

    python benchmarks/fidelity_report.py --prepare FILE   # runs through capture and plan, into FILE
    python benchmarks/fidelity_report.py --from FILE --leave-out --ablate > docs/fidelity.md

Prepared runs hang on the code that made them: make them anew after any change to it.
"""

import argparse
import pickle
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fidelity import errors, ordered, percent, prepare_all, regret, too_large, usable
from fidelity_fit import REPORTED, by_source, leave_out, sample
from fidelity_predict import Outcome, Prepared, constants, outcome, stated, timed_s
from fidelity_terms import TERMS
from published_runs import read_runs

TARGETS: Mapping[str, str] = {
    "vtrain_multi": "6 · 6.5",
    "vtrain_single": "8 · 9",
    "narayanan_table1": "5",
    "korthikanti_table5": "5",
    "bloom": "5 · 6",
    "foundry_a100": "5 · 6",
    "foundry_h100": "5 · 6",
    "torchtitan": "6 · 7",
    "dense_nvidia_hopper": "6 · 7",
}
CAUTIONS = """
Constants are fitted on one half of the rows (by hash of the configuration) and belong to devices,
links or generations of software (`benchmarks/data/constants.json`). What they don't show:

- `crowding` and `leaf` of networks were chosen looking at all of vTrain's multi-node rows; only
  these identify them. `leaf` is a guess.
- Structure (which terms there are) was chosen looking at all rows of `benchmarks/data`; facts of
  `benchmarks/data/software.json` were looked up in the software's own sources and documents. Of
  torchtitan's published tables more rows were seen there than are in the data; none is fitted on.
- `dense_nvidia_hopper` doesn't state what was recomputed: nothing is assumed to be.
- Rows that no term explains: vTrain's 3.6B model at tp 8 and micro batch 64 (twice as slow as at
  32) and at tp 4 and micro batch 2, which are in four of its five pairs in the wrong order;
  torchtitan at cp 4 and 131,072 positions.
- "Called too large" counts runs whose recompute isn't stated as if nothing were recomputed.
"""
MEMORY_TARGETS: Mapping[str, str] = {"korthikanti_fig1": "3", "bloom": "6", "torchtitan": "10"}


def _rows(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _of(outcomes: Sequence[Outcome], source: str) -> list[Outcome]:
    return [o for o in outcomes if o.run.source == source and o.error is not None]


def step_times(
    raw: Sequence[Outcome], fitted: Sequence[Outcome], without: Mapping[str, float]
) -> str:
    """Mean absolute errors of sources whose fields are all known. `without`: by source, with
    constants fitted without it."""
    known = [o for o in fitted if usable(o.run)]
    before = {o.run.name: o for o in raw}

    def rows() -> Iterator[Sequence[str]]:
        for source in dict.fromkeys(o.run.source for o in known):
            mine = _of(known, source)
            if not mine or source.startswith(REPORTED):
                continue
            alone = f"{100 * without[source]:.1f} %" if source in without else "–"
            yield (
                source,
                str(len(mine)),
                percent(errors([before[o.run.name] for o in mine])),
                percent(errors(mine, True)),
                percent(errors(mine, False)),
                percent([o.error for o in mine if o.error is not None]),
                TARGETS.get(source, ""),
                alone,
            )

    head = ("source", "rows", "raw", "fitted half", "other half", "bias", "target, %")
    return _rows((*head, "fitted without it"), rows())


def reported(fitted: Sequence[Outcome]) -> str:
    """Rows without a target, and those with a field that isn't published, by assumption."""

    def rows() -> Iterator[Sequence[str]]:
        chosen = [o for o in fitted if not usable(o.run) or o.run.source.startswith(REPORTED)]
        chosen = [o for o in chosen if o.error is not None]
        kinds = dict.fromkeys((o.run.source, _guess(o)) for o in chosen)
        for source, guess in kinds:
            mine = [o for o in chosen if (o.run.source, _guess(o)) == (source, guess)]
            found = errors(mine)
            middle = statistics.median(found)
            signed = [o.error for o in mine if o.error is not None]
            yield (
                *(source, guess, str(len(mine)), percent(found)),
                *(percent([middle]), percent(signed)),
            )

    return _rows(("source", "assumed", "rows", "error", "its median", "bias"), rows())


def _guess(one: Outcome) -> str:
    return "; ".join(one.run.assumed) or "nothing"


def memory(outcomes: Sequence[Outcome]) -> str:
    """Errors of memory, and how many plans that ran would have been refused."""

    def rows() -> Iterator[Sequence[str]]:
        good = [o for o in outcomes if not o.fault]
        for source in dict.fromkeys(o.run.source for o in good):
            mine = [o for o in good if o.run.source == source]
            found = [o.memory_error for o in mine if o.memory_error is not None]
            large = sum(too_large(o) for o in mine)
            target = MEMORY_TARGETS.get(source, "")
            yield (
                *(source, str(len(found)), percent([abs(e) for e in found]), percent(found)),
                *(target, f"{large} of {len(mine)}"),
            )

    return _rows(
        ("source", "rows", "error", "bias", "target, %", "ran, but called too large"), rows()
    )


def order(outcomes: Sequence[Outcome]) -> str:
    """Plans of one model on one cluster."""

    def rows() -> Iterator[Sequence[str]]:
        for group in dict.fromkeys(o.run.group for o in outcomes if o.run.source == "vtrain_multi"):
            mine = [o for o in _of(outcomes, "vtrain_multi") if o.run.group == group]
            right, pairs = ordered(mine)
            share = f"{right} of {pairs}, {100 * right / pairs:.1f} %"
            yield group, str(len(mine)), share, f"{100 * regret(mine):.2f} %"

    return _rows(("plans of", "plans", "pairs in order", "best of three is off by"), rows())


def ablation(prepared: Sequence[Prepared]) -> str:
    """By how many points the error changes without each term."""
    values = constants()
    whole = by_source(prepared, [timed_s(one, values) for one in prepared])

    def rows() -> Iterator[Sequence[str]]:
        yield "nothing, %", *(f"{100 * share:.1f}" for share in whole.values())
        for name, seconds in TERMS.items():
            found = by_source(prepared, [seconds(one, values) for one in prepared])
            yield name, *(f"{100 * (found[s] - whole[s]):+.1f}" for s in whole)

    return _rows(("without", *whole), rows())


def main() -> None:
    """Prepare, or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prepare", type=Path, help="write prepared runs here, and no more")
    parser.add_argument("--from", dest="source", type=Path, help="take prepared runs from here")
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--steps", type=int, default=4, help="of each fit")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    runs = read_runs()
    found = (
        pickle.loads(options.source.read_bytes())
        if options.source
        else prepare_all(runs, options.jobs)
    )
    if options.prepare:
        options.prepare.write_bytes(pickle.dumps(found))
        return
    raw = [outcome(one, run, stated()) for one, run in zip(found, runs, strict=True)]
    fitted = [outcome(one, run, constants()) for one, run in zip(found, runs, strict=True)]
    scored = [
        one
        for one in found
        if isinstance(one, Prepared) and usable(one.run) and not one.run.source.startswith(REPORTED)
    ]
    names = sample([one.run for one in scored], len(scored))
    without = leave_out(scored, names, constants(), options.steps) if options.leave_out else {}
    print("# How close predictions come to published runs\n")
    print("Made by `benchmarks/fidelity_report.py`; sources: `benchmarks/data/README.md`.\n")
    print(CAUTIONS.lstrip())
    print("## Step time, mean absolute error\n\n" + step_times(raw, fitted, without))
    print("## Order of plans\n\n" + order(fitted))
    print("## Memory\n\n" + memory(fitted))
    print("## Reported, without a target\n\n" + reported(fitted))
    if options.ablate:
        print("## Without each term: change of the error in points\n\n" + ablation(scored))
    faults = [o.fault for o in fitted if o.fault]
    print("## Not predicted\n")
    for fault in dict.fromkeys(faults):
        print(f"- {faults.count(fault)}: {fault}")


if __name__ == "__main__":
    main()

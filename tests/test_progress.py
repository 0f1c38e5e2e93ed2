"""What the planner says of its progress, and where it keeps silent."""

import io
import itertools
from typing import Any

import pytest
from models import gpt2
from rich.console import Console

import autopar
from autopar.planning import search as searching
from autopar.planning.watch import Progress, unwatched
from autopar.progress import shown, text


def test_a_search_reports_what_its_certificate_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Progress] = []

    def watched(*args: Any) -> searching.Found:
        replaced: Any = (*args[:-1], told.append)
        return searching.search(*replaced)

    monkeypatch.setattr("autopar.planning.request.search", watched)
    plan = autopar.compile(gpt2().model, "cpu:4", gpt2().batch).plan
    assert {one.seen for one in told} == {plan.certificate.candidates}
    solving = [one for one in told if one.bound_s is not None]
    assert (solving[0].solved, solving[0].best_s) == (0, None)
    counts = [(one.solved, one.pruned, one.dropped) for one in solving]
    assert all(a <= b for x, y in itertools.pairwise(counts) for a, b in zip(x, y, strict=True))
    assert solving[-1].solved <= plan.certificate.solved > 0
    assert solving[-1].pruned <= plan.certificate.pruned
    best = [one.best_s for one in solving if one.best_s is not None]
    assert best == sorted(best, reverse=True)
    bounds = [one.bound_s for one in solving if one.bound_s is not None]
    assert bounds == sorted(bounds) and bounds[0] <= plan.certificate.objective_s
    assert solving[-1].dropped <= plan.certificate.dropped


def test_text() -> None:
    assert text(Progress(40, 3), 1.6) == "autopar: 2 s, 40 settings seen, 3 impossible"
    assert text(Progress(96, 8, 70, 5, 0.0432, 0.04), 12.4) == (
        "autopar: 12 s, 96 settings seen, 8 impossible, 70 pruned, 5 solved, best 43.20 ms, "
        "none open below 40.00 ms"
    )


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=200)


def test_a_terminal_gets_one_line_that_goes_away() -> None:
    console = terminal()
    with shown(True, console) as watch:
        watch(Progress(96, 8, 70, 5, 0.0432, 0.04))
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "96 settings seen" in written
    assert written.rstrip().endswith("\x1b[2K"), "the line is erased"


@pytest.mark.parametrize(
    ("progress", "console"),
    [(False, terminal()), (True, Console(file=io.StringIO())), (False, Console(stderr=True))],
)
def test_silence(progress: bool, console: Console) -> None:
    with shown(progress, console) as watch:
        assert watch is unwatched


def test_a_plan_is_the_same_with_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    job, pin = gpt2(), {"dp": 2, "tp": 2}
    one, other = (
        autopar.compile(job.model, "cpu:4", job.batch, pin=pin, progress=progress).plan
        for progress in (True, False)
    )
    assert one.to_json() == other.to_json()
    assert capsys.readouterr().err == "", "stderr is no terminal here"

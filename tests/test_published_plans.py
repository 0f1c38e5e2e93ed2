"""Published configurations beside free plans: what is pinned, what is one case, the table."""

import json
from typing import Any

import pytest
from fidelity_predict import graph_of, state_of
from known_cases import CASES
from plan_cases import Asked, apart, decided, tried
from published_beside import WHY, by_case
from published_plans import Case, cases, cluster_of, pins_of, shape_of
from published_plans_table import show
from published_runs import read_runs

EVERY = cases([])


def test_what_a_source_does_not_state_is_not_pinned() -> None:
    """And all else is: a plan with the run's own recompute, microbatches and schedule."""
    left: set[str] = set()
    for run in read_runs():
        if run.unsupported:
            continue
        missing = set(run.pins) - set(pins_of(run))
        said = {text for text in run.assumed if text.endswith("isn't stated")}
        assert len(missing) <= len(said), run.name
        assert ("recompute" in missing) == ("parallel.recompute isn't stated" in said), run.name
        left |= missing
    assert left == {"recompute", "microbatches", "pipeline"}


def test_rows_of_a_case_have_one_model_cluster_and_batch() -> None:
    ids = [name for case in EVERY for name in case.ids]
    assert len(ids) == len(set(ids))
    runs = [run for run in read_runs() if not run.unsupported]
    pinned = {(_place(case), _text(run)) for case in EVERY for run in case.rows.values()}
    assert sum(len(case.rows) for case in EVERY) == len(pinned) > 600
    assert len(EVERY) < len(pinned) <= len(runs)
    for case in EVERY:
        for run in case.rows.values():
            alike = (run.batch, run.preset, run.devices, shape_of(run))
            assert alike == (case.run.batch, case.run.preset, case.run.devices, case.shape)


def _place(case: Case) -> str:
    return case.name


def _text(run: Any) -> str:
    return json.dumps(pins_of(run), sort_keys=True)


def _plan(name: str, step_s: float, **more: Any) -> dict[str, Any]:
    parts = {"communication_s": 0.25, "optimizer_s": 0.0, "waiting_s": 0.0}
    return {
        **{"id": name, "group": "a model on 8, batch 8", "cluster": "h100", "assumed": []},
        **{"axes": {"dp": 8}, "microbatches": 2, "schedule": "", "used": {"zero 3": 4}},
        **{"step_s": step_s, "compute_s": step_s - 0.25, **parts},
        **{
            "memory_bytes": 10**9,
            "gap": 0.001,
            "solved": 3,
            "candidates": 7,
            "took_s": 9.0,
            "parts": {"ops": step_s},
            **more,
        },
    }


def test_the_table_tells_slower_plans_and_rows_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = {"short_bytes": 2 * 10**9, "fault": "nothing fits", "roomy": {"used": {}}}
    lines = [
        *(_plan("one/a/x", 2.0), _plan("one/a/y", 1.5), _plan("one/a/free", 1.0)),
        {"id": f"one/a/{WHY}y", "rungs": [{"freed": "ZeRO", "step_s": 1.25}]},
        *(_plan("one/b/x", 1.0), _plan("one/b/free", 1.25, gap=0.5)),
        *(_plan("one/d/x", 1.0), _plan("one/d/free", 1.25, gap=0.1)),
        {"id": "one/c/x", "assumed": [], **short},
        {"id": "one/c/free", "ended": "ended after 9 s"},
    ]
    assert [one.ratio for one in by_case(lines)] == [1.5, 0.8, 0.8, None]
    show(lines, read_runs(), every=True)
    assert "| y " in capsys.readouterr().out
    show(lines, read_runs(), every=False)
    out = capsys.readouterr().out
    slower = out.partition("slower than a row")[2].partition("## The ten")[0]
    assert "one/b" in slower and "one/a" not in slower
    assert "doesn't fit without recompute: by 2.00 GB to 2.00 GB" in out
    assert "1 of 3" in out  # at least as fast
    (out_of_time,) = (line for line in slower.splitlines() if "one/b" in line)
    (wrong,) = (line for line in slower.splitlines() if "one/d" in line)
    assert "nothing below 625.00 ms (gap 50.0%)" in out_of_time
    assert "is wrong: its bound is 1.12 s" in wrong
    assert "pinned 1.50 s → ZeRO 1.25 s (−250.00 ms) → mesh 1.00 s (−250.00 ms)" in out
    left = sum(bool(run.unsupported) for run in read_runs())
    assert f"Left out: {left} of " in out


def test_plans_as_text() -> None:
    one, other = _plan("", 1.0), _plan("", 2.0)
    assert decided(one) == "dp 8, 2 microbatches; zero 3 ×4"
    assert apart(other, one) == "compute +1.00 s"
    assert apart(one, one) == "nothing"


def test_between_the_fastest_cut_and_the_smallest() -> None:
    """BLOOM's 77 layers in 11 stages: seven each are 0.4 % too large, and the cut with the smallest
    stages (11 layers on one) would take 1.3 times as long as the one with six on the first."""
    (case, run), *_ = (
        (case, run)
        for case in EVERY
        for run in case.rows.values()
        if run.pins["pp"] == 11 and run.pins["microbatches"] == 64
    )
    graph = graph_of(case.shape, run.batch)
    asked = Asked(graph, cluster_of(run), state_of(run.software))
    line, plan = tried(asked, pins_of(run))
    assert plan is not None and plan.schedule is not None, line
    assert max(len(part) for part in plan.schedule.parts) <= 8, line
    assert plan.certificate.gap < 0.07


def test_known_answers_hold_of_themselves() -> None:
    """A plan with just the known answer's mesh and strategies is said to be so."""
    for case in CASES:
        pins = case.pins["known"]
        sizes = {k: v for k, v in pins.items() if type(v) is int and v > 1 and k != "zero"}
        used = {"zero 3" if pins.get("zero") == 3 else "zero 1": 1}
        if pins.get("sequence"):
            used["sequence"] = 1
        assert case.holds({"axes": sizes, "used": used}), case.name
        assert not case.holds({"axes": {"pp": 2, "tp": 16}, "used": {}}), case.name

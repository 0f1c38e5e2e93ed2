"""A time limit holds for all that a setting's solving takes, and what there was no time for keeps
its bound."""

import time
from dataclasses import replace

import pytest
from models import gpt2
from test_outline import space
from test_space import OPTIONS

from autopar.cluster import resolve_cluster
from autopar.errors import InfeasibleError, OutOfTimeError
from autopar.planning import settle as settle_module
from autopar.planning import shortage
from autopar.planning.deadline import LEAST_S, NEVER, Deadline, after
from autopar.planning.no_plan import nothing_fits
from autopar.planning.problem import Infeasible
from autopar.planning.settle import settle
from autopar.planning.tried import Tried, relax
from autopar.planning.unopened import Unopened

OVER = Deadline(0.0)


def test_what_is_left_of_a_deadline() -> None:
    assert NEVER.left_s is None and not NEVER.is_over and after(None) is NEVER
    assert OVER.is_over and OVER.left_s == LEAST_S
    soon = after(50.0)
    assert not soon.is_over and soon.left_s is not None and 40.0 < soon.left_s <= 50.0
    later = OVER.at_least(50.0)
    assert not later.is_over and later.at_s > time.monotonic() + 40.0
    assert soon.at_least(1.0) == soon


def staged() -> Tried:
    """A relaxed setting with many cuts that are solved one by one."""
    found = space(gpt2(layers=6), resolve_cluster("h100:4"), pin={"pp": 2})
    for unopened in found.settings():
        for setting in unopened.scheduled if isinstance(unopened, Unopened) else ():
            if setting.schedule is None or setting.schedule.brief.chunks > 1:
                continue
            for tried in found.open(Unopened(setting, (setting,))):
                more = relax(tried, found.options) if isinstance(tried, Tried) else None
                if isinstance(more, Tried) and more.result is None:
                    return more
    raise AssertionError("no setting has stages")


def test_cuts_that_there_is_no_time_for_keep_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, looked = staged(), []
    of_cut = settle_module._of_cut

    def counted(*args: object) -> object:
        looked.append(args)
        return of_cut(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(settle_module, "_of_cut", counted)
    exact = replace(OPTIONS, gap=0.0)
    whole = settle(tried, exact, float("inf"))
    every = len(looked)
    looked.clear()
    short = settle(tried, exact, float("inf"), OVER)
    assert every > len(looked) == 1
    assert short.step_s >= whole.step_s and short.bound_s <= whole.bound_s * (1 + 1e-9)


def test_a_cut_without_answer_in_time_keeps_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_time(*_: object) -> None:
        raise OutOfTimeError("too short")

    tried = staged()
    monkeypatch.setattr(settle_module, "_of_cut", no_time)
    done = settle(tried, OPTIONS, float("inf"))
    assert done.answer is None and done.result is None and done.bound_s == tried.bound_s


def test_a_setting_of_whose_cuts_none_fits_isnt_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran out of time is: whether it fits isn't known."""
    tried = staged()
    none_of_it = replace(tried, bound_s=float("inf"))
    short = replace(tried, result=Infeasible(7))
    monkeypatch.setattr(shortage, "_over_bytes", lambda *_: 7)
    monkeypatch.setattr(shortage, "_shortage", lambda *_: 7)
    error = nothing_fits([none_of_it, short], OPTIONS)
    assert isinstance(error, InfeasibleError) and error.short_bytes == 7
    assert isinstance(nothing_fits([tried, short], OPTIONS), OutOfTimeError)

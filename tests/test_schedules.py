"""Tables of schedules: complete, free of deadlock, and what follows from them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import pytest

from autopar.plugin import Mesh, Refusal, Schedule
from autopar.runtime.schedules import gpipe, interleaved, one_forward_one_backward, zero_bubble
from autopar.schedule import Action, BrokenScheduleError, Message, Table
from autopar.strategies.pipeline import Pipeline

Make = Callable[[int, int], Table]
MAKERS: dict[str, Make] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zero_bubble": zero_bubble,
    "interleaved_2": partial(interleaved, chunks=2),
    "interleaved_3": partial(interleaved, chunks=3),
}
SIZES = [(stages, count) for stages in (1, 2, 3, 4, 7) for count in (1, 2, 3, 4, 5, 8, 13)]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_every_count_runs(name: str, stages: int, microbatches: int) -> None:
    table = MAKERS[name](stages, microbatches)
    table.check()
    table.forward_only()
    _ = table.forward_only().starts
    assert 0 <= table.bubble < 1


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (3, 9), (4, 4)])
def test_bubbles_are_the_published_ones(stages: int, microbatches: int) -> None:
    """In units of one microbatch on one stage, for each stage but one."""
    wanted = {"gpipe": 1, "1f1b": 1, "interleaved_2": 1 / 2, "interleaved_3": 1 / 3}
    wanted |= {"zero_bubble": 1 / 3}  # F + I − W of three equal times
    for name, per_stage in wanted.items():
        table = MAKERS[name](stages, microbatches)
        assert table.per_stage == pytest.approx(per_stage), name
        whole = microbatches + per_stage * (stages - 1)
        assert table.bubble == pytest.approx(1 - microbatches / whole), name
        assert table.per_slowest + table.per_stage * stages == pytest.approx(whole)


@pytest.mark.parametrize("stages", [2, 3, 5, 8])
def test_what_a_bubble_is_at_least_is_said_without_the_table(stages: int) -> None:
    """Of every number of microbatches; where `per_stage` isn't said, it is more than the least."""
    unsaid = 0
    for microbatches in range(1, 3 * stages + 2):
        for pipeline in (Pipeline(), Pipeline("interleaved", 2), Pipeline("interleaved", 3)):
            for one in pipeline.schedules(Mesh((("pp", stages),)), microbatches, 24):
                if isinstance(one, Refusal):
                    continue
                assert one.least_pace > 0
                assert one.table.per_stage >= one.least_pace * (1 - 1e-9), one
                unsaid += one.per_stage is None
    assert unsaid > 0


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_a_brief_table_has_as_many_microbatches_in_flight(stages: int) -> None:
    """Which `Schedule.table` asserts; a table that hasn't is found out."""
    found = []
    for microbatches in range(1, 5 * stages + 2):
        offers = Pipeline().schedules(Mesh((("pp", stages),)), microbatches, 30)
        found += [one for one in offers if isinstance(one, Schedule)]
    for one in found:
        assert (one.brief.stages, one.brief.chunks) == (stages, one.table.chunks)
        assert one.brief.every_in_flight == one.table.every_in_flight, one
    assert sum(one.brief.microbatches < one.microbatches for one in found) > 10
    few = replace(found[-1], make_brief=partial(one_forward_one_backward, stages, 1))
    with pytest.raises(AssertionError):
        _ = few.table


def test_interleaved_is_chosen_in_whole_groups_alone() -> None:
    mesh = Mesh((("pp", 4),))
    names = {m: _names(Pipeline().schedules(mesh, m, 16)) for m in (4, 6, 8)}
    assert [m for m, found in names.items() if "interleaved" in found] == [4, 8]
    assert "interleaved" in _names(Pipeline("interleaved").schedules(mesh, 6, 16))


def _names(offers: Iterable[Schedule | Refusal]) -> set[str]:
    return {one.name for one in offers if isinstance(one, Schedule)}


def test_microbatches_in_flight() -> None:
    assert [gpipe(4, 9).in_flight(stage) for stage in range(4)] == [((9,),)] * 4
    for count in (2, 4, 9):
        table = one_forward_one_backward(4, count)
        held = [((min(count, 4 - stage),),) for stage in range(4)]
        assert [table.in_flight(stage) for stage in range(4)] == held
    assert [zero_bubble(4, 9).in_flight(stage) for stage in range(4)] == [((4,),)] * 4
    # Megatron's 2 · (stages − stage − 1) + (chunks − 1) · stages + 1 together
    for stage in range(4):
        for held_by_chunk in interleaved(4, 8, 2).in_flight(stage):
            assert sum(held_by_chunk) <= 2 * (4 - stage - 1) + 4 + 1


def test_a_table_that_waits_for_ever() -> None:
    table = one_forward_one_backward(2, 2)
    first, second = table.orders
    backward = next(a for a in first if a.kind == "B")
    early = (backward, *(a for a in first if a != backward))
    with pytest.raises(BrokenScheduleError, match=r"wait for ever: B of part 0, microbatch 0"):
        replace(table, orders=(early, second)).check()


def test_a_table_that_leaves_something_out() -> None:
    table = gpipe(2, 3)
    first, second = table.orders
    for orders in [(first[:-1], second), (first, (*second, second[-1])), (second, first)]:
        with pytest.raises(BrokenScheduleError, match="lacks, or has too much"):
            replace(table, orders=orders).check()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 5), (3, 6)])
def test_both_sides_of_a_message_have_it_in_the_same_place(
    name: str, stages: int, microbatches: int
) -> None:
    """Between two stages both have the same messages in the same order, none after its use."""
    table = MAKERS[name](stages, microbatches)
    steps = [table.steps(stage) for stage in range(stages)]
    for one in range(stages):
        for other in range(one):
            between = [
                [m for step in steps[s] if isinstance(step, tuple) for m in step
                 if {m.source % stages, m.target % stages} == {one, other}]
                for s in (one, other)
            ]  # fmt: skip
            assert between[0] == between[1]
    for stage in range(stages):
        there: set[tuple[int, int, bool]] = set()
        done: set[Action] = set()
        for step in steps[stage]:
            if isinstance(step, Action):
                part, mb, parts = step.part, step.microbatch, table.parts
                assert step.kind != "F" or part == 0 or (part, mb, True) in there
                assert step.kind not in "BI" or part + 1 == parts or (part, mb, False) in there
                done.add(step)
                continue
            for message in step:
                assert isinstance(message, Message)
                if message.target % stages == stage:
                    there.add((message.target, message.microbatch, message.forward))
                else:
                    made = {a for a in done if (a.part, a.microbatch) == (message.source,
                            message.microbatch) and (a.kind == "F") == message.forward}  # fmt: skip
                    assert made, message

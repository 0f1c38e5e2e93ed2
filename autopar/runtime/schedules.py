"""The schedules that emitted modules name: each returns a table of what every stage does.

A stage begins with some forwards, then takes a forward and a backward in turn, then the backwards
that are left; where the backward comes in halves, the weights' half lags behind.
"""

from collections.abc import Callable

from autopar.schedule import Action, BrokenScheduleError, Table

Amount = Callable[[int], int]
"""A number for each stage."""


def gpipe(stages: int, microbatches: int) -> Table:
    """All forwards, then all backwards: every microbatch's tensors are held (Huang et al. 2019)."""
    return _in_turn(stages, 1, microbatches, lambda stage: microbatches)


def one_forward_one_backward(stages: int, microbatches: int) -> Table:
    """A stage starts a forward for each backward that ends, so that it holds at most as many
    microbatches as stages follow, and its own (Narayanan et al. 2019, PipeDream-Flush)."""
    return _in_turn(stages, 1, microbatches, lambda stage: stages - stage - 1)


def interleaved(stages: int, microbatches: int, chunks: int) -> Table:
    """Each stage has several chunks of layers, so that the bubble is `chunks` times shorter
    (Narayanan et al. 2021). Any number of microbatches: they go in groups of `stages`, the last
    group with what is left; the fewer those are, the less is won."""
    for more in range(chunks * microbatches + 1):  # an uneven group may need longer to begin

        def begin(stage: int, more: int = more) -> int:
            return 2 * (stages - stage - 1) + (chunks - 1) * stages + more

        table = _in_turn(stages, chunks, microbatches, begin)
        try:
            table.check()
        except BrokenScheduleError:
            continue
        return table
    raise AssertionError("all forwards before all backwards always run")


def zero_bubble(stages: int, microbatches: int) -> Table:
    """1F1B with the weights' gradients put off to where a stage would wait; every stage holds at
    most as many microbatches as the first one does in 1F1B (Qi et al. 2023, ZB-H1)."""
    return _in_turn(
        stages, 1, microbatches, lambda stage: stages - stage - 1, lag=lambda stage: stage
    )


def _in_turn(
    stages: int, chunks: int, microbatches: int, begin: Amount, lag: Amount | None = None
) -> Table:
    """`begin`: with how many forwards a stage begins. `lag`: how many of the inputs' gradients are
    ahead of the weights'; None where they are made together."""
    assert stages >= 1 and chunks >= 1 and microbatches >= 1, (stages, chunks, microbatches)
    orders = []
    for stage in range(stages):
        forwards = _order(stage, stages, chunks, microbatches, back=False)
        backwards = _order(stage, stages, chunks, microbatches, back=True)
        first = min(begin(stage), len(forwards))
        order = [Action("F", *one) for one in forwards[:first]]
        for index, one in enumerate(backwards):
            if first + index < len(forwards):
                order.append(Action("F", *forwards[first + index]))
            order.append(Action("B" if lag is None else "I", *one))
            if lag is not None and index >= lag(stage):
                order.append(Action("W", *backwards[index - lag(stage)]))
        if lag is not None:
            left = max(0, len(backwards) - lag(stage))
            order += [Action("W", *one) for one in backwards[left:]]
        orders.append(tuple(order))
    return Table(stages, chunks, microbatches, tuple(orders))


def _order(
    stage: int, stages: int, chunks: int, microbatches: int, *, back: bool
) -> tuple[tuple[int, int], ...]:
    """(part, microbatch) in the order in which a stage takes them: groups of as many microbatches
    as there are stages, each group through all chunks."""
    found = []
    for first in range(0, microbatches, stages):
        group = range(first, min(first + stages, microbatches))
        for chunk in reversed(range(chunks)) if back else range(chunks):
            found += [(chunk * stages + stage, microbatch) for microbatch in group]
    return tuple(found)

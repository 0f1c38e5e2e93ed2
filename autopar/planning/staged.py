"""What choices come to where layers lie in stages: the time of a step, and each stage's memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.planning.problem import Choice, Edge, PlanningProblem, Share, Stages


@dataclass
class Moments:
    """What is needed for a moment, by group: with what runs again, and without; and what is freed
    before something does."""

    whole: dict[str, int] = field(default_factory=dict)
    brief: dict[str, int] = field(default_factory=dict)
    freed_bytes: int = 0

    def add(self, group: str, one: Share | Choice) -> None:
        """With what a choice of a group needs."""
        whole_bytes = one.transient_bytes + one.again_bytes
        self.brief[group] = self.brief.get(group, 0) + one.transient_bytes
        self.whole[group] = self.whole.get(group, 0) + whole_bytes
        self.freed_bytes += one.freed_bytes

    @property
    def most_bytes(self) -> int:
        """The most at a time."""
        again_bytes = max(self.whole.values(), default=0) - self.freed_bytes
        return max(again_bytes, *self.brief.values(), 0)


@dataclass
class Sums:
    """What one stage comes to, added up."""

    seconds: float = 0.0
    step_seconds: float = 0.0
    resident_bytes: int = 0
    held_bytes: list[int] = field(default_factory=list)
    moments: Moments = field(default_factory=Moments)

    def add(self, share: Share, group: str) -> None:
        self.seconds += share.seconds
        self.step_seconds += share.step_seconds
        self.resident_bytes += share.resident_bytes
        for chunk, size in enumerate(share.held_bytes):
            self.held_bytes[chunk] += size
        self.moments.add(group, share)

    def held(self, counts: Sequence[int]) -> int:
        """The bytes of so many microbatches, by chunk."""
        return sum(n * size for n, size in zip(counts, self.held_bytes, strict=True))

    def memory_bytes(self, in_flight: Sequence[Sequence[int]]) -> int:
        """The most that the stage holds."""
        held = max(self.held(counts) for counts in in_flight)
        return self.resident_bytes + held + self.moments.most_bytes


def empty(stages: Stages) -> tuple[Sums, ...]:
    """Nothing yet, for each stage."""
    return tuple(Sums(held_bytes=[0] * len(counts[0])) for counts in stages.in_flight)


def step_seconds(stages: Stages, sums: Sequence[Sums]) -> float:
    """The time of a step."""
    return stages.step_seconds([x.seconds for x in sums], [x.step_seconds for x in sums])


def base_sums(problem: PlanningProblem) -> tuple[Sums, ...]:
    """What is there whatever is chosen."""
    assert problem.stages is not None
    sums = empty(problem.stages)
    for share in problem.base_shares:
        sums[share.stage].add(share, "")
    return sums


def evaluate_stages(
    problem: PlanningProblem,
    choices: Sequence[int],
    conversions: Sequence[tuple[Edge, int, int]],
    once: Sequence[Share],
) -> tuple[float, int]:
    """Seconds and bytes of one choice per slot, with the conversions that it makes and what is
    there `once` for all."""
    stages = problem.stages
    assert stages is not None
    sums = base_sums(problem)
    for slot, c in zip(problem.slots, choices, strict=True):
        for share in slot.choices[c].shares:
            sums[share.stage].add(share, slot.group)
    for edge, made, needed in conversions:
        size = edge.resident_bytes[made][needed]
        sums[edge.stage].add(Share(edge.stage, *edge.costs(made, needed), size), "")
    for share in once:
        sums[share.stage].add(share, "")
    memory = max(
        one.memory_bytes(counts) for one, counts in zip(sums, stages.in_flight, strict=True)
    )
    return step_seconds(stages, sums), memory

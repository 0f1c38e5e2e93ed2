"""What one choice for every slot of a planning problem comes to."""

from collections.abc import Sequence

from autopar.planning.problem import Edge, PlanningProblem
from autopar.planning.staged import Moments, evaluate_stages


def evaluate(problem: PlanningProblem, choices: Sequence[int]) -> tuple[float, int] | None:
    """Seconds and bytes of one choice per slot, or None where a forbidden pair occurs or a cover
    is left out."""
    for cover in problem.covers:
        if not any(c in takes for c, takes in zip(choices, cover.takes, strict=True)):
            return None
    taken = [slot.choices[c] for slot, c in zip(problem.slots, choices, strict=True)]
    made_of = [
        (edge, made, needed)
        for edge in problem.edges
        for made, needed in sorted(_conversions(edge, choices))
    ]
    if any(edge.seconds[made][needed] is None for edge, made, needed in made_of):
        return None
    once = [
        one.share
        for one in problem.shared
        if any(choices[s] in takes for s, takes in one.takes.items())
    ]
    if problem.stages is not None:
        return evaluate_stages(problem, choices, made_of, once)
    seconds = problem.base_seconds + sum(choice.seconds for choice in taken)
    memory_bytes = problem.base_bytes + sum(choice.resident_bytes for choice in taken)
    for edge, made, needed in made_of:
        seconds += sum(edge.costs(made, needed))
        memory_bytes += edge.resident_bytes[made][needed]
    memory_bytes += sum(share.resident_bytes for share in once)
    moments = Moments()
    for slot, choice in zip(problem.slots, taken, strict=True):
        moments.add(slot.group, choice)
    return seconds, memory_bytes + moments.most_bytes


def _conversions(edge: Edge, choices: Sequence[int]) -> set[tuple[int, int]]:
    made = edge.source.layouts[choices[edge.source.slot]]
    needed = [use.layouts[choices[use.slot]] for use in edge.uses]
    return {(made, n) for n in needed if made is not None and n is not None}

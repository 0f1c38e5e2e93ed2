"""Choices that are only taken together: a layer runs again in the backward as a whole, or not; and
so do all layers of a group, which are then alike."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from autopar.layouts.stages import Cut
from autopar.planning.problem import Edge, Use
from autopar.plugin import Candidate, Recomputed

SlotKey = tuple[str, str]
"""(layer path, region)."""
Regions = Mapping[SlotKey, Sequence[Candidate]]
GroupOf = Callable[[str, Candidate], tuple[str, ...]]
"""The layers that run again with a layer whose region does this."""


def of_layer(candidate: Candidate) -> Recomputed | None:
    """What the whole layer runs again with, or None where it doesn't."""
    again = candidate.recompute
    return again if again is not None and again.scope == "layers" else None


def whole_layers(
    candidates: Mapping[SlotKey, tuple[Candidate, ...]], group_of: GroupOf
) -> Mapping[SlotKey, tuple[Candidate, ...]] | str:
    """The candidates without those that would run a layer again of which some region can't; where a
    region has no others, why that can't run."""
    while True:
        offered: dict[str, frozenset[Recomputed]] = {}
        said: dict[int, frozenset[Recomputed]] = {}  # alike layers share their candidates
        for (path, _), choices in candidates.items():
            if id(choices) not in said:
                found = (of_layer(c) for c in choices)
                said[id(choices)] = frozenset(x for x in found if x is not None)
            mine = said[id(choices)]
            offered[path] = offered[path] & mine if path in offered else mine
        kept: dict[SlotKey, tuple[Candidate, ...]] = {}
        known: dict[Hashable, tuple[Candidate, ...]] = {}
        for key, choices in candidates.items():
            legal = frozenset(
                x
                for x in said[id(choices)]
                if all(x in offered[path] for path in group_of(key[0], _running_again(key[1], x)))
            )
            if legal == said[id(choices)]:
                kept[key] = choices
                continue
            if (id(choices), legal) not in known:
                known[id(choices), legal] = tuple(
                    c for c in choices if (x := of_layer(c)) is None or x in legal
                )
            kept[key] = known[id(choices), legal]
            if not kept[key]:
                return _why(key, choices[0], candidates)
        if all(kept[key] is choices for key, choices in candidates.items()):
            return kept
        candidates = kept


def _running_again(region: str, again: Recomputed) -> Candidate:
    """A candidate that says so, and nothing else."""
    return Candidate(region, recompute=again)


def _why(key: SlotKey, candidate: Candidate, candidates: Regions) -> str:
    again = of_layer(candidate)
    others = sorted({r for p, r in candidates if p == key[0] and r != key[1]})
    layers = 1 if again is None else again.layers
    whole = "its whole layer" if layers == 1 else f"its whole layer and {layers - 1} next to it"
    return (
        f"{key[1]} of {key[0]} would run again in the backward with {whole}, which other regions "
        f"of these layers may not ({', '.join(others)}): let all say the same"
    )


def together_edges(regions: Mapping[str, Sequence[Candidate]]) -> Iterator[Edge]:
    """Forbids that regions of a layer, by name, disagree on whether it runs again."""
    rows = [tuple(of_layer(c) for c in candidates) for candidates in regions.values()]
    if len(rows) > 1 and any(again is not None for row in rows for again in row):
        yield equal_edge("runs again as a whole", range(len(rows)), rows)


def alike_in_group(candidate: Candidate) -> Hashable:
    """What must be equal in the layers of a group; nothing where it is the layer's own affair."""
    again = of_layer(candidate)
    return (
        None if again is None or again.layers == 1 else (again, candidate.splits, candidate.forms)
    )


def equal_edge(name: str, slots: Sequence[int], rows: Sequence[Sequence[Hashable]]) -> Edge:
    """An edge over which only equals go."""
    number = {one: i for i, one in enumerate(dict.fromkeys(x for row in rows for x in row))}
    indices = [tuple(number[x] for x in row) for row in rows]
    table = tuple(tuple(0.0 if a == b else None for b in number.values()) for a in number.values())
    zero = tuple((0,) * len(number) for _ in number)
    source, *uses = [Use(slot, row) for slot, row in zip(slots, indices, strict=True)]
    return Edge(name, source, tuple(uses), table, zero)


def disagreement(
    choices: Mapping[str, Mapping[str, Candidate]], group_of: GroupOf, cut: Cut | None
) -> str | None:
    """Why chosen candidates can't run: a layer, or a group, of which parts run again and others
    don't, or of which layers lie in different parts of the model."""
    for path, regions in choices.items():
        for region, candidate in regions.items():
            group = group_of(path, candidate) if of_layer(candidate) else ()
            if cut is not None and len({cut.part_of(one) for one in group}) > 1:
                return (
                    f"{group[0]} to {group[-1]} run again together in the backward, but lie in "
                    f"parts {cut.part_of(group[0])} to {cut.part_of(group[-1])} of the model"
                )
            for other in group:
                for name, its in choices[other].items():
                    if of_layer(its) != of_layer(candidate):
                        return (
                            f"{region} of {path} runs again in the backward with {other} as a "
                            f"whole, but {name} there doesn't say so"
                        )
                if alike_in_group(choices[other][region]) != alike_in_group(candidate):
                    return f"{region} of {path} and of {other} run again together, but differ"
    return None

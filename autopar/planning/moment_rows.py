"""Rows of what is needed for a moment: (transient), and (again) with what runs again, less what is
freed before that."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import pulp

from autopar.planning.problem import Choice, Share

if TYPE_CHECKING:
    from autopar.planning.rows import Rows, Terms

Taken = tuple[int, str, pulp.LpVariable, Choice | Share]
"""A slot, its group, and the variable of one of its choices, with what that costs."""


def add_moments(
    rows: "Rows", name: str, peak: pulp.LpVariable, taken: Sequence[Taken], base: Mapping[str, int]
) -> None:
    """One row of each kind per group of slots, or those of merged slots. `base`: bytes that a group
    needs anyway."""
    _add(rows, f"transient{name}", [(peak, 1.0)], taken, base, again=False)
    if any(one.again_bytes for *_, one in taken):
        size = rows.scale.of_bytes
        freed = [(x, size(one.freed_bytes)) for _, _, x, one in taken if one.freed_bytes]
        _add(rows, f"again{name}", [(peak, 1.0), *freed], taken, base, again=True)


def _add(
    rows: "Rows",
    name: str,
    most: "Terms",
    taken: Iterable[Taken],
    base: Mapping[str, int],
    again: bool,
) -> None:
    groups: dict[str, Terms] = {group: [] for group in base}
    merged: dict[int, Terms] = {}
    for s, group, x, one in taken:
        size = rows.scale.of_bytes(one.transient_bytes)
        size += rows.scale.of_bytes(one.again_bytes) if again else 0.0
        of = merged.setdefault(s, []) if s in rows.merged else groups.setdefault(group, [])
        of.append((x, size))
    for g, (group, sizes) in enumerate(groups.items()):
        least = rows.scale.grains(base.get(group, 0))
        terms = [*most, *((x, -size) for x, size in sizes)]
        rows.add(f"{name}_{g:04}", terms, pulp.LpConstraintGE, least)
    for s, sizes in merged.items():
        _add_merged(rows, f"{name}_{s:04}", most, sizes, len(rows.merged[s]))


def _add_merged(rows: "Rows", name: str, most: "Terms", sizes: "Terms", count: int) -> None:
    """Those of merged slots, of which it counts how often each choice is taken: what any one of
    them needs, so at least their mean."""
    least = min(size for _, size in sizes)
    mean = [(x, -size / count) for x, size in sizes]
    rows.add(f"mean_{name}", [*most, *mean], pulp.LpConstraintGE, 0.0)
    for k, (x, size) in enumerate(sizes):
        if size > least:
            taken = rows.programme.add_variable(f"b_{name}_{k:03}", cat=pulp.LpBinary)
            rows.add(f"some_{name}_{k:03}", [(taken, count), (x, -1.0)], pulp.LpConstraintGE, 0.0)
            terms = [*most, (taken, -(size - least))]
            rows.add(f"most_{name}_{k:03}", terms, pulp.LpConstraintGE, least)

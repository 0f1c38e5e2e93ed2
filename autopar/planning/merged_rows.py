"""Rows of slots that are counted, not told apart."""

from typing import TYPE_CHECKING

import pulp

if TYPE_CHECKING:
    from autopar.planning.rows import Rows, Terms


def add_merged_transient(
    rows: "Rows", name: str, peak: pulp.LpVariable, sizes: "Terms", count: int
) -> None:
    """(transient) of merged slots: what any one of them needs, so at least their mean."""
    least = min(size for _, size in sizes)
    mean = [(x, -size / count) for x, size in sizes]
    rows.add(f"mean_{name}", [(peak, 1.0), *mean], pulp.LpConstraintGE, 0.0)
    for k, (x, size) in enumerate(sizes):
        if size > least:
            taken = rows.programme.add_variable(f"b_{name}_{k:03}", cat=pulp.LpBinary)
            rows.add(f"some_{name}_{k:03}", [(taken, count), (x, -1.0)], pulp.LpConstraintGE, 0.0)
            terms = [(peak, 1.0), (taken, -(size - least))]
            rows.add(f"most_{name}_{k:03}", terms, pulp.LpConstraintGE, least)

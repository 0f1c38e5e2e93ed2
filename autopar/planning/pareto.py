"""Which rows of costs no other row is better than."""

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
BLOCK = 64
"""So many rows are compared with each other at once."""


def pareto(costs: Costs) -> NDArray[np.int64]:
    """Indices of the rows that no other row is at most equal to in every column, sorted by cost."""
    order = np.lexsort(costs.T[::-1])
    # The first column is sorted: what comes later is no less there.
    others, kept, rest = costs.T[1:, order], [], np.arange(len(order))
    while len(rest):
        own, rest = rest[:BLOCK], rest[BLOCK:]
        own = own[~_beaten(others[:, own], others[:, own], np.tri(len(own), k=-1, dtype=np.bool_))]
        kept.append(own)
        if len(rest):
            every = np.ones((len(rest), len(own)), np.bool_)
            rest = rest[~_beaten(others[:, rest], others[:, own], every)]
    return order[np.concatenate(kept)] if kept else order


def _beaten(later: Costs, former: Costs, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[later]: whether a former row is at most equal in every column, of those `among` them."""
    for mine, others in zip(later, former, strict=True):
        among &= mine[:, None] >= others
    found: NDArray[np.bool_] = np.logical_or.reduce(among, axis=1)
    return found

"""What several regions of a layer keep is there once: a cost that all who keep it share."""

from collections.abc import Iterator, Mapping, Sequence

from autopar.layouts.saved import Storage
from autopar.planning.problem import Edge, Use

KeptRows = Sequence[Sequence[Mapping[Storage, int]]]
"""By region and choice, the bytes of what others may keep too."""


def kept_by_several(rows: KeptRows) -> frozenset[Storage]:
    """The storages that some choices of several regions keep."""
    seen: set[Storage] = set()
    several: set[Storage] = set()
    for row in rows:
        own = {one for kept in row for one in kept}
        several |= seen & own
        seen |= own
    return frozenset(several)


def kept_edges(path: str, rows: KeptRows, several: frozenset[Storage]) -> Iterator[Edge]:
    """As conversions from "nobody" to "kept" that all who keep it share, the regions being the
    edges' slots; of what the same choices keep, one for all."""
    together: dict[tuple[tuple[int, ...], ...], dict[Storage, int]] = {}
    order = dict.fromkeys(one for row in rows for kept in row for one in kept if one in several)
    for one in order:
        takers = tuple(tuple(int(one in kept) for kept in row) for row in rows)
        size = next(kept[one] for row in rows for kept in row if one in kept)
        together.setdefault(takers, {})[one] = size
    for takers, sizes in together.items():
        uses = [Use(slot, row) for slot, row in enumerate(takers) if any(row)]
        source = Use(uses[0].slot, (0,) * len(uses[0].layouts))
        bytes_ = ((0, sum(sizes.values())), (0, 0))
        name = f"{path}: {', '.join(name for name, _ in sizes)} kept"
        yield Edge(name, source, tuple(uses), ((0.0, 0.0), (0.0, 0.0)), bytes_, is_held=True)

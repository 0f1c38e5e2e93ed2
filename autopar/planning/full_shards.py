"""Parameters of one layer that ZeRO 3 shards lie over the same axes: FSDP2 takes a module once."""

from collections import Counter
from collections.abc import Mapping, Sequence

from autopar.mesh import Split
from autopar.planning.price import RegionCandidates, SlotKey
from autopar.plugin import Candidate

Regions = Mapping[SlotKey, Sequence[Candidate]]


def one_full_shard(candidates: RegionCandidates) -> RegionCandidates | str:
    """The candidates without those that shard values over other axes than the rest of their layer;
    where regions of a layer need different ones, why that can't run.

    Of several possible axes those stay that most candidates have.
    """
    layers: dict[str, dict[SlotKey, tuple[Candidate, ...]]] = {}
    for key, choices in candidates.items():
        layers.setdefault(key[0], {})[key] = choices
    kept: dict[SlotKey, tuple[Candidate, ...]] = {}
    for layer, regions in layers.items():
        counted = Counter(axes for c in _all(regions) for axes in _value_axes(c))
        for axes, _ in counted.most_common() or [((), 0)]:
            legal = {
                key: tuple(c for c in choices if _value_axes(c) <= {axes})
                for key, choices in regions.items()
            }
            if all(legal.values()):
                kept |= legal
                break
        else:
            return _why(layer, regions)
    return {key: kept[key] for key in candidates}


def _all(regions: Regions) -> list[Candidate]:
    return [candidate for choices in regions.values() for candidate in choices]


def _value_axes(candidate: Candidate) -> set[Split]:
    return {plan.param for _, plan in candidate.params if plan.param}


def _why(layer: str, regions: Regions) -> str:
    needed = {
        name: sorted({" · ".join(p.axis for p in axes) for c in cs for axes in _value_axes(c)})
        for (_, name), cs in regions.items()
        if all(_value_axes(c) for c in cs)
    }
    text = ", ".join(f"{name} over {' or '.join(axes)}" for name, axes in needed.items())
    return (
        f"parameters of {layer or 'the skeleton'} would be sharded over different axes ({text}), "
        "and FSDP2 shards those of one module over one group: let zero 3 be alike in the whole "
        "layer, or use stage 1 or 2"
    )

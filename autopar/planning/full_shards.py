"""Parameters of one layer that ZeRO 3 shards lie over the same axes: FSDP2 takes a module once."""

from collections import Counter
from collections.abc import Mapping, Sequence

from autopar.mesh import Split
from autopar.planning.price import RegionCandidates, SlotKey
from autopar.plugin import Candidate


def one_full_shard(candidates: RegionCandidates) -> RegionCandidates | str:
    """The candidates without those that shard values over other axes than the rest of their layer;
    where regions of a layer need different ones, why that can't run.

    Of several possible axes those stay that most candidates have.
    """
    layers: dict[str, dict[str, tuple[Candidate, ...]]] = {}
    for (layer, region), choices in candidates.items():
        layers.setdefault(layer, {})[region] = choices
    known: dict[tuple[tuple[str, int], ...], dict[str, tuple[Candidate, ...]] | str] = {}
    kept: dict[SlotKey, tuple[Candidate, ...]] = {}
    for layer, regions in layers.items():
        alike = tuple((name, id(choices)) for name, choices in regions.items())
        if alike not in known:
            known[alike] = _kept(layer, regions)
        found = known[alike]
        if isinstance(found, str):
            return found
        kept |= {(layer, region): choices for region, choices in found.items()}
    return {key: kept[key] for key in candidates}


def _kept(
    layer: str, regions: Mapping[str, tuple[Candidate, ...]]
) -> dict[str, tuple[Candidate, ...]] | str:
    sharded = {c: _value_axes(c) for choices in regions.values() for c in choices}
    counted = Counter(axes for c in _all(regions) for axes in sharded[c])
    for axes, _ in counted.most_common() or [((), 0)]:
        legal = {
            region: tuple(c for c in choices if sharded[c] <= {axes})
            for region, choices in regions.items()
        }
        if all(legal.values()):
            return legal
    return _why(layer, regions)


def _all(regions: Mapping[str, Sequence[Candidate]]) -> list[Candidate]:
    return [candidate for choices in regions.values() for candidate in choices]


def _value_axes(candidate: Candidate) -> set[Split]:
    return {plan.param for _, plan in candidate.params if plan.param}


def _why(layer: str, regions: Mapping[str, Sequence[Candidate]]) -> str:
    needed = {
        name: sorted({" · ".join(p.axis for p in axes) for c in cs for axes in _value_axes(c)})
        for name, cs in regions.items()
        if all(_value_axes(c) for c in cs)
    }
    text = ", ".join(f"{name} over {' or '.join(axes)}" for name, axes in needed.items())
    return (
        f"parameters of {layer or 'the skeleton'} would be sharded over different axes ({text}), "
        "and FSDP2 shards those of one module over one group: let zero 3 be alike in the whole "
        "layer, or use stage 1 or 2"
    )

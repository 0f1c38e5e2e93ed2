"""Where a strategy splits over a factor of an axis, the axis becomes several.

tp = 4 over 2 kv heads and 2 queries a head is the axes tp_0 = 2, tp_1 = 2: every candidate that
splits over tp then splits over both, in order, and everything after sees whole axes only.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopar.layouts.layout import Setting
from autopar.mesh import AxisPart, Mesh, Split
from autopar.plugin import Candidate, ParamPlan

SlotKey = tuple[str, str]
"""(layer path, region)."""
Factors = Mapping[str, tuple[tuple[str, int, int], ...]]
"""Axis → (new axis, size, stride), outermost first; only for axes that are cut."""


def factors_of(mesh: Mesh, candidates: Iterable[Candidate]) -> Factors:
    """The factors that the candidates' splits cut each axis into."""
    cuts: dict[str, set[int]] = {}
    for candidate in candidates:
        for part in _parts(candidate):
            cuts.setdefault(part.axis, set()).update({part.stride, part.stride * part.size})
    out = {}
    for axis, size in mesh.axes:
        edges = sorted({1, size, *cuts.get(axis, ())}, reverse=True)
        if len(edges) > 2:
            pairs = list(itertools.pairwise(edges))
            assert all(high % low == 0 for high, low in pairs), (axis, edges)
            out[axis] = tuple(
                (f"{axis}_{i}", high // low, low) for i, (high, low) in enumerate(pairs)
            )
    return out


def _parts(candidate: Candidate) -> Iterable[AxisPart]:
    for _, split in candidate.splits:
        yield from split
    for form in candidate.forms:
        yield from form.axes
        for _, _, axes in form.moves:
            yield from axes
    for _, plan in candidate.params:
        yield from (*plan.param, *plan.grad, *plan.state)
        yield from plan.sync.axes if plan.sync else ()


def refine_setting(setting: Setting, factors: Factors) -> Setting:
    """The setting on the mesh with the cut axes replaced by their factors."""
    axes: list[tuple[str, int]] = []
    for axis, size in setting.mesh.axes:
        cut = factors.get(axis)
        axes += [(name, length) for name, length, _ in cut] if cut else [(axis, size)]
    return replace(setting, mesh=Mesh(tuple(axes)), data=refine_split(setting.data, factors))


def refine_candidate(candidate: Candidate, factors: Factors) -> Candidate:
    """The candidate with every part of a cut axis replaced by the factors that it covers."""
    splits = tuple((dim, refine_split(split, factors)) for dim, split in candidate.splits)
    params = tuple(
        (
            name,
            ParamPlan(
                refine_split(plan.param, factors),
                refine_split(plan.grad, factors),
                refine_split(plan.state, factors),
                plan.sync and replace(plan.sync, axes=refine_split(plan.sync.axes, factors)),
            ),
        )
        for name, plan in candidate.params
    )
    forms = tuple(
        replace(
            form,
            axes=refine_split(form.axes, factors),
            moves=tuple((d, o, refine_split(axes, factors)) for d, o, axes in form.moves),
        )
        for form in candidate.forms
    )
    return replace(candidate, splits=splits, params=params, forms=forms)


def refined_choices(
    setting: Setting, choices: Mapping[SlotKey, tuple[Candidate, ...]]
) -> tuple[Setting, dict[SlotKey, tuple[Candidate, ...]]]:
    """The setting and every region's candidates in terms of the factors that these split over;
    regions that share their candidates still do."""
    unique = {id(one): one for one in choices.values()}
    factors = factors_of(setting.mesh, itertools.chain(*unique.values()))
    alike = {
        key: tuple(refine_candidate(candidate, factors) for candidate in one)
        for key, one in unique.items()
    }
    refined = {key: alike[id(one)] for key, one in choices.items()}
    return refine_setting(setting, factors), refined


def refine_split(split: Split, factors: Factors) -> Split:
    """A split in terms of the factors."""
    out: list[AxisPart] = []
    for part in split:
        cut = factors.get(part.axis)
        if cut is None:
            out.append(part)
            continue
        assert not part.balanced, f"{part.axis} is balanced: it can't be cut into factors"
        low, high = part.stride, part.stride * part.size
        out += [AxisPart(name, size) for name, size, stride in cut if low <= stride < high]
    return tuple(out)

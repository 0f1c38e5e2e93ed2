"""ModelGraph → candidates: every strategy refines what each region may do on one mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.graph.model_graph import Block
from autopar.layouts.layout import Setting
from autopar.planning.legal import candidate_faults, form_conflict, in_microbatch
from autopar.planning.pins import StrategyPin
from autopar.planning.schedules import owner_of
from autopar.plugin import Candidate, Refusal, Region, Strategy

TIERS = ("dims", "state", "recompute")


@dataclass(frozen=True)
class Candidates:
    """What a region may do, and what each strategy that could do nothing said."""

    region: Region
    choices: tuple[Candidate, ...]
    refusals: Mapping[str, tuple[str, ...]]
    missed: frozenset[str]
    """Strategies that were pinned on but are legal nowhere in this region."""


def annotate(
    block: Block,
    region: Region,
    strategies: Sequence[Strategy],
    setting: Setting,
    pins: Mapping[str, StrategyPin],
) -> Candidates:
    """All candidates of a region: the closure under the strategies' refinements, then the pins.

    The result doesn't depend on the order of the strategies. Errors: AutoparError for a candidate
    that breaks the contract, quoted.
    """
    seen = in_microbatch(region, setting)
    active = [_configured(s, pins.get(s.name)) for s in strategies if _is_active(s, pins)]
    refusals: dict[str, dict[str, None]] = {}
    found = {Candidate(region.name): None}
    for tier in TIERS:
        members = [s for s in active if s.tier == tier]
        todo = list(found)
        while todo:
            candidate = todo.pop(0)
            for strategy in members:
                for given in strategy.refine(candidate, seen, setting.mesh):
                    result = _once(candidate, given)
                    if isinstance(result, Refusal):
                        refusals.setdefault(strategy.name, {})[result.reason] = None
                    elif result not in found:
                        _check(result, seen, strategy, setting)
                        found[result] = None
                        todo.append(result)
    legal = [c for c in found if not _conflicts(c, seen, active, setting, refusals)]
    legal = _split_batch(legal, setting)
    chosen, missed = _pinned(legal, strategies, pins)
    why = {name: tuple(reasons) for name, reasons in sorted(refusals.items())}
    return Candidates(region, tuple(sorted(chosen, key=_order)), why, missed)


def _split_batch(legal: list[Candidate], setting: Setting) -> list[Candidate]:
    """Data parallelism holds everywhere: where a region can split the batch over the data axes, it
    does. (Running all samples on every rank may price lower, but nobody could explain the plan.)
    So do balanced splits of a sequence."""
    axes = [part.axis for part in setting.data]
    legal = [c for c in legal if all(c.uses(axis) for axis in axes)] or legal
    return [c for c in legal if is_balanced(c)] or legal


def is_balanced(candidate: Candidate) -> bool:
    """Whether it splits a dim in balanced chunks."""
    return any(part.balanced for _, split in candidate.splits for part in split)


def _once(before: Candidate, after: Candidate | Refusal) -> Candidate | Refusal:
    """How a parameter lives is said once: a second strategy may not undo the first's decision."""
    if isinstance(after, Refusal):
        return after
    undone = [name for name, plan in before.params if after.param(name) != plan]
    if not undone:
        return after
    makers = ", ".join(name for name, _ in before.made_by)
    return Refusal(
        f"region {before.region}: how {undone[0]} lives is already decided (by one of {makers})"
    )


def _order(candidate: Candidate) -> tuple[bool, str]:
    """Of equals a search takes the first: what runs once comes before what runs again."""
    made = (candidate.made_by, candidate.splits, candidate.recompute, candidate.forms)
    return candidate.recompute is not None, repr(made)


def _is_active(strategy: Strategy, pins: Mapping[str, StrategyPin]) -> bool:
    pin = pins.get(strategy.name)
    return pin is not False and (strategy.exact or pin is not None)


def _configured(strategy: Strategy, pin: StrategyPin | None) -> Strategy:
    return replace(strategy, **pin) if isinstance(pin, Mapping) else strategy


def _check(candidate: Candidate, region: Region, strategy: Strategy, setting: Setting) -> None:
    faults = candidate_faults(candidate, region, setting)
    if strategy.name not in dict(candidate.made_by):
        faults.append("isn't marked as made by the strategy")
    if faults:
        raise AutoparError(
            f"strategy {strategy.name!r} ({type(strategy).__module__}) made a candidate for the "
            f"region {region.name!r} that breaks the contract: it {'; it '.join(faults)}. "
            f"The candidate: {candidate}"
        )


def _conflicts(
    candidate: Candidate,
    region: Region,
    active: Sequence[Strategy],
    setting: Setting,
    refusals: dict[str, dict[str, None]],
) -> bool:
    makers = {*dict(candidate.made_by), owner_of(setting.schedule, active)}
    apart = form_conflict(candidate, region)
    if apart is not None:
        for name in dict(candidate.made_by):
            refusals.setdefault(name, {})[apart] = None
        return True
    for strategy in active:
        if strategy.name in makers:
            reason = strategy.conflict(candidate, region, setting.mesh, setting.schedule)
            if reason is not None:
                for name in {strategy.name, *dict(candidate.made_by)}:
                    refusals.setdefault(name, {})[reason] = None
                return True
    return False


def _pinned(
    legal: list[Candidate], strategies: Sequence[Strategy], pins: Mapping[str, StrategyPin]
) -> tuple[list[Candidate], frozenset[str]]:
    """Keep what every pinned strategy took part in, where it could; owners of axes first."""
    missed = set()
    ordered = sorted(strategies, key=lambda s: (not s.axes(), TIERS.index(s.tier), s.name))
    for strategy in ordered:
        pin = pins.get(strategy.name)
        if pin is None or pin is False:
            continue
        kept = [c for c in legal if c.options(strategy.name) is not None]
        if kept:
            legal = kept
        else:
            missed.add(strategy.name)
    return legal, frozenset(missed)

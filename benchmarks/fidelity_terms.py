"""Terms of the cost models, each as a step's time without it."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from fidelity_predict import Constants, CutMessages, Prepared, facts, timed_s

from autopar.cost_models.collectives import CollectiveCost
from autopar.plugin import Collective, Compute, Effect

Term = Callable[[Prepared, Constants], float]


def _constant(part: str, value: float) -> Term:
    """With all constants of a name as if there were nothing to them."""

    def without(one: Prepared, values: Constants) -> float:
        return timed_s(one, {k: value if k.endswith(part) else v for k, v in values.items()})

    return without


def _effects(drops: Callable[[Effect], bool]) -> Term:
    """Without some effects."""

    def without(one: Prepared, values: Constants) -> float:
        works = tuple(
            replace(w, tally={k: n for k, n in w.tally.items() if not drops(k[0])})
            for w in one.works
        )
        return timed_s(replace(one, works=works), values)

    return without


def _changed(change: Callable[[Effect], Effect]) -> Term:
    """With some effects otherwise."""

    def without(one: Prepared, values: Constants) -> float:
        works = []
        for work in one.works:
            tally: dict[tuple[Effect, int], int] = {}
            for (effect, calls), count in work.tally.items():
                key = (change(effect), calls)
                tally[key] = tally.get(key, 0) + count
            works.append(replace(work, tally=tally))
        return timed_s(replace(one, works=tuple(works)), values)

    return without


def _bubble(one: Prepared, values: Constants) -> float:
    """Stages busy all the time."""
    setting = one.setting
    if setting.schedule is None:
        return timed_s(one, values)
    table = setting.schedule.table
    share = table.microbatches / (table.per_slowest + table.per_stage * table.stages)
    return timed_s(one, values) * share


def _only(*algorithms: str) -> Term:
    def without(one: Prepared, values: Constants) -> float:
        cuts = facts(one.run.software)["cuts_messages"]
        return timed_s(
            one, values, {"collectives": (CutMessages if cuts else CollectiveCost)(algorithms)}
        )

    return without


def _is(*ops: str) -> Callable[[Effect], bool]:
    return lambda e: isinstance(e, Compute) and e.op in ops and e.phase != "optimizer"


def _plain(effect: Effect) -> Effect:
    """A product without its shape, attention without what a mask hides."""
    if isinstance(effect, Compute) and effect.op == "matmul":
        return replace(effect, shape=())
    return effect


def _unskipped(effect: Effect) -> Effect:
    return replace(effect, skipped=0.0) if isinstance(effect, Compute) else effect


TERMS: Mapping[str, Term] = {
    "host time": _constant(".op_s", 0.0),
    "what a collective takes beside its algorithm": _constant(".collective_s", 0.0),
    "shapes of products (tiles, waves, alignment)": _changed(_plain),
    "alignment": lambda one, v: timed_s(one, {**v, "all.aligned_16": 1.0, "all.unaligned": 1.0}),
    "smaller tiles' efficiency": lambda one, v: timed_s(
        one, {**v, "all.tile_128": 1.0, "all.tile_64": 1.0}
    ),
    "a tile's prologue": _constant(".prologue", 1e-9),
    "causal masks that halve attention": _changed(_unskipped),
    "norms, pointwise ops and losses": _effects(_is("pointwise", "normalisation", "loss")),
    "copies": _effects(_is("copy")),
    "sums of gradients' uses": _effects(_is("sum")),
    "the optimizer": _effects(lambda e: isinstance(e, Compute) and e.phase == "optimizer"),
    "sums of gradients over ranks": _effects(
        lambda e: isinstance(e, Collective) and e.phase == "grad_sync"
    ),
    "messages between stages": _effects(lambda e: isinstance(e, Collective) and e.op == "send"),
    "tensor parallelism's collectives": _effects(
        lambda e: isinstance(e, Collective) and {p.axis for p in e.axes} == {"tp"}
    ),
    "the bubble": _bubble,
    "groups that collide between nodes": _constant(".crowding", 1e-9),
    "slow-down by overlap": _constant(".overlap_slowdown", 0.0),
    "trees": _only("ring", "in_switch", "chain", "linear", "direct", "pairwise"),
}
"""Of each: the step's time without it, everything else as fitted."""

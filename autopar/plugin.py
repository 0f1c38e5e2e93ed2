"""The contract between autopar and its plugins: all that a plugin imports.

A *strategy* says what is legal and what it entails, never what it costs. A *cost model* prices
effects and never knows a strategy. Both are frozen dataclasses whose fields are their options;
both are found by entry point (`autopar.strategies`, `autopar.cost_models`), the built-in ones too.
"""

import abc
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from autopar.devices import ClusterSpec, Device, Fit, Kernels, Link, Protocol
from autopar.errors import AutoparError
from autopar.hashed_once import hashed_once
from autopar.mesh import AxisPart, Mesh, Split, divides, split_size
from autopar.op_forms import Attention, Exchange, OpForm
from autopar.schedule import Table

__all__ = [
    "BUCKET",
    "Alongside",
    "Attention",
    "AutoparError",
    "AxisPart",
    "AxisSpec",
    "Candidate",
    "ClusterSpec",
    "Collective",
    "Compute",
    "CostModel",
    "Device",
    "Dim",
    "Effect",
    "Exchange",
    "Fit",
    "GradientSync",
    "Kernels",
    "Link",
    "Mesh",
    "OpForm",
    "Option",
    "ParamInfo",
    "ParamPlan",
    "Phase",
    "Protocol",
    "Recomputed",
    "Refusal",
    "Region",
    "Resident",
    "Role",
    "Schedule",
    "Send",
    "Split",
    "StateSpec",
    "Strategy",
    "Table",
    "divides",
    "split_over",
    "split_size",
]

BUCKET = "bucket"
Phase = Literal["forward", "backward", "grad_sync", "optimizer"]
Role = Literal[
    "batch",
    "sequence",
    "hidden",
    "heads",
    "query_group",
    "ffn",
    "channels",
    "experts",
    "vocab",
    "other",
]
Option = str | int | float | bool | None


# ---------------------------------------------------------------- what a strategy sees


@dataclass(frozen=True)
class Dim:
    """A named dim that a region's tensors carry.

    `internal` dims are born and contracted inside the region; the others cross its boundary.
    `blocked` says why the dim can't be split inside this region ("" where it can). `rows`: of a dim
    of experts, the dims of the tokens that are sorted by them. It may then be split, blocked or
    not, over axes that split one of those as well: tokens are sent to the ranks that hold their
    experts. `blocking`: ops that alone block the dim; it may be split where the candidate runs each
    of these in a form of its own. `pads`: it may be split where it doesn't divide; the last pieces
    are then padded to the size of the others.
    """

    name: str
    size: int
    role: Role
    internal: bool
    blocked: str = ""
    rows: tuple[str, ...] = ()
    blocking: tuple[str, ...] = ()
    pads: bool = False

    def fits(self, split: Split) -> bool:
        """Whether it can be cut into the pieces of a split."""
        return self.pads or divides(split, self.size)


@dataclass(frozen=True)
class ParamInfo:
    """A parameter owned by a region: its name within the block, whole shape and dtype name.
    `experts`: the dims with `rows` that it is split along wherever the region splits them."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    experts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Region:
    """Ops of one block that share their choices.

    `name` is unique in the block: "stream" for what lies between (norms, residual adds), else the
    role of the internal dim ("heads", "ffn", "ffn_2", "channels", …), "mixing" for ops that need
    the whole batch. `layer_class` names the block. `once` and `layer_once` say why the region's
    ops, or those of the whole layer, can't run again in the backward ("" where they can).
    `attention`: its attention ops, which a candidate may run in a form of its own.
    """

    name: str
    layer_class: str
    dims: tuple[Dim, ...]
    params: tuple[ParamInfo, ...]
    has_dropout: bool = False
    once: str = ""
    layer_once: str = ""
    attention: tuple[Attention, ...] = ()

    def dim(self, role: Role) -> Dim | None:
        """The region's first dim of this role, or None."""
        return next((d for d in self.dims if d.role == role), None)


# ---------------------------------------------------------------- what a strategy says


@dataclass(frozen=True)
class AxisSpec:
    """A mesh axis, declared by the one strategy that owns it.

    `splits_batch`: ranks along it get different samples. `locality` places it: the axis with the
    highest is innermost, on the fastest links. `splits_layers`: ranks along it hold different
    layers, and its owner has schedules; at most one axis does.
    """

    name: str
    splits_batch: bool
    locality: int
    splits_layers: bool = False


@dataclass(frozen=True)
class Schedule:
    """How microbatches run through layers that lie in stages along `axis`.

    The emitted module imports `function` ("package.module:name") and calls it as
    `function(**options)`; `make` returns the same table. A table of many stages and microbatches
    takes long to make, and a search looks at many: `per_stage` and `splits_backward` are its own,
    said without it (`per_stage` None: only the table knows, and it is no less than
    `least_per_stage`). So are, by `make_brief`, the microbatches in flight: a table of fewer
    microbatches and as many stages and chunks in which as many are (None: the table itself).
    """

    name: str
    axis: str
    function: str
    options: tuple[tuple[str, int], ...]
    microbatches: int
    make: Callable[[], Table] = field(compare=False)
    per_stage: float | None = None
    splits_backward: bool = False
    least_per_stage: float = 0.0
    make_brief: Callable[[], Table] | None = field(default=None, compare=False)

    @functools.cached_property
    def table(self) -> Table:
        """What is planned with. Errors: BrokenScheduleError where it can't run."""
        table = self.make()
        table.check()
        assert table.microbatches == self.microbatches, self
        assert table.splits_backward == self.splits_backward, self
        assert self.per_stage is None or math.isclose(table.per_stage, self.per_stage), self
        assert table.per_stage >= self.least_pace * (1 - 1e-9), self
        assert self.make_brief is None or self.brief.every_in_flight == table.every_in_flight, self
        return table

    @functools.cached_property
    def brief(self) -> Table:
        """Stages, chunks and microbatches in flight as the table has them. Errors: as there, but
        where it is made by itself."""
        return self.table if self.make_brief is None else self.make_brief()

    @property
    def least_pace(self) -> float:
        """What `Table.per_stage` is at least, without the table."""
        return self.least_per_stage if self.per_stage is None else self.per_stage


@dataclass(frozen=True)
class Send:
    """One collective of a gradient's own sync, in terms of the local gradient: `fraction` of its
    elements (rounded up), each in `dtype` ("": the gradient's) with `index_bytes` beside it."""

    op: Literal["all_reduce", "all_gather", "reduce_scatter"]
    fraction: float = 1.0
    dtype: str = ""
    index_bytes: int = 0


@dataclass(frozen=True)
class StateSpec:
    """A tensor kept beside a parameter, shaped like its local gradient and of its dtype; zero at
    first. `kind` over the sync's axes: "I" the same on every rank, "P" each rank's own share of a
    sum (error feedback): a checkpoint saves the sum and gives it to the first rank."""

    name: str
    kind: Literal["I", "P"]


@dataclass(frozen=True)
class GradientSync:
    """How a gradient is summed over `axes` instead of by an all-reduce, once a step.

    The emitted module imports `function` ("package.module:name") and calls it as
    `function(root, names=(…), axis=group, **options)` on accumulated gradients. `sends` and
    `passes` (reads and writes of the whole local gradient) are what is priced, `state` what is
    kept.
    """

    axes: Split
    function: str
    options: tuple[tuple[str, Option], ...] = ()
    sends: tuple[Send, ...] = ()
    passes: float = 0.0
    state: tuple[StateSpec, ...] = ()


@dataclass(frozen=True)
class ParamPlan:
    """How one parameter lives: the axes that its value, gradient and optimizer state are sharded
    over, beyond what the region's splits say (empty: whole on every rank), and its own gradient
    sync if it has one."""

    param: Split = ()
    grad: Split = ()
    state: Split = ()
    sync: GradientSync | None = None


@dataclass(frozen=True)
class Recomputed:
    """What runs again in the backward instead of being kept: the region alone, of which what
    crosses into it is kept; or its whole layer, `layers` consecutive ones together, of which the
    input is kept (then all regions of these layers must say so)."""

    scope: Literal["region", "layers"]
    layers: int = 1


@hashed_once
@dataclass(frozen=True)
class Candidate:
    """One way to run one region on one mesh.

    `splits` maps named dims to the axes they are split over, outermost first. `params` holds the
    parameters that a strategy treats specially. `made_by` lists (strategy, options), sorted.
    `recompute`: None where everything that the backward needs is kept. `forms`: ops that are run in
    a way of their own, sorted.
    """

    region: str
    splits: tuple[tuple[str, Split], ...] = ()
    params: tuple[tuple[str, ParamPlan], ...] = ()
    made_by: tuple[tuple[str, tuple[tuple[str, Option], ...]], ...] = ()
    recompute: Recomputed | None = None
    forms: tuple[OpForm, ...] = ()

    def split(self, dim: str) -> Split:
        """The axes that `dim` is split over."""
        return dict(self.splits).get(dim, ())

    def uses(self, axis: str) -> bool:
        """Whether some dim is split over `axis`."""
        return any(part.axis == axis for _, split in self.splits for part in split)

    def param(self, name: str) -> ParamPlan:
        """How the parameter `name` lives."""
        return dict(self.params).get(name, ParamPlan())

    def options(self, strategy: str) -> Mapping[str, Option] | None:
        """The options that `strategy` was applied with, or None where it was not."""
        found = dict(self.made_by).get(strategy)
        return None if found is None else dict(found)

    def with_split(self, strategy: str, dim: str, split: Split, **options: Option) -> "Candidate":
        """This candidate with `dim` split over `split`, and `strategy` among its makers."""
        splits = {**dict(self.splits), dim: split}
        made_by = _made_by(self.made_by, strategy, options)
        return replace(self, splits=tuple(sorted(splits.items())), made_by=made_by)

    def form(self, op: str) -> OpForm | None:
        """The form of its own in which an op is run, or None."""
        return next((form for form in self.forms if form.op == op), None)

    def blocks(self, dim: Dim) -> str:
        """Why the dim can't be split in this candidate, or ""."""
        own = {form.op for form in self.forms if form.allows(dim.name)}
        return "" if dim.blocking and own >= set(dim.blocking) else dim.blocked

    def with_forms(self, strategy: str, forms: Iterable[OpForm], **options: Option) -> "Candidate":
        """This candidate with ops in forms of their own."""
        merged = {form.op: form for form in (*self.forms, *forms)}
        made_by = _made_by(self.made_by, strategy, options)
        return replace(self, forms=tuple(merged[op] for op in sorted(merged)), made_by=made_by)

    def with_params(
        self, strategy: str, params: Mapping[str, ParamPlan], **options: Option
    ) -> "Candidate":
        """This candidate with these parameters' plans replaced."""
        merged = {**dict(self.params), **params}
        made_by = _made_by(self.made_by, strategy, options)
        return replace(self, params=tuple(sorted(merged.items())), made_by=made_by)

    def with_recompute(
        self, strategy: str, recompute: Recomputed, **options: Option
    ) -> "Candidate":
        """This candidate with what runs again in the backward."""
        made_by = _made_by(self.made_by, strategy, options)
        return replace(self, recompute=recompute, made_by=made_by)


def _made_by(
    made_by: tuple[tuple[str, tuple[tuple[str, Option], ...]], ...],
    strategy: str,
    options: Mapping[str, Option],
) -> tuple[tuple[str, tuple[tuple[str, Option], ...]], ...]:
    merged = {**dict(made_by), strategy: tuple(sorted(options.items()))}
    return tuple(sorted(merged.items()))


@dataclass(frozen=True)
class Refusal:
    """Why a strategy can't be applied to a candidate; shown where a pin is legal nowhere."""

    reason: str


def split_over(
    strategy: str,
    candidate: Candidate,
    region: Region,
    dim: Dim,
    axis: str,
    mesh: Mesh,
    balanced: bool = False,
    **options: Option,
) -> Candidate | Refusal:
    """The candidate with a dim split over one more axis, placed in mesh order, or why it can't be:
    the dim is blocked, isn't divisible by all its axes together, or an op in a form of its own
    doesn't take it so."""
    blocked = candidate.blocks(dim)
    if blocked:
        return Refusal(f"region {region.name}: {dim.name} can't be split: {blocked}")
    parts = (*candidate.split(dim.name), replace(mesh.part(axis), balanced=balanced))
    split = tuple(sorted(parts, key=lambda part: -mesh.stride(part.axis)))
    if not dim.fits(split):
        axes = " · ".join(f"{part.axis}{part.size}" for part in parts)
        pieces = split_size(split)
        two = ", each of two chunks" if any(part.balanced for part in split) else ""
        return Refusal(
            f"region {region.name}: {dim.name} = {dim.size} isn't divisible by {pieces} ({axes})"
            f"{two}"
        )
    made = candidate.with_split(strategy, dim.name, split, **options)
    for form in made.forms:
        if form.op in dim.blocking and not form.leaves_whole(dim.name, made.splits):
            axes = " · ".join(part.axis for part in form.axes)
            return Refusal(
                f"region {region.name}: {form.op} takes {dim.name} split over {axes} alone"
            )
    return made


@dataclass(frozen=True)
class Strategy(abc.ABC):
    """A plugin that says how regions may be split. Its dataclass fields are its options."""

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    """False: changes numbers, so it is used only where pinned."""
    tier: ClassVar[Literal["dims", "state", "recompute"]] = "dims"
    """Strategies of tier "dims" split named dims, in any order; "state" then shards what lives;
    "recompute" last says what runs again instead of being kept."""

    def axes(self) -> tuple[AxisSpec, ...]:
        """The mesh axes that this strategy owns."""
        return ()

    @abc.abstractmethod
    def refine(
        self, candidate: Candidate, region: Region, mesh: Mesh
    ) -> Iterable["Candidate | Refusal"]:
        """Further candidates made from `candidate` (which is itself kept), or why there are none.

        Yielding nothing means that the strategy has nothing to say here (its axis has size 1, say).
        Options that are set hold in every candidate: one that can't keep them isn't made. A pin
        would else be lost in silence.
        """

    def misfit(self, regions: Iterable[Region], mesh: Mesh) -> str | None:
        """Why a model with these regions can't use this strategy's axes on this mesh, or None: for
        an axis that would have nothing to do of its own."""
        return None

    def schedules(self, mesh: Mesh, microbatches: int, layers: int) -> Iterable[Schedule | Refusal]:
        """For the owner of an axis that splits layers: in which ways a model of so many layers may
        run on this mesh, or why it can't.

        A plan that is read again is asked of the owner with its own options set to those of the
        plan's schedule, by name ("schedule" is the schedule's name): a pinned owner may offer what
        it doesn't look at by itself.
        """
        return ()

    def conflict(
        self, candidate: Candidate, region: Region, mesh: Mesh, schedule: Schedule | None = None
    ) -> str | None:
        """Why a finished candidate that this strategy took part in may not run, or None. The owner
        of the schedule takes part in all."""
        return None


# ---------------------------------------------------------------- effects, and who prices them


@dataclass(frozen=True)
class Compute:
    """One op on one rank, once a microbatch. `op` is the op's class ("matmul", "attention",
    "pointwise", …), `bytes` what it reads and writes. `shape` is what a kernel's speed depends on,
    the forward's in the backward too: a matmul's (products, m, n, k), attention's (heads of all
    samples, queries, keys, length of a query, of a value); () where unknown. `skipped`: the share
    of `flops` that kernels needn't do (half under a causal mask). `between`: those of `bytes`, its
    own and of the pointwise op before it, that a kernel which does both wouldn't move. `special`:
    exponentials, tangents and the like, one an element. `again`: in
    the backward the forward's own work runs once more."""

    op: str
    flops: int
    bytes: int
    dtype: str
    phase: Phase
    shape: tuple[int, ...] = ()
    skipped: float = 0.0
    between: int = 0
    special: int = 0
    again: bool = False
    kind: ClassVar[str] = "compute"


@dataclass(frozen=True)
class Collective:
    """One collective: `bytes` per rank, the larger of input and output, padding included."""

    op: Literal[
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "send",
    ]
    """"send" is point to point, from each rank to its neighbour along the axes."""
    bytes: int
    axes: Split
    phase: Phase
    per: Literal["microbatch", "step"]
    what: str
    """What is communicated: a tensor's or a parameter's name."""
    unit: str = ""
    """The runtime joins a layer's collectives of one unit, op, phase and axes into one call, and
    those of the unit BUCKET over all layers, in buckets. "": a call of its own."""
    hides: bool = False
    """It runs beside the compute of its phase (of the first forward or the last backward, once a
    step), and nothing waits for it there."""
    kind: ClassVar[str] = "collective"


@dataclass(frozen=True)
class Resident:
    """Bytes that one rank holds. "saved" is held once a microbatch in flight; of "transient" only
    the largest at a time. `when`: "end", of what follows the last layer, so that the layers'
    backward finds it gone; "again", while a layer runs again there; "alone", while a region of it
    does by itself (one of them at a time)."""

    what: Literal["parameter", "gradient", "optimizer", "master", "saved", "transient"]
    bytes: int
    when: Literal["any", "end", "again", "alone"] = "any"
    kind: ClassVar[str] = "resident"


@dataclass(frozen=True)
class Alongside:
    """Work of one stage that may run at the same time (a microbatch's forward, its backward): the
    device's seconds, with those of collectives that it waits for; the host's, which starts
    everything; and those of collectives that nothing waits for (`hides`)."""

    device_s: float
    host_s: float
    network_s: float
    kind: ClassVar[str] = "alongside"


Effect = Compute | Collective | Resident | Alongside


@dataclass(frozen=True)
class CostModel(abc.ABC):
    """A plugin that prices kinds of effects; each kind is claimed by exactly one model."""

    name: ClassVar[str]
    prices: ClassVar[frozenset[str]] = field(default=frozenset())

    @abc.abstractmethod
    def cost(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> float:
        """Seconds for a Compute, a Collective or an Alongside, bytes for a Resident. All but
        collectives are one rank's, and priced once for all meshes: theirs is empty. A part of an op
        or of a message costs at least its share of the whole: bounds of a search build on it.
        Errors: AutoparError for an effect without a price (an unknown op, say); never a zero."""

    def apart(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> tuple[float, float]:
        """Seconds of a Compute or a Collective on the device or the network, and of the host that
        starts it, which may run ahead: what `Alongside` joins. Where it can't, all is the former's.
        """
        return self.cost(effect, mesh, cluster), 0.0

    def rows(self, cluster: ClusterSpec) -> tuple[tuple[float, float, float], ...]:
        """For who prices Alongside: weights of its seconds (device, host, network). The price is
        the largest of the weighted sums, so that linear programmes can have it."""
        return ()

    def hides(self, effect: Collective) -> bool:
        """For who prices Alongside: whether a collective counts as hidden."""
        return effect.hides

    def explain(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> str:
        """How the price came about, in a word that the plan shows: a collective's algorithm."""
        return ""

    def overhead_bytes(self, mesh: Mesh, cluster: ClusterSpec) -> int:
        """Bytes that every rank loses whatever the plan (context, allocator, communicators)."""
        return 0

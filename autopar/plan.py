"""The plan: every decision and what it is predicted to cost, as a frozen value and as JSON.

A plan holds no time, path, host or date: the same input gives the same bytes. Reading one runs no
code.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pydantic.json_schema
from pydantic.dataclasses import dataclass

from autopar.batch_spec import BatchSpec
from autopar.errors import AutoparError
from autopar.strict_json import read_json

Option = bool | int | float | str | None
Count = Annotated[int, pydantic.Field(ge=1)]
FORMAT = 1
_STRICT = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, config=_STRICT)
class ModelId:
    """Which model a plan is for: its class, a hash of its graphs, and its size."""

    class_name: str
    fingerprint: str
    parameters: int
    layers: int


@dataclass(frozen=True, config=_STRICT)
class SendChoice:
    """One collective of a gradient's own sync; see `autopar.plugin.Send`."""

    op: Literal["all_reduce", "all_gather", "reduce_scatter"]
    fraction: float
    dtype: str
    index_bytes: int


@dataclass(frozen=True, config=_STRICT)
class StateChoice:
    """A tensor kept beside a parameter; see `autopar.plugin.StateSpec`."""

    name: str
    kind: Literal["I", "P"]


@dataclass(frozen=True, config=_STRICT)
class SyncChoice:
    """How a gradient is summed in its own way; see `autopar.plugin.GradientSync`."""

    axes: tuple[str, ...]
    function: str
    options: Mapping[str, Option]
    sends: tuple[SendChoice, ...]
    passes: float
    state: tuple[StateChoice, ...]


@dataclass(frozen=True, config=_STRICT)
class ParamChoice:
    """The axes that a parameter's value, gradient and optimizer state are sharded over."""

    param: tuple[str, ...]
    grad: tuple[str, ...]
    state: tuple[str, ...]
    sync: SyncChoice | None = None


@dataclass(frozen=True, config=_STRICT)
class RecomputeChoice:
    """What runs again in the backward; see `autopar.plugin.Recomputed`."""

    scope: Literal["region", "layers"]
    layers: Count


@dataclass(frozen=True, config=_STRICT)
class ExchangeChoice:
    """What an op in a form of its own communicates; see `autopar.plugin.Exchange`."""

    op: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    phase: Literal["forward", "backward"]
    of: tuple[str, ...]
    times: int
    wide: bool


@dataclass(frozen=True, config=_STRICT)
class MoveChoice:
    """Axes that split the dim `to` instead of `dim` in one op."""

    dim: str
    to: str
    axes: tuple[str, ...]


@dataclass(frozen=True, config=_STRICT)
class FormChoice:
    """An op in a form of its own; see `autopar.plugin.OpForm`."""

    op: str
    axes: tuple[str, ...]
    moves: tuple[MoveChoice, ...]
    function: str
    frees: tuple[str, ...]
    whole: tuple[str, ...]
    passes: int
    copies: int
    exchanges: tuple[ExchangeChoice, ...]


@dataclass(frozen=True, config=_STRICT)
class RegionChoice:
    """What one region does in some layers ("" is the skeleton). `splits`: named dim → axes,
    outermost first; `balanced`: those of which a rank holds two chunks, one from each end.
    `strategies`: who made it, with options. `recompute`: null where everything that the backward
    needs is kept. `forms`: ops that are run in a way of their own."""

    layers: Annotated[tuple[str, ...], pydantic.Field(min_length=1)]
    region: str
    strategies: Mapping[str, Mapping[str, Option]]
    splits: Mapping[str, tuple[str, ...]]
    params: Mapping[str, ParamChoice]
    recompute: RecomputeChoice | None = None
    balanced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    forms: tuple[FormChoice, ...] = ()


@dataclass(frozen=True, config=_STRICT)
class CollectiveTotal:
    """All collectives of one kind over one group in one phase by one algorithm (as the cost model
    names it): bytes and calls of one step on one rank. Calls of a kind may be joined at run time
    (buckets, FSDP2 units); the bytes stay. Where layers lie in stages, those of a rank of `stage`.
    """

    op: str
    axes: tuple[str, ...]
    phase: str
    algorithm: str
    bytes: int
    count: int
    seconds: float
    stage: int = 0


@dataclass(frozen=True, config=_STRICT)
class StagePredicted:
    """A stage's own time of a step, without waiting, and its memory."""

    step_s: float
    memory_bytes: int


@dataclass(frozen=True, config=_STRICT)
class Predicted:
    """What a step is predicted to take on one rank. `memory` splits `memory_bytes` by kind.

    Where layers lie in stages, the times are those of the slowest stage and the memory that of the
    fullest; in `waiting_s` the slowest stage has nothing to do."""

    step_s: float
    compute_s: float
    communication_s: float
    optimizer_s: float
    waiting_s: float
    memory_bytes: int
    memory: Mapping[str, int]
    model_flops: int
    tokens_per_s: float
    mfu: float
    stages: tuple[StagePredicted, ...] = ()


@dataclass(frozen=True, config=_STRICT)
class ScheduleChoice:
    """How microbatches run through layers in stages along `axis`. `parts`: the layers of each part
    of the model, in order; part p lies on stage p modulo the number of stages. `bubble`: the share
    of a step in which a stage waits, were all equal. `in_flight`: for how many microbatches each
    stage holds saved tensors, at most, over its chunks together."""

    name: str
    axis: str
    options: Mapping[str, int]
    parts: tuple[tuple[str, ...], ...]
    bubble: float
    in_flight: tuple[int, ...]


@dataclass(frozen=True, config=_STRICT)
class Certificate:
    """How good the plan is proven to be: no plan of the searched space has a predicted step below
    `bound_s`; `gap` = 1 - bound_s / predicted step. The space is of plans that fit by the search's
    own count of bytes, which is on the safe side for layers that run again. A plan's memory takes
    off what is freed before their backward; the search takes off what the model's end frees, but
    nothing of later layers in the same part, and counts twice what two regions keep.

    `objective_s` is what the solver's programme says of the plan. It is linear, so that work that
    runs at the same time is weighed by the one of the cost model's sums that is the largest at the
    optimum, and joined gradients count as if their buckets were full: it is never above what any
    program really costs. `difference_s` is the predicted step minus it, and part of the gap."""

    solver: str
    objective_s: float
    bound_s: float
    gap: float
    difference_s: float
    candidates: int
    solved: int
    pruned: int
    dropped: int


@dataclass(frozen=True, config=_STRICT)
class Alternative:
    """Another mesh, number of microbatches or schedule ("" is none): its best step, or why it has
    none."""

    mesh: Mapping[str, int]
    microbatches: int
    schedule: str
    step_s: float | None
    bound_s: float | None
    why: str


@dataclass(frozen=True, config=_STRICT)
class RegionCost:
    """Seconds of a step that a region takes in its layers together, on the ranks that hold them.
    `exposed_s`: communication that shows, beyond what hides behind compute. Region "", in no layer:
    what belongs to none."""

    layers: tuple[str, ...]
    region: str
    compute_s: float
    exposed_s: float
    optimizer_s: float


@dataclass(frozen=True, config=_STRICT)
class Rival:
    """Another plan for the same, to compare with. `used`: its strategies with their options, and in
    how many regions of all layers. `predicted` is null where there is none, which `why` explains;
    `why` is else how it was made."""

    mesh: Mapping[str, Count]
    microbatches: Count
    schedule: str
    used: Mapping[str, int]
    predicted: Predicted | None
    why: str


@dataclass(frozen=True, config=_STRICT)
class Plan:
    """All decisions for one model, batch and cluster; see the fields."""

    format: Annotated[int, pydantic.Field(ge=FORMAT, le=FORMAT)]
    model: ModelId
    cluster: Mapping[str, pydantic.JsonValue]
    memory_limit_bytes: Count
    axes: Mapping[str, Count]
    mesh: Mapping[str, Count]
    """The axes that the program runs on, outermost first: `axes`, or the factors of those that a
    strategy cuts (tp into tp_0 and tp_1). Splits and collectives name these."""
    data_axes: tuple[str, ...]
    batch: BatchSpec
    batch_size: Count
    tokens: Count
    microbatches: Count
    schedule: ScheduleChoice | None
    regions: tuple[RegionChoice, ...]
    collectives: tuple[CollectiveTotal, ...]
    predicted: Predicted
    certificate: Certificate
    alternatives: tuple[Alternative, ...]
    assumptions: tuple[str, ...]
    opaque: tuple[str, ...]
    recipe: Rival | None = None
    """What the practitioner's recipe comes to, where that was asked for."""
    runners_up: tuple[Rival, ...] = ()
    """The best on other meshes, where that was asked for."""
    region_costs: tuple[RegionCost, ...] = ()
    """Where the seconds go, where that was asked for."""

    def options(self, region: str) -> Mapping[str, Mapping[str, Option]]:
        """The strategies and options of one region, named "layer/region" (or "region" for the
        skeleton's). Errors: AutoparError for an unknown region."""
        layer, _, name = region.rpartition("/")
        for choice in self.regions:
            if choice.region == name and layer in choice.layers:
                return choice.strategies
        known = sorted({f"{c.layers[0]}/{c.region}".lstrip("/") for c in self.regions})
        raise AutoparError(f"the plan has no region {region!r}; it has, for example, {known}")

    def to_json(self) -> str:
        """The plan as JSON, the same bytes for equal plans."""
        data = _adapter().dump_python(self, mode="json")
        return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> "Plan":
        """A plan from its JSON. Errors: AutoparError that names the first fault."""
        data = read_json(text, "a plan")
        if isinstance(data, dict) and data.get("format", FORMAT) != FORMAT:
            raise AutoparError(
                f"the plan has format {_short(data['format'])}; this autopar reads format {FORMAT}"
            )
        try:
            return _adapter().validate_json(text)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the top level"
            raise AutoparError(
                f"this is not a plan: {first['msg']} at {where} ({error.error_count()} faults)"
            ) from error

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """A plan from its file. Errors: AutoparError where it can't be read or is no plan."""
        try:
            return Plan.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise AutoparError(f"can't read the plan {path}: {error.strerror}") from error
        except ValueError as error:
            raise AutoparError(f"the plan {path} isn't text in UTF-8: {error}") from error
        except AutoparError as error:
            raise AutoparError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan's JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON Schema (draft 2020-12) of plans, made from these classes: the package's file
        `plan_schema.json`. It says what `from_json` says, but that it takes 2.0 for a whole number
        and can't see a key that an object has twice; whether a plan can run, `emit` says."""
        found = _adapter().json_schema(schema_generator=_Schema)
        return {"$schema": pydantic.json_schema.GenerateJsonSchema.schema_dialect, **found}

    def diff(self, other: "Plan") -> str:
        """What is another in `other`: decisions first, then figures; "" where all is equal."""
        from autopar.difference import difference

        return difference(self, other)

    def summary(self) -> str:
        """The plan as a table: what was chosen, what it costs, where memory goes."""
        from autopar.summary import summarise

        return summarise(self)

    def __str__(self) -> str:
        return self.summary()


class _Schema(pydantic.json_schema.GenerateJsonSchema):
    """Without the titles that repeat what a field is called."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Never."""
        return False


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:79]}…"


@functools.cache
def _adapter() -> pydantic.TypeAdapter[Plan]:
    return pydantic.TypeAdapter(Plan)

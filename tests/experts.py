"""Expert parallelism against the plain model: tasks for a pool."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from equality import OFF, Comparison, planned_as, run
from models import Job
from moe import all_raised, grouped

import autopar
from autopar.runtime import Route
from autopar.runtime import experts as runtime

CASES: dict[str, dict[str, Any]] = {
    "ep4": {"ep": 4},
    "ep2_tp2": {"ep": 2, "tp": 2, "tensor": True},
    "ep2_tp2_sequence": {"ep": 2, "tp": 2, "tensor": True, "sequence": True},
    "ep2_tp2_experts": {
        "ep": 2,
        "tp": 2,
        "tensor": True,
        "layers": {"*attn": {"tensor": False}},
    },
    "dp2_ep2": {"dp": 2, "ep": 2},
    "ep4_microbatches2": {"ep": 4, "microbatches": 2},
    "dp2_ep2_microbatches2": {"dp": 2, "ep": 2, "microbatches": 2},
    **{
        f"{name}_zero{stage}": {**pins, "zero": stage}
        for stage in (1, 2, 3)
        for name, pins in {
            "ep4": {"ep": 4},
            "dp2_ep2": {"dp": 2, "ep": 2},
            "dp2_ep2_microbatches2": {"dp": 2, "ep": 2, "microbatches": 2},
        }.items()
    },
    "ep4_recompute_full": {"ep": 4, "recompute": "full"},
    **{
        f"pp2_ep2_{schedule}": {"pp": 2, "ep": 2, "microbatches": 4, "schedule": schedule}
        for schedule in ("gpipe", "1f1b", "zero_bubble")
    },
    "pp2_ep2_zero2": {"pp": 2, "ep": 2, "microbatches": 4, "schedule": "1f1b", "zero": 2},
    "pp2_ep2_full": {
        "pp": 2,
        "ep": 2,
        "microbatches": 4,
        "schedule": "1f1b",
        "recompute": "full",
    },
    "ep4_recompute_selective": {"ep": 4, "recompute": "selective"},
}
STRATEGIES = ("data", "sequence", "tensor", "zero", "expert", "recompute", "pipeline")
COUNTS_ITEM = 4
"""Where experts' rows end is int32."""

_grouped_mm_can = "transformers.integrations.moe._can_use_grouped_mm"


@dataclass(frozen=True)
class Sent:
    """A comparison; the all-to-all bytes of one step that follow from how many rows went out and
    came in; experts (over all layers and ranks' calls) that got no row here, and the rows."""

    comparison: Comparison
    bytes: int
    empty_experts: int
    rows: int


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """Grouped matmuls in float64: the plain model's by a loop, as are the emitted module's."""
    with all_raised(), mock.patch(_grouped_mm_can, lambda *_: False):
        yield


def lopsided(job: Job) -> Job:
    """Only the first two experts are ever chosen: one channel of all embeddings is large, and the
    routers look at it."""
    model: Any = job.model
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] += 8.0
        for name, param in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                param[:, 0] = torch.linspace(-2.0, -1.0, len(param)).flip(0)
                param[:2, 0] = torch.tensor([2.0, 1.5])
    return job


def compiled(job: Job, case: str, cluster: str | dict[str, Any]) -> autopar.Compiled:
    """A job planned for CPU processes under one of CASES."""
    off = {name: on for name, on in OFF.items() if not name.startswith("wide")}
    return planned_as(job, cluster, STRATEGIES, {"recompute": False, **off, **CASES[case]})


def compare(family: str, case: str, cluster: str, skewed: bool) -> Sent:
    """One family in float64, on every rank."""
    with wide():
        job = grouped(family)
        job.model.double()
        return _compare(lopsided(job) if skewed else job, case, cluster)


def compare_single(family: str, case: str, cluster: str) -> Sent:
    """One family in float32, with torch's own grouped matmuls."""
    return _compare(grouped(family), case, cluster)


def _compare(job: Job, case: str, cluster: str) -> Sent:
    program = compiled(job, case, cluster)
    return sent_of(job, program, bool(CASES[case].get("recompute")))


def sent_of(job: Job, program: autopar.Compiled, recomputed: bool) -> Sent:
    """Runs a compiled program and the plain model; `recomputed`: experts run twice a step."""
    routes: list[Route] = []

    def recorded(ends: torch.Tensor, axis: Any) -> Route:
        routes.append(runtime.route(ends, axis))
        return routes[-1]

    with mock.patch("autopar.runtime.route", recorded):
        comparison = run(job, program)
    # An evaluation, and three steps with as many forwards of as many layers, or with twice as many.
    runs = 2 if recomputed else 1
    forwards = len(routes) // (1 + 3 * runs)
    step = routes[forwards : (1 + runs) * forwards]  # each forward's, and those that run again
    config: Any = job.model.config
    item = next(job.model.parameters()).element_size() * config.hidden_size
    experts = config.num_local_experts if hasattr(config, "num_local_experts") else 0
    experts = experts or getattr(config, "n_routed_experts", None) or config.num_experts
    moved = (2 * runs + 2) * item * sum(max(sum(r.sent), sum(r.received)) for r in step) // runs
    sizes = [r.ends.diff(prepend=r.ends.new_zeros(1)) for r in step]
    return Sent(
        comparison,
        moved + len(step) * experts * COUNTS_ITEM,
        sum(int((found == 0).sum()) for found in sizes) // runs,
        sum(sum(r.received) for r in step) // runs,
    )


def split_bytes(found: Comparison) -> tuple[dict[Any, int], dict[Any, int], int, int]:
    """Counted and planned bytes but those of all-to-alls; those."""
    counted, planned = Counter(found.counted), Counter(found.planned)
    # Over groups of experts and the experts of a group, ep is two axes.
    of_tokens = {key for key in (*counted, *planned) if key[0] == "all_to_all"}
    (key,) = {key for key in of_tokens if all(axis.startswith("ep") for axis in key[1])}
    tokens = counted.pop(key), planned.pop(key)
    return dict(counted), dict(planned), *tokens


# ---------------------------------------------------------------- the runtime alone


def round_trip(dtype: torch.dtype, numbers: list[list[int]]) -> tuple[float, float, float]:
    """Rows with experts by a plain loop and by `dispatch`, a grouped product and `combine`: errors
    of the outputs, of the rows' and of the weights' gradients. `numbers[rank][expert]`: rows."""
    mesh = autopar.runtime.ProcessMesh((("ep", len(numbers)),))
    axis, rank = mesh["ep"], mesh.rank
    experts = len(numbers[0])
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(experts, 8, 16, generator=generator, dtype=dtype)
    every = [torch.randn(sum(n), 8, generator=generator, dtype=dtype) for n in numbers]
    toward = [torch.randn(sum(n), 16, generator=generator, dtype=dtype) for n in numbers]
    for x in (weights, *every):
        x.requires_grad_()
    plain = []
    for mine, counts in zip(every, numbers, strict=True):
        pieces = mine.split(counts)
        plain.append(torch.cat([p @ w for p, w in zip(pieces, weights, strict=True)]))
    torch.stack([(a * b).sum() for a, b in zip(plain, toward, strict=True)]).sum().backward()

    rows = every[rank].detach().requires_grad_()
    local = weights.detach().chunk(len(numbers))[rank].requires_grad_()
    way = runtime.route(torch.tensor(numbers[rank]).cumsum(0).to(torch.int32), axis)
    there = runtime.dispatch(rows, way)
    made = runtime.combine(runtime.grouped_mm(there, local, way.ends), way)
    (made * toward[rank]).sum().backward()
    assert weights.grad is not None
    wanted = weights.grad.chunk(len(numbers))[rank]
    mesh.close()

    def error(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
        assert found is not None and wanted is not None
        assert found.shape == wanted.shape
        return float((found - wanted).abs().max()) if found.numel() else 0.0

    return (
        error(made, plain[rank]),
        error(rows.grad, every[rank].grad),
        error(local.grad, wanted),
    )

"""What others' software did otherwise than this project's programs, as changes to a program's
effects: facts of a generation of software (benchmarks/data/software.json), none of a run."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from published_runs import Run

from autopar.cost_models.compute import ComputeCost
from autopar.mesh import AxisPart
from autopar.plugin import ClusterSpec, Collective, Compute, Effect, Mesh, Resident

Found = tuple[str, Effect, int]
"""An effect with its layer ("" for the skeleton), and how many calls it is."""


def as_software(found: Iterable[Found], run: Run, code: Mapping[str, Any]) -> list[Found]:
    """A stage's effects as the run's software had them."""
    now = [(path, _loss(path, effect, run, code), calls) for path, effect, calls in found]
    if run.weight_products and code["casts_apart"]:
        if not run.scaled_rows:
            now = [(path, _narrow(path, effect), calls) for path, effect, calls in now]
        now += casts(now, run)
    if code["exchanges_shares"] and run.pins["sequence"]:
        now = [(path, e, calls) for path, effect, calls in now for e in _shares(effect, run)]
    if code["shards_flat"] and run.shape.moe is not None:
        now = [(path, _unpadded(path, effect, run), calls) for path, effect, calls in now]
    if code["repeats_heads"]:
        now = [(path, _all_heads(effect, run), calls) for path, effect, calls in now]
    return list(keeping_ops(now)) if run.keeps_ops else now


def _loss(path: str, effect: Effect, run: Run, code: Mapping[str, Any]) -> Effect:
    """At its peak a loss holds so many copies of the logits, in its own precision, beside what it
    keeps ("loss_copies", of whole classes and of classes split over tp)."""
    if path or not isinstance(effect, Resident) or effect.what != "transient":
        return effect
    if effect.when != "end" or not effect.bytes:
        return effect
    shape, pins = run.shape, run.pins
    rows = run.batch // pins["microbatches"] // pins["dp"] // pins["ep"] * shape.sequence
    item = shape.dtype.itemsize if shape.compiled_loss else 4
    logits = rows // pins["cp"] * shape.vocab // pins["tp"] * item
    return replace(effect, bytes=int(logits * code["loss_copies"][pins["tp"] > 1]))


def _narrow(path: str, effect: Effect) -> Effect:
    """Inputs of layers' products, and gradients of their results, are gathered over tp in the eight
    bits that they are multiplied in (torchao's float8 tensor parallelism, one scale a tensor)."""
    if not path or not isinstance(effect, Collective) or effect.op != "all_gather":
        return effect
    if {part.axis for part in effect.axes} != {"tp"}:
        return effect
    return replace(effect, bytes=effect.bytes // 2)


def _all_heads(effect: Effect, run: Run) -> Effect:
    """Keys and values that several heads of queries share are copied for each before attention, so
    that a ring sends all of them (torchtitan's `repeat_kv`)."""
    if not isinstance(effect, Collective) or effect.op != "send":
        return effect
    if {part.axis for part in effect.axes} != {"cp"}:
        return effect
    return replace(effect, bytes=effect.bytes * run.shape.heads // run.shape.kv_heads)


def _unpadded(path: str, effect: Effect, run: Run) -> Effect:
    """ZeRO cuts flat buffers, not the first dim of experts' weights, which is padded where a rank
    has fewer experts than there are data ranks. Over dp alone only experts are sharded."""
    if not path or not isinstance(effect, Collective) or not effect.hides:
        return effect
    pieces = run.pins["dp"]
    if run.pins["ep"] == 1 or {part.axis for part in effect.axes} != {"dp"}:
        return effect
    assert run.shape.moe is not None
    rows = run.shape.moe.experts // run.pins["ep"]
    return replace(effect, bytes=effect.bytes * rows // (-(-rows // pieces) * pieces))


def _shares(effect: Effect, run: Run) -> Iterator[Effect]:
    """Each tp rank sends experts its own share of the tokens. Experts that are split over tp too
    then gather them there (or, back, scatter sums); those that aren't lie on neighbouring ranks,
    tp's among them (Megatron-Core's token dispatchers; Liu et al. 2025, MoE Parallel Folding)."""
    if not isinstance(effect, Collective) or effect.op != "all_to_all":
        yield effect
        return
    tp, ep = run.pins["tp"], run.pins["ep"]
    if {part.axis for part in effect.axes} != {"ep"} or tp == 1:
        yield effect
        return
    own = replace(effect, bytes=-(-effect.bytes // tp))
    if not run.folds_experts:
        yield own
        yield replace(effect, op="all_gather", axes=(AxisPart("tp", tp),))
    elif ep <= tp:
        yield replace(own, axes=(AxisPart("tp", ep),))
    else:
        yield replace(own, axes=(AxisPart("ep", ep // tp), AxisPart("tp", tp)))


# ---------------------------------------------------------------- casts to eight bits

SHARED = (0, 0, 0, 1, 2, 2, 3)
"""Which of a gated layer's seven products (queries, keys, values, out; gate, up, down) have the
same input, which is cast once."""

GATHERED_INPUTS, SCATTERED_RESULTS = (0, 2), (3, 6)
"""Which inputs are gathered over tp, and which products' results are scattered, so that their
gradients are gathered."""


def casts(found: Iterable[Found], run: Run) -> list[Found]:
    """The kernels that cast operands of layers' products to eight bits (torchao's float8 training).

    One scale a tensor: the largest value is looked for (an operand is read), then the operand is
    read and written in eight bits: 5 bytes an element. Inputs are cast in the forward and, being
    kept in 16 bits, again for the gradients of weights; gradients of results are cast once, and
    copied the other way round for those of weights (2 bytes). What is gathered over tp is cast
    before, by each rank its share. One scale a row: largest values and the cast are one kernel (3
    bytes), after the gather; gradients, and inputs once more, are cast along either dim.
    """
    counts: dict[tuple[str, str, bool], int] = defaultdict(int)
    made: list[Found] = []
    pieces = run.pins["tp"] if run.pins["sequence"] and not run.scaled_rows else 1
    once = 3 if run.scaled_rows else 5
    for path, effect, calls in found:
        if not path or not isinstance(effect, Compute) or effect.op != "matmul":
            continue
        if effect.shape[:1] != (1,):
            continue
        key = path, effect.phase, effect.again
        place, (_, rows, columns, inner) = counts[key] % len(SHARED), effect.shape
        counts[key] += 1
        shared = place > 0 and SHARED[place] == SHARED[place - 1]
        gathered = pieces if SHARED[place] in GATHERED_INPUTS else 1
        moved = 0 if shared else once * rows * inner // gathered
        if effect.phase == "backward" and not effect.again:
            if gathered > 1:  # there in eight bits already, to be copied the other way round
                moved = 0 if shared else 2 * rows * inner
            other = 3 if run.scaled_rows else 2
            share = pieces if place in SCATTERED_RESULTS else 1
            moved += once * rows * columns // share + other * rows * columns
        if moved:
            kind = replace(effect, op="pointwise", flops=0, bytes=moved, shape=())
            made.append((path, kind, calls))
    return made


# ---------------------------------------------------------------- selective recompute by op


def keeping_ops(found: Iterable[Found]) -> Iterator[Found]:
    """Layers that run again whole, but keep the results of attention and of every second product
    (the first, the third, …): torchtitan's selective activation checkpointing by op, whose list of
    ops to save is in its activation_checkpoint.py (`_op_sac_save_list`, "every second mm")."""
    products: dict[str, int] = defaultdict(int)
    kept: dict[str, int] = defaultdict(int)
    left = []
    for path, effect, calls in found:
        if isinstance(effect, Compute) and effect.again and path:
            if effect.op == "matmul" and effect.shape[:1] == (1,):
                products[path] += 1
            if effect.op == "attention" or (effect.op == "matmul" and products[path] % 2):
                kept[path] += _result_bytes(effect)
                continue
        left.append((path, effect, calls))
    for path, effect, calls in left:
        if isinstance(effect, Resident) and effect.when == "again" and path:
            # What is kept isn't made again.
            taken = min(effect.bytes, kept.get(path, 0))
            if taken:
                yield path, Resident("saved", taken), 1
                kept[path] -= taken
            yield path, replace(effect, bytes=effect.bytes - taken), calls
        else:
            yield path, effect, calls
    for path, size in kept.items():
        yield path, Resident("saved", size), 1


def _result_bytes(effect: Compute) -> int:
    """Of a product, or of attention with its rows' logarithms of sums, in 16 bits and in 32."""
    if effect.op == "attention":
        heads, queries, _, _, width = effect.shape
        return heads * queries * (2 * width + 4)
    count, rows, columns, _ = effect.shape
    return 2 * count * rows * columns


# ---------------------------------------------------------------- products in eight bits


@dataclass(frozen=True)
class SixteenBitHead(ComputeCost):
    """The product that makes logits, of so many `columns` on a rank, stays in 16 bits where others
    with weights run in eight: torchtitan's configurations filter it out, Megatron's output layer
    has no other way."""

    columns: int = 0

    def cost(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> float:
        """Seconds."""
        return super().cost(effect, mesh, self._cluster(effect, cluster))

    def apart(self, effect: Effect, mesh: Mesh, cluster: ClusterSpec) -> tuple[float, float]:
        """The device's seconds and the host's."""
        return super().apart(effect, mesh, self._cluster(effect, cluster))

    def _cluster(self, effect: Effect, cluster: ClusterSpec) -> ClusterSpec:
        kernels = cluster.device.kernels
        head = isinstance(effect, Compute) and effect.op == "matmul"
        if kernels is None or not head or effect.shape[2:3] != (self.columns,):  # type: ignore[union-attr]
            return cluster
        return replace(
            cluster,
            device=replace(cluster.device, kernels=replace(kernels, weight_products="")),
        )

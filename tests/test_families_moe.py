"""Mixtures of experts, unmodified: Mixtral, Qwen3-MoE and DeepSeek-V3 (latent attention, groups,
shared experts), with batched and with grouped matmuls."""

from typing import Any

import pytest
from equality import Comparison
from families import FAMILIES
from moe import MOE, compare_family, compare_grouped, compare_router_loss, grouped, with_router_loss
from pool import Pool

import autopar
from autopar.capture import capture
from autopar.graph.analyse import analyse
from autopar.graph.model_graph import ModelGraph

TOLERANCE = 1e-9
SINGLE = 2e-4
"""For float32: three steps of AdamW divide small gradients by their own size."""
CASES = [
    "dp4",
    "dp2_tp2",
    "dp2_tp2_sequence",
    "zero3",
    "zero3_tp2_sequence",
    "dp4_microbatches2",
]
QUICK = {
    ("mixtral", "dp2_tp2_sequence"),
    ("qwen3_moe", "zero3"),
    ("deepseek_v3", "dp2_tp2_sequence"),
}
PAIRS = ["dp2", "tp2", "tp2_sequence"]


def marked(pairs: list[tuple[str, str]], quick: set[tuple[str, str]]) -> list[Any]:
    """The cases, slow but for a few."""
    return [p if p in quick else pytest.param(*p, marks=pytest.mark.slow) for p in pairs]


def check(comparisons: list[Any], tolerance: float) -> None:
    """Equal, and the bytes as planned."""
    for comparison in comparisons:
        assert isinstance(comparison, Comparison)
        assert comparison.worst <= tolerance, comparison.errors
        assert comparison.counted == comparison.planned


@pytest.mark.parametrize(("family", "case"), marked([(f, c) for f in MOE for c in CASES], QUICK))
def test_batched(pool4: Pool, family: str, case: str) -> None:
    """Loss, every gradient, the norm, weights after three clipped steps; bytes as planned."""
    check(pool4.run(compare_family, family, case, "cpu:4"), TOLERANCE)


@pytest.mark.parametrize(
    ("family", "case"),
    marked([(f, c) for f in MOE for c in CASES], {("deepseek_v3", "dp2_tp2_sequence")}),
)
def test_grouped(pool4: Pool, family: str, case: str) -> None:
    """The same with tokens sorted by expert, in float32."""
    check(pool4.run(compare_grouped, family, case, "cpu:4"), SINGLE)


@pytest.mark.slow
@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize("case", PAIRS)
def test_two(pool2: Pool, family: str, case: str) -> None:
    """On two processes."""
    check(pool2.run(compare_family, family, case, "cpu:2"), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tp2", "tp2_sequence"])
def test_router_loss(pool2: Pool, case: str) -> None:
    """Where the batch is whole, the router's loss is right."""
    check(pool2.run(compare_router_loss, case, "cpu:2"), TOLERANCE)


@pytest.mark.parametrize("pins", [{"dp": 2}, {"dp": 1, "tp": 2, "microbatches": 2}])
def test_router_loss_mixes_the_batch(pins: dict[str, Any]) -> None:
    """It isn't a sum over samples: neither ranks nor microbatches may split them."""
    job = with_router_loss()
    with pytest.raises(autopar.AutoparError, match="mixes the samples"):
        autopar.compile(job.model, "cpu:2", job.batch, pin=pins)


def test_capture_leaves_the_model_as_it_was() -> None:
    """The first forward of a Hugging Face model hooks its layers, which are stubs then."""
    job = with_router_loss()
    capture(job.model, job.batch, job.loss)
    assert len(job.model(**job.batch).router_logits) == 2


# ---------------------------------------------------------------- at full size, on meta


@pytest.mark.parametrize(("family", "size"), [(f, size) for f in MOE for size in FAMILIES[f].full])
def test_full_size(family: str, size: str) -> None:
    """No opaque op; experts and ffn named; all but 1 % of the parameters can be split in two."""
    job = FAMILIES[family].full[size]()
    model = analyse(capture(job.model, job.batch, job.loss))
    assert [b.opaque for b in model.blocks if b.opaque] == []
    assert model.mixing == ()
    assert split_share(model) >= 0.99
    for block in model.blocks:
        regions = [r for r in block.regions if r.name == "experts"]
        for region in regions:
            roles = {dim.role for dim in region.dims}
            assert {"experts", "ffn", "batch", "sequence"} <= roles
            ffn = next(dim for dim in region.dims if dim.role == "ffn")
            assert ffn.internal
            assert not ffn.blocked
    assert any(r.name == "experts" for b in model.blocks for r in b.regions)


def split_share(model: ModelGraph) -> float:
    """The share of parameters in regions with an internal dim that two ranks can split."""
    split = total = 0
    for _, block in model.instances():
        for region in block.regions:
            count = sum(_numel(p.shape) for p in region.params)
            total += count
            free = [d for d in region.dims if d.internal and not d.blocked and d.size % 2 == 0]
            split += count if free else 0
    return split / total


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


@pytest.mark.parametrize("family", MOE)
def test_the_plan_says_what_it_assumes(family: str) -> None:
    """Expert loads aren't in the graph."""
    job = grouped(family)
    compiled = autopar.compile(job.model, "cpu:2", job.batch, loss=job.loss, pin={"dp": 2})
    assert any("evenly" in note for note in compiled.plan.assumptions)

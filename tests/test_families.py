"""Every family under mixed plans against the plain model, on four processes; and what analysis must
find in each."""

import math

import pytest
from equality import Comparison, compiled, run
from families import FAMILIES
from models import float32_raised
from more_models import MORE
from pool import Pool

import autopar
from autopar.capture import capture
from autopar.graph.analyse import analyse

TOLERANCE = 1e-9
DENSE = ("resnet", "unet", "vit", "clip", "bert", "transformer", "encoder", "mlp")
CASES = {
    "dp4": DENSE,
    "dp2_tp2": DENSE,
    "dp2_tp2_sequence": ("clip", "bert", "transformer", "encoder"),
    "zero3_tp2": DENSE,
}
PAIRS = [(family, case) for case, families in CASES.items() for family in families]
QUICK = [(family, "dp2_tp2") for family in ("resnet", "unet", "vit", "bert")]
QUICK += [("clip", "dp2_tp2_sequence"), ("resnet", "zero3_tp2")]
QUICK += [("padded_bert", "dp2_tp2_sequence"), ("siglip", "dp2_tp2")]
SLOW = [pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS if pair not in QUICK]


def compare_family(family: str, case: str) -> Comparison:
    """A task for the pool: one family under one case, on every rank."""
    with float32_raised():
        job = MORE[family]() if family in MORE else FAMILIES[family].tiny()
        return run(job, compiled(job, case))


@pytest.mark.parametrize(("family", "case"), [*QUICK, *SLOW])
def test_equality(pool4: Pool, family: str, case: str) -> None:
    """Loss, every gradient, the norm, weights and buffers after three steps; bytes as planned."""
    for comparison in pool4.run(compare_family, family, case):
        assert isinstance(comparison, Comparison)
        assert comparison.worst <= TOLERANCE, comparison
        assert comparison.counted == comparison.planned


@pytest.mark.parametrize("family", DENSE)
def test_nothing_is_opaque(family: str) -> None:
    """Every op of these families has a rule, and the batch can be split."""
    job = FAMILIES[family].tiny()
    model = analyse(capture(job.model, job.batch, job.loss))
    assert [text for block in model.blocks for text in block.opaque.values()] == []
    assert model.mixing == ()


@pytest.mark.parametrize(
    ("family", "share"),
    [("bert", 0.99), ("vit", 0.99), ("clip", 0.99), ("encoder", 0.99), ("resnet", 0.7)],
)
def test_share_of_parameters_that_tensor_splits(family: str, share: float) -> None:
    """At full size, of parameters in regions with a dim of their own that can be split over 2. (A
    ResNet's shortcuts have none.)"""
    job = next(iter(FAMILIES[family].full.values()))()
    model = analyse(capture(job.model, job.batch, job.loss))
    inside = every = 0
    for _, block in model.instances():
        for region in block.regions:
            count = sum(math.prod(param.shape) for param in region.params)
            own = [d for d in region.dims if d.internal and not d.blocked and d.size % 2 == 0]
            every += count
            inside += count if own else 0
    assert inside >= share * every, inside / every
    blocks = [block.name for block in model.blocks[1:]]
    assert family != "resnet" or (len(model.layers), len(blocks)) == (16, 8)


def test_contrastive_loss_is_replicated_and_counted_once() -> None:
    """Only the ops that see all pairs run on all samples; the loss isn't summed over dp."""
    program = compiled(FAMILIES["clip"].tiny(), "dp4")
    assert "# ---- mixing: nothing is split" in program.source
    assert "LOSS_SUMS = ()" in program.source
    assert any("only one microbatch: mixing of CLIPModel" in a for a in program.plan.assumptions)


def test_batch_norm_takes_one_microbatch() -> None:
    """Its statistics are the whole batch's; the plan says why there is one microbatch."""
    program = compiled(FAMILIES["resnet"].tiny(), "dp4")
    assert any("statistics over the whole batch" in a for a in program.plan.assumptions)
    with pytest.raises(autopar.AutoparError, match="statistics over the whole batch"):
        compiled(FAMILIES["resnet"].tiny(), "dp4_microbatches2")

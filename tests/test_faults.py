"""Faults put in on purpose turn the equality check red. Most of them leave the loss as it is: a
test that compares losses alone would pass."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality import Comparison, Edit, compiled, edited, run
from models import MODELS, float32_raised
from pool import Pool
from torch.distributed.fsdp import FSDPModule

from autopar.runtime import Container, shard_fully

GREEN, RED = 1e-9, 1e-6


@dataclass(frozen=True)
class Fault:
    """A case of test_equality with a fault in its emitted source.

    `red` and `green` are regular expressions of parts ("loss", "norm", "weights" after the steps,
    or a parameter's name: its gradient): some rank finds each part of `red` wrong by more than RED,
    every rank finds each of `green` right to GREEN.
    """

    model: str
    case: str
    edits: tuple[Edit, ...]
    red: str
    green: str


def instead_of_shard_fully(function: str) -> tuple[Edit, ...]:
    """Edits that call a function of this module."""
    return (
        Edit(r"\nimport torch\n", f"\nimport torch\nfrom test_faults import {function}\n"),
        Edit(r"\bshard_fully\(", f"{function}(", 2),
    )


def shard_and_average(module: Container, axes: Sequence[str], names: Sequence[str]) -> None:
    """`shard_fully` with FSDP2's default: the mean over ranks."""
    shard_fully(module, axes, names)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(float(module.mesh[tuple(axes)].size))


def shard_without_sum(module: Container, axes: Sequence[str], names: Sequence[str]) -> None:
    """`shard_fully` whose ranks take their shard of their own gradient."""
    shard_fully(module, axes, names)
    assert isinstance(module, FSDPModule)
    scatter: Any = _Scatter()
    module.set_custom_reduce_scatter(scatter)


class _Scatter:
    """FSDP2's reduce-scatter without the reduction."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def drop_gradient(model: Container) -> None:
    """Called in every forward: what earlier microbatches left is gone."""
    for parameter in model.parameters():
        parameter.grad = None


LOCAL_MEAN = r"loss_sum / ((contiguous != -100).sum() * dp * MICROBATCHES)"
FAULTS = {
    # Megatron's f. What lies behind the last one in the forward is right.
    "tensor: no all-reduce in the backward": Fault(
        "gpt2",
        "dp2_tp2",
        (Edit(r'\benter\((ln_[12]), axis=self\.mesh\["tp"\]\)', r"\1", 2),),
        r"norm|weights|transformer\.(w.e|h\.0|h\.1\.(ln|attn)).*",
        r"loss|transformer\.(h\.1\.mlp|ln_f).*",
    ),
    "tensor: slices in the backward, where sequence needs a reduce-scatter": Fault(
        "gpt2",
        "tp4_sequence",
        (
            Edit(r"\nimport torch\n", "\nimport torch\nfrom autopar.runtime import unshard\n"),
            Edit(r"\ball_gather\((ln_[12]),", r"unshard(\1,", 2),
        ),
        r"norm|weights|transformer\.(w.e|h\.0|h\.1\.(ln|attn)).*",
        r"loss|transformer\.(h\.1\.mlp|ln_f).*",
    ),
    "sequence: norms' gradients aren't summed": Fault(
        "gpt2",
        "tp4_sequence",
        (Edit(r'("(?:ln_1|ln_2|transformer\.ln_f)\.\w+", hidden), sums=\("tp",\)', r"\1", 6),),
        r"norm|weights|.*\bln_\w+\.(weight|bias)",
        r"loss|transformer\.(w.e|h\.\d\.(attn|mlp)).*",
    ),
    # Clipping and AdamW take out a factor common to all gradients: the weights are right to 1e-6.
    "zero: mean instead of sum": Fault(
        "gpt2",
        "zero3",
        instead_of_shard_fully("shard_and_average"),
        r"norm|transformer\..*",
        r"loss",
    ),
    "zero: no reduction": Fault(
        "gpt2",
        "zero3",
        instead_of_shard_fully("shard_without_sum"),
        r"norm|weights|transformer\..*",
        r"loss",
    ),
    "hybrid: shards aren't summed over the groups": Fault(
        "llama",
        "hybrid2",
        (Edit(r'sums=\("dp_0", "dp_1"\)', 'sums=("dp_1",)', 12),),
        r"norm|weights|model\..*|lm_head.*",
        r"loss",
    ),
    "zero 1: gradients of the last microbatch alone": Fault(
        "gpt2",
        "zero1_microbatches2",
        (
            Edit(r"\nimport torch\n", "\nimport torch\nfrom test_faults import drop_gradient\n"),
            Edit(
                r"(\n        # ---- vocab: dp splits batch\n        wte)",
                r"\n        drop_gradient(self)\1",
            ),
        ),
        r"norm|weights|transformer\..*",
        r"loss",
    ),
    "tied embedding: the second use has no gradient": Fault(
        "gpt2",
        "dp4",
        (Edit(r"(F\.linear\(ln_f, self\.transformer\.wte\.weight)\)", r"\1.detach())"),),
        r"norm|weights|transformer\.wte\.weight",
        r"loss|transformer\.(wpe|h|ln_f).*",
    ),
    "loss: divided by the local count": Fault(
        "gpt2",
        "dp4",
        (Edit(r"loss_sum / counts\[0\]", LOCAL_MEAN),),
        r"loss|norm|weights|transformer\..*",
        r"",
    ),
    "loss: divided by each microbatch's count": Fault(
        "gpt2",
        "dp4_microbatches2",
        (Edit(r"loss_sum / counts\[0\]", LOCAL_MEAN),),
        r"loss|norm|weights|transformer\..*",
        r"",
    ),
    "loss: divided by the local count in the backward alone": Fault(
        "gpt2",
        "dp4",
        (Edit(r"loss_sum / counts\[0\]", rf"({LOCAL_MEAN}) + (\g<0> - {LOCAL_MEAN}).detach()"),),
        r"norm|weights|transformer\..*",
        r"loss",
    ),
    "loss: 0 / 0 on a rank whose labels are all ignored": Fault(
        "mlp",
        "dp4",
        (Edit(r"loss_sum / counts\[0\]", "loss_sum / ((y != -100).sum() * dp)"),),
        r"loss|norm|weights|net\..*",
        r"",
    ),
    "batch over two axes: in as (tp, dp), out as (dp, tp)": Fault(
        "mlp",
        "wide_batch",
        (
            Edit(
                r'local_part\(x, dim=0, axis=self\.mesh\["tp"\]\)',
                'local_part(local_part(unshard(x, 0, self.mesh["dp"]), 0, self.mesh["tp"]), 0, '
                'self.mesh["dp"])',
            ),
        ),
        r"loss|norm|weights|net\..*",
        r"",
    ),
    "weight over two axes: the bias as (tp, dp)": Fault(
        "mlp",
        "wide_ffn",
        (Edit(r'("net\.0\.bias", split\(ffn), "dp", "tp"\)', r'\1, "tp", "dp")'),),
        r"loss|norm|weights|net\..*",
        r"",
    ),
    "weight over two axes: all as (tp, dp), after reduce-scatters over (dp, tp)": Fault(
        "mlp",
        "wide_ffn",
        (Edit(r'split\(ffn_2, "dp", "tp"\)', 'split(ffn_2, "tp", "dp")', 2),),
        r"loss|norm|weights|net\..*",
        r"",
    ),
}


def run_edited(model: str, case: str, edits: tuple[Edit, ...], even: bool = False) -> Comparison:
    """A task for the pool: a case with its source edited; `even`: no label is ignored."""
    with float32_raised():
        job = MODELS[model]()
        if even:
            job = replace(job, batch={**job.batch, "labels": job.batch["input_ids"].clone()})
        return run(job, edited(compiled(job, case), edits))


def worst_of(comparisons: list[Any]) -> dict[str, float]:
    """Each part's largest error over the ranks."""
    assert all(isinstance(one, Comparison) for one in comparisons)
    return {part: max(one.errors[part] for one in comparisons) for part in comparisons[0].errors}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_fault_is_seen(pool4: Pool, fault: Fault) -> None:
    errors = worst_of(pool4.run(run_edited, fault.model, fault.case, fault.edits))
    assert max(errors.values()) > RED
    for part, error in errors.items():
        if re.fullmatch(fault.red, part):
            assert error > RED, (part, errors)
        elif re.fullmatch(fault.green, part):
            assert error <= GREEN, (part, errors)


def test_even_labels_would_hide_a_local_count(pool4: Pool) -> None:
    """Why the batches of these tests ignore labels unevenly."""
    fault = FAULTS["loss: divided by the local count"]
    errors = worst_of(pool4.run(run_edited, fault.model, fault.case, fault.edits, True))
    assert max(errors.values()) <= GREEN, errors


def test_order_of_axes_is_free_inside_a_region(pool4: Pool) -> None:
    """All that carries an internal dim in one other order is the same sum in another order."""
    swap = Edit(r'split\(ffn, "dp", "tp"\)', 'split(ffn, "tp", "dp")', 3)
    errors = worst_of(pool4.run(run_edited, "mlp", "wide_ffn", (swap,)))
    assert max(errors.values()) <= GREEN, errors


def test_edit_that_no_longer_matches_fails() -> None:
    """Else a change of the emitter's style would make these tests pass without a fault."""
    program = compiled(MODELS["mlp"](), "dp4")
    with pytest.raises(AssertionError, match="matched 0 times"):
        edited(program, (Edit("no such text", ""),))

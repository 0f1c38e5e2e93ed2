"""Faults of data, tensor, sequence and ZeRO, of losses and of ties. Most of them leave the loss as
it is: a test that compares losses alone would pass."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from equality import Edit
from fault import Fault
from torch.distributed.fsdp import FSDPModule

from autopar.runtime import Container, shard_fully


def instead_of_shard_fully(function: str) -> tuple[Edit, ...]:
    """Edits that call a function of this module."""
    return (
        Edit(r"\nimport torch\n", f"\nimport torch\nfrom faults_of_splits import {function}\n"),
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


IMPORT = "\nimport torch\n"
LOCAL_MEAN = r"loss_sum / ((contiguous != -100).sum() * dp * MICROBATCHES)"
SPLITS = {
    # Megatron's f. What lies behind the last one in the forward is right.
    "tensor: no all-reduce in the backward": Fault(
        "collective",
        "gpt2",
        "dp2_tp2",
        (Edit(r'\benter\((ln_[12]), axis=self\.mesh\["tp"\]\)', r"\1", 2),),
        r"norm|weights|transformer\.(w.e|h\.0|h\.1\.(ln|attn)).*",
        r"loss|transformer\.(h\.1\.mlp|ln_f).*",
    ),
    "tensor: slices in the backward, where sequence needs a reduce-scatter": Fault(
        "collective",
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
        "collective",
        "gpt2",
        "tp4_sequence",
        (Edit(r'("(?:ln_1|ln_2|transformer\.ln_f)\.\w+", hidden), sums=\("tp",\)', r"\1", 6),),
        r"norm|weights|.*\bln_\w+\.(weight|bias)",
        r"loss|transformer\.(w.e|h\.\d\.(attn|mlp)).*",
    ),
    # Clipping and AdamW take out a factor common to all gradients: the weights are right to 1e-6.
    "zero: mean instead of sum": Fault(
        "scaling",
        "gpt2",
        "zero3",
        instead_of_shard_fully("shard_and_average"),
        r"norm|transformer\..*",
        r"loss",
    ),
    "zero: no reduction": Fault(
        "collective",
        "gpt2",
        "zero3",
        instead_of_shard_fully("shard_without_sum"),
        r"norm|weights|transformer\..*",
        r"loss",
    ),
    "hybrid: shards aren't summed over the groups": Fault(
        "collective",
        "llama",
        "hybrid2",
        (Edit(r'sums=\("dp_0", "dp_1"\)', 'sums=("dp_1",)', 12),),
        r"norm|weights|model\..*|lm_head.*",
        r"loss",
    ),
    "zero 1: gradients of the last microbatch alone": Fault(
        "scaling",
        "gpt2",
        "zero1_microbatches2",
        (
            Edit(
                r"\nimport torch\n", "\nimport torch\nfrom faults_of_splits import drop_gradient\n"
            ),
            Edit(
                r"(\n        # ---- vocab: dp splits batch\n        wte)",
                r"\n        drop_gradient(self)\1",
            ),
        ),
        r"norm|weights|transformer\..*",
        r"loss",
    ),
    "tied embedding: the second use has no gradient": Fault(
        "tie",
        "gpt2",
        "dp4",
        (Edit(r"(F\.linear\(ln_f, self\.transformer\.wte\.weight)\)", r"\1.detach())"),),
        r"norm|weights|transformer\.wte\.weight",
        r"loss|transformer\.(wpe|h|ln_f).*",
    ),
    "loss: divided by the local count": Fault(
        "scaling",
        "gpt2",
        "dp4",
        (Edit(r"loss_sum / counts\[0\]", LOCAL_MEAN),),
        r"loss|norm|weights|transformer\..*",
        r"",
    ),
    "loss: divided by each microbatch's count": Fault(
        "scaling",
        "gpt2",
        "dp4_microbatches2",
        (Edit(r"loss_sum / counts\[0\]", LOCAL_MEAN),),
        r"loss|norm|weights|transformer\..*",
        r"",
    ),
    "loss: divided by the local count in the backward alone": Fault(
        "scaling",
        "gpt2",
        "dp4",
        (Edit(r"loss_sum / counts\[0\]", rf"({LOCAL_MEAN}) + (\g<0> - {LOCAL_MEAN}).detach()"),),
        r"norm|weights|transformer\..*",
        r"loss",
    ),
    "loss: 0 / 0 on a rank whose labels are all ignored": Fault(
        "scaling",
        "mlp",
        "dp4",
        (Edit(r"loss_sum / counts\[0\]", "loss_sum / ((y != -100).sum() * dp)"),),
        r"loss|norm|weights|net\..*",
        r"",
    ),
    "batch over two axes: in as (tp, dp), out as (dp, tp)": Fault(
        "collective",
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
        "collective",
        "mlp",
        "wide_ffn",
        (Edit(r'("net\.0\.bias", split\(ffn), "dp", "tp"\)', r'\1, "tp", "dp")'),),
        r"loss|norm|weights|net\..*",
        r"",
    ),
    "weight over two axes: all as (tp, dp), after reduce-scatters over (dp, tp)": Fault(
        "collective",
        "mlp",
        "wide_ffn",
        (Edit(r'split\(ffn_2, "dp", "tp"\)', 'split(ffn_2, "tp", "dp")', 2),),
        r"loss|norm|weights|net\..*",
        r"",
    ),
}

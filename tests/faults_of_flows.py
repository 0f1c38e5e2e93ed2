"""Faults of rings and of experts: of what travels from rank to rank, of masks, positions and
routes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from equality import Edit
from fault import EVERYTHING, Fault, instead
from torch import Tensor

from autopar.runtime import collectives
from autopar.runtime import context as ring
from autopar.runtime import experts as tokens
from autopar.runtime.attention_blocks import Sums
from autopar.runtime.process_mesh import Group

# ---------------------------------------------------------------- rings


class _Backwards(ring._Moving):
    """A ring that turns the other way."""

    def __init__(self, axis: Group, tensors: Sequence[Tensor]) -> None:
        ranks = axis.ranks[::-1]
        super().__init__(
            replace(axis, ranks=ranks, rank=ranks.index(axis.ranks[axis.rank])), tensors
        )


class _Kept(ring._Moving):
    """Gradients of keys and values (zeros at first) stay where they were made."""

    def __init__(self, axis: Group, tensors: Sequence[Tensor]) -> None:
        super().__init__(axis, tensors)
        self.stays = not any(x.count_nonzero() for x in tensors)

    def start(self, last: bool = False) -> None:
        if not self.stays:
            super().start(last)


def _average(out: Tensor, logs: Tensor, step: ring._Step, block: Sums) -> None:
    """Blocks merged as if each had seen as many keys."""
    rows, so_far = out[..., step.queries, :], logs[..., step.queries]
    rows += (block.out - rows) / 2 if step.source else block.out - rows
    so_far.copy_(torch.logaddexp(so_far, block.logs))


def _swapped_halves(positions: int, masks: Any, axis: Group) -> list[ring._Step]:
    """Ranks take what those on the other side of them should."""
    half = positions // 2
    return [
        replace(step, queries=slice(0, half)) if step.queries.start else step
        for step in _steps(positions, masks, axis)
    ]


_steps = ring._steps


def _part_in_rank_order(mask: Tensor, dim: int, rank: int, which: slice, axis: Group) -> Tensor:
    if mask.shape[dim] == 1:
        return mask
    return mask.chunk(axis.size, dim)[rank].narrow(dim, which.start, which.stop - which.start)


def _in_rank_order(pieces: Sequence[Tensor], dim: int, balanced: bool = False) -> Tensor:
    return torch.cat(tuple(pieces), dim)


RING = ("llama", "cp4 ring")
"""Of four: two ranks are the same the wrong way round."""
RINGS = {
    "ring: it turns the other way": Fault(
        "collective", *RING, red=EVERYTHING, patch=instead(ring, "_Moving", _Backwards)
    ),
    "ring: gradients of keys aren't sent home": Fault(
        "collective", *RING, green=r"loss", patch=instead(ring, "_Moving", _Kept)
    ),
    "ring: a norm's gradient isn't summed": Fault(
        "collective",
        *RING,
        (Edit(r'(declare\(self, "input_layernorm.weight", hidden), sums=\("cp",\)', r"\1"),),
        red=r"norm|weights|.*input_layernorm\.weight",
        green=r"loss|.*proj\.weight",
    ),
    "ring: blocks are averaged": Fault(
        "scaling", *RING, red=EVERYTHING, patch=instead(ring, "_merge", _average)
    ),
    "ring: the wrong half of the queries": Fault(
        "mask", *RING, red=EVERYTHING, patch=instead(ring, "_steps", _swapped_halves)
    ),
    "ring: later positions are seen": Fault(
        "mask", *RING, (Edit("is_causal=True", "is_causal=False"),), red=EVERYTHING
    ),
    "ring: padding of other positions": Fault(
        "mask",
        "bert_padded",
        "cp4 ring",
        red=EVERYTHING,
        patch=instead(ring, "_part", _part_in_rank_order),
    ),
    "padding of another sample": Fault(
        "mask",
        "bert_padded",
        "dp4",
        (
            Edit(
                r"(def forward\(self, input_ids, labels, attention_mask, counts\):\n)",
                r"\1        attention_mask = attention_mask.flip(0)\n",
            ),
        ),
        red=EVERYTHING,
    ),
    "ring: positions without offset": Fault(
        "position",
        *RING,
        (
            Edit(
                r"(?s)position_embeddings_0_local = local_part\(.*?\n        \)",
                "position_embeddings_0_local = position_embeddings_0[:, : sequence // cp]",
            ),
        ),
        red=EVERYTHING,
    ),
    "ring: labels in rank order": Fault(
        "position",
        *RING,
        (Edit(r"(contiguous_local = local_part\(.*), balanced=True\)", r"\1)"),),
        red=EVERYTHING,
    ),
    "all_to_all: chunks in rank order": Fault(
        "position",
        "gpt2",
        "cp4 all_to_all",
        red=EVERYTHING,
        patch=instead(collectives, "_together", _in_rank_order),
    ),
    "sequence: all ranks take the first positions": Fault(
        "position",
        "gpt2",
        "tp4 sequence",
        (
            Edit(
                r'add_local = local_part\(add, dim=1, axis=self\.mesh\["tp"\]\)',
                "add_local = add[:, : sequence // tp]",
            ),
        ),
        red=EVERYTHING,
    ),
}

# ---------------------------------------------------------------- experts


def _nothing_goes_home(ctx: Any, grad: Tensor) -> Any:
    """The backward of combine without its all-to-all."""
    return grad.new_zeros(len(ctx.way.order), *grad.shape[1:]), None


def _wrong_order(rows: Tensor, taken: list[int], sent: list[int], axis: Any) -> Tensor:
    """What comes in by rank lies the other way round."""
    return torch.cat(_send(rows, taken, sent, axis).split(taken)[::-1])


_send = tokens._send
_GATES = r"norm|weights|.*mlp\.gate\.weight"
EXPERTS = {
    "experts: gradients don't travel back": Fault(
        "routing",
        "mixtral",
        "ep4",
        green=r"loss",
        patch=instead(tokens._Combine, "backward", staticmethod(_nothing_goes_home)),
    ),
    "experts: tokens in the wrong order of ranks": Fault(
        "routing", "mixtral", "ep4", red=EVERYTHING, patch=instead(tokens, "_send", _wrong_order)
    ),
    "experts: rows are counted for the wrong ones": Fault(
        "routing",
        "mixtral",
        "dp2 tp2 sequence",
        (Edit(r"(torch\.histc\(.*\))(?=\n)", r"\1.flip(0)"),),
        red=EVERYTHING,
    ),
    "experts: the router's gradient over dp alone": Fault(
        "routing",
        "mixtral",
        "dp2 ep2",
        (Edit(r'("mlp.gate.weight".*)sums=\("dp", "ep"\)', r'\1sums=("dp",)'),),
        red=_GATES,
        green=r"loss|.*mlp\.experts.*",
    ),
    "experts: the router's gradient without tp": Fault(
        "routing",
        "mixtral",
        "dp2 tp2",
        (
            Edit(
                r'"mlp.gate.weight", (.*), sums=\("dp", "tp"\)',
                r'"mlp.gate.weight", \1, sums=("dp",)',
            ),
        ),
        red=_GATES,
        green=r"loss|.*mlp\.experts.*",
    ),
    "experts: their gradients aren't summed over dp": Fault(
        "collective",
        "mixtral",
        "dp2 ep2",
        (Edit(r'(?s)("mlp.experts.down_proj".*?)sums=\("dp",\),', r"\1"),),
        red=r"norm|weights|.*experts\.down_proj",
        green=r"loss|.*attn.*",
    ),
}
FLOWS = {**RINGS, **EXPERTS}

"""A toy model, a batch, and emitted-style programs for it on several meshes."""

import re
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime import TrainingModule, run_program

BATCH, SEQUENCE, HIDDEN, FFN, VOCAB = 8, 6, 6, 8, 18
"""FSDP2 over four ranks shards hidden and vocab unevenly: 2, 2, 2, 0 and 5, 5, 5, 3."""


# ---------------------------------------------------------------- one device


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(HIDDEN, 2 * FFN)
        self.down = nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        down: Tensor = self.down(F.silu(gate) * up)
        return down


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(HIDDEN)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        mlp: Tensor = self.mlp(self.ln(x))
        return x + mlp


class Model(nn.Module):
    """Tied embedding and head, a frozen parameter, an unused one, a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.wte.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.linspace(0.5, 2.0, HIDDEN), requires_grad=False)
        self.register_buffer("scale", torch.full((), 3.0))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x * self.frozen) * self.scale
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch() -> dict[str, Tensor]:
    """Labels are ignored unevenly: over samples and along the sequence."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator)
    for sample in range(BATCH):
        labels[sample, : sample % SEQUENCE] = -100
    labels[1] = -100
    return {"input_ids": ids, "labels": labels}


adamw = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)


CLIP_NORM = 0.1


def reference() -> dict[str, Any]:
    model = plain_model()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(3):
        optimizer.zero_grad()
        loss = model(**batch())
        loss.backward()
        if step == 0:
            named = model.named_parameters()
            result["grads"] = {k: p.grad.clone() for k, p in named if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        result["losses"].append(loss.detach())
        result["norms"].append(norm)
    result["state"] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result["evaluated"] = model(**batch()).detach()
    assert min(result["norms"]) > CLIP_NORM
    return result


# ---------------------------------------------------------------- four

HEADER = """
import torch
import torch.nn.functional as F

from autopar.runtime import (
    Container, all_gather, all_reduce, cat, declare, declare_layers, enter, local_part,
    reduce_scatter, shard_fully, shard_state, split,
)

hidden, ffn, vocab, dtype = 6, 8, 18, torch.float64
"""

TENSOR = """
class Layer(Container):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        fused = cat(split(ffn, "tp"), split(ffn, "tp"))
        declare(self, "ln.weight", hidden, sums=("dp",), dtype=dtype)
        declare(self, "ln.bias", hidden, sums=("dp",), dtype=dtype)
        declare(self, "mlp.gate_up.weight", fused, hidden, sums=("dp",), dtype=dtype)
        declare(self, "mlp.gate_up.bias", fused, sums=("dp",), dtype=dtype)
        declare(self, "mlp.down.weight", hidden, split(ffn, "tp"), sums=("dp",), dtype=dtype)
        declare(self, "mlp.down.bias", hidden, sums=("dp",), dtype=dtype)

    def forward(self, x):
        tp = self.mesh["tp"]
        ln = F.layer_norm(x, (hidden,), self.ln.weight, self.ln.bias)
        # ---- ffn: tp splits ffn
        gate_up = F.linear(enter(ln, axis=tp), self.mlp.gate_up.weight, self.mlp.gate_up.bias)
        gate, up = gate_up.chunk(2, dim=-1)
        down = F.linear(F.silu(gate) * up, self.mlp.down.weight)  # partial over tp
        return x + all_reduce(down, axis=tp) + self.mlp.down.bias


class Model(Container):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        declare(self, "wte.weight", vocab, hidden, sums=("dp",), dtype=dtype, also=("head.weight",))
        declare(self, "unused", 3, dtype=dtype)
        declare(self, "frozen", hidden, dtype=dtype, trainable=False)
        declare(self, "scale", dtype=dtype, buffer=True)
        declare_layers(self, "layers", [Layer(mesh) for _ in range(2)])

    def counts(self, input_ids, labels):
        return ((labels != -100).sum(),)

    def forward(self, input_ids, labels, counts):
        x = F.embedding(input_ids, self.wte.weight)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(x * self.frozen, self.wte.weight) * self.scale
        loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss_sum / counts[0]

MODEL = Model
DATA_AXES = ("dp",)
LOSS_SUMS = ("dp",)
INPUTS = (("input_ids", (8, 6), "int64", True), ("labels", (8, 6), "int64", True))
"""

SEQUENCE_PARALLEL = (
    TENSOR.replace('hidden, sums=("dp",)', 'hidden, sums=("dp", "tp")')
    .replace('fused, hidden, sums=("dp", "tp")', 'fused, hidden, sums=("dp",)')
    .replace("enter(ln, axis=tp)", "all_gather(ln, dim=1, axis=tp)")
    .replace("all_reduce(down, axis=tp)", "reduce_scatter(down, dim=1, axis=tp)")
    .replace(
        "        x = F.embedding(",
        '        tp = self.mesh["tp"]\n'
        "        input_ids, labels = local_part(input_ids, 1, tp), local_part(labels, 1, tp)\n"
        "        x = F.embedding(",
    )
    .replace('LOSS_SUMS = ("dp",)', 'LOSS_SUMS = ("dp", "tp")')
)

ZERO = """
    def shard(self):
        for layer in self.layers:
            shard_fully(layer, axes=("dp",), names=(
                "ln.weight", "mlp.gate_up.weight", "mlp.gate_up.bias", "mlp.down.weight"))
        shard_fully(self, axes=("dp",), names=("wte.weight",))

MODEL = Model
"""
ZERO_LAYERS = re.sub(r"\n        shard_fully\(self.*\)", "", ZERO)
ZERO_1 = re.sub(r"shard_fully\((\w+),", r"shard_state(\1, stage=1,", ZERO)
ZERO_2 = ZERO_1.replace("stage=1", "stage=2")
ZERO_MIXED = """
    def shard(self):
        for layer in self.layers:
            shard_state(layer, stage=1, axes=("dp",), names=("ln.weight", "mlp.gate_up.bias"))
            shard_state(layer, stage=2, axes=("dp",), names=("ln.bias",))
            shard_fully(layer, axes=("dp",), names=("mlp.gate_up.weight", "mlp.down.weight"))
        shard_state(self, stage=2, axes=("dp",), names=("wte.weight",))

MODEL = Model
"""
HYBRID = 'MESH = (("dp_0", 2), ("dp", 2), ("tp", 1))\nMICROBATCHES = 2\n'
"""Samples over both axes, shards over dp."""

PROGRAMS = {
    "dp2 tp2": TENSOR + 'MESH = (("dp", 2), ("tp", 2))\nMICROBATCHES = 1\n',
    "tp4": TENSOR + 'MESH = (("dp", 1), ("tp", 4))\nMICROBATCHES = 2\n',
    "dp2 tp2 sequence": SEQUENCE_PARALLEL + 'MESH = (("dp", 2), ("tp", 2))\nMICROBATCHES = 2\n',
    "dp4 microbatches": TENSOR + 'MESH = (("dp", 4), ("tp", 1))\nMICROBATCHES = 2\n',
    "dp4 zero": TENSOR.replace("\nMODEL = Model\n", ZERO)
    + 'MESH = (("dp", 4), ("tp", 1))\nMICROBATCHES = 2\n',
    "dp4 zero layers": TENSOR.replace("\nMODEL = Model\n", ZERO_LAYERS)
    + 'MESH = (("dp", 4), ("tp", 1))\nMICROBATCHES = 1\n',
    "dp4 zero 1": TENSOR.replace("\nMODEL = Model\n", ZERO_1)
    + 'MESH = (("dp", 4), ("tp", 1))\nMICROBATCHES = 2\n',
    "dp4 zero 2": TENSOR.replace("\nMODEL = Model\n", ZERO_2)
    + 'MESH = (("dp", 4), ("tp", 1))\nMICROBATCHES = 2\n',
    "dp4 zero mixed": TENSOR.replace("\nMODEL = Model\n", ZERO_MIXED)
    + 'MESH = (("dp", 4), ("tp", 1))\nMICROBATCHES = 2\n',
    "dp2x2 zero 2": TENSOR.replace("\nMODEL = Model\n", ZERO_2)
    .replace('= ("dp",)', '= ("dp_0", "dp")')
    .replace('sums=("dp",)', 'sums=("dp_0", "dp")')
    + HYBRID
    + 'GROUPS = (("dp_0", "dp"),)\n',
    "tp2 dp2 sequence zero": SEQUENCE_PARALLEL.replace("\nMODEL = Model\n", ZERO)
    + 'MESH = (("tp", 2), ("dp", 2))\nMICROBATCHES = 2\n',
}


def load(name: str, **options: Any) -> TrainingModule:
    parallel = TrainingModule(run_program(HEADER + PROGRAMS[name]), **options)
    parallel.load_from_rank0(plain_model() if dist.get_rank() == 0 else None)
    return parallel


def one_process(**changes: Any) -> TrainingModule:
    source = HEADER + TENSOR + 'MESH = (("dp", 1), ("tp", 1))\nMICROBATCHES = 2\n'
    return TrainingModule(run_program(source), **changes)


def loaded() -> TrainingModule:
    parallel = one_process()
    parallel.load_weights(plain_model().state_dict())
    return parallel

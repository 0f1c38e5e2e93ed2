"""Models with parts that can't be analysed: ops without a rule, layers with Python on values."""

from collections.abc import Callable
from typing import Any

import torch
from models import Job
from torch import Tensor, nn

BATCH, SEQUENCE, HIDDEN = 8, 6, 12


class Solver(nn.Module):
    """A layer with an MLP that tp can split, and two ops without a rule."""

    eye: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.register_buffer("eye", 8 * torch.eye(SEQUENCE))

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, sequence, hidden]."""
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        normed = self.norm(x)
        near = torch.cdist(normed, normed.roll(1, 2)) + self.eye
        solved: Tensor = torch.linalg.solve(near, normed)
        return x + solved


class Fourier(Solver):
    """Values between two ops without a rule are complex."""

    def forward(self, x: Tensor) -> Tensor:
        """Mixes along the sequence in the frequency domain (as FNet does), after the MLP."""
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        spectrum = torch.fft.rfft(self.norm(x), dim=1)
        result: Tensor = x + torch.fft.irfft(spectrum * spectrum.abs(), n=SEQUENCE, dim=1)
        return result


class Distances(Solver):
    """An op without a rule that mixes the samples."""

    def forward(self, x: Tensor) -> Tensor:
        """As Solver, times the mean distance between samples."""
        x = super().forward(x)
        flat = x.flatten(1)
        return x * torch.cdist(flat, flat).mean()


class Clipped(nn.Module):
    """A layer with Python on the values of each sample, a tie, and a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.again, self.other = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.again.weight = self.inner.weight
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, sequence, hidden]."""
        rows = []
        for row in self.again(self.inner(self.norm(x))):
            if row.sum() > 0:
                row = self.other(row)
            rows.append(row * self.scale)
        return x + torch.stack(rows)


class Gate(nn.Module):
    """Boolean indexing, with two inputs and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Values above a threshold go through the linear."""
        high = (x > options["threshold"]).any(-1)
        out = options["residual"].clone()
        out[high] = out[high] + self.linear(x[high])
        return out, high.to(x.dtype).mean(-1, keepdim=True)


class Gated(nn.Module):
    """Transformer-like, with a gate that isn't repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = Stacked(Solver(), Clipped(), Solver()), Gate()

    def forward(self, ids: Tensor) -> Tensor:
        """Scores."""
        x = self.body.embed(ids)
        for layer in self.body.layers:
            x = layer(x)
        x, share = self.gate(x, options={"threshold": 0.5, "residual": x})
        scores: Tensor = self.body.head(x * (1 + share[..., None])).flatten(0, 1)
        return scores


class Judging(nn.Module):
    """Python on the values of all samples: they depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, sequence, hidden]."""
        if x.sum() > 0:
            x = x + self.linear(x)
        return x


class Normed(nn.Module):
    """Batch norm, and Python on values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(SEQUENCE)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, sequence, hidden]."""
        result: Tensor = self.norm(x)
        return result * 2 if bool(torch.isnan(x).any()) else result


class Stacked(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(32, HIDDEN), nn.ModuleList(layers)
        self.head = nn.Linear(HIDDEN, 32)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores [batch · sequence, 32]."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x).flatten(0, 1)
        return scores


def token_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy; some labels are ignored, unevenly over samples."""
    return nn.functional.cross_entropy(outputs, batch["labels"].flatten())


def job(*layers: nn.Module) -> Job:
    """The layers as a model in float64, with a batch."""
    return as_job(Stacked(*layers))


def as_job(model: nn.Module) -> Job:
    """The model in float64, with a batch."""
    torch.manual_seed(0)
    model = model.double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 32, (BATCH, SEQUENCE))
    labels = ids.clone()
    for sample, ignored in enumerate((0, 3, 5, 2, 1, 0, 4, 1)):
        labels[sample, :ignored] = -100
    return Job(model, {"ids": ids, "labels": labels}, token_loss)


class Idle(nn.Module):
    """One parameter is used by some samples, one by none: the plain model's optimizer leaves that
    alone, weight decay included."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.none = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, sequence, hidden]."""
        rows = []
        for row in x:
            if row.sum() > 0:
                row = row + self.some(row)
            if row.sum() > 1e6:
                row = row * self.none(row).sum()
            rows.append(row)
        return torch.stack(rows)


OPAQUE: dict[str, Callable[[], Job]] = {
    "ops": lambda: job(Solver(), Solver()),
    "layer": lambda: job(Solver(), Clipped(), Clipped()),
    "gate": lambda: as_job(Gated()),
    "judging": lambda: job(Judging(), Judging()),
    "idle": lambda: job(Idle(), Idle()),
    "normed": lambda: job(Normed(), Normed()),
    "fourier": lambda: job(Fourier(), Fourier()),
    "distances": lambda: job(Distances(), Distances()),
}

"""Models with parts that can't be analysed: ops without a rule, layers with Python on values."""

from collections.abc import Callable

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
    torch.manual_seed(0)
    model = Stacked(*layers).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 32, (BATCH, SEQUENCE))
    labels = ids.clone()
    for sample, ignored in enumerate((0, 3, 5, 2, 1, 0, 4, 1)):
        labels[sample, :ignored] = -100
    return Job(model, {"ids": ids, "labels": labels}, token_loss)


OPAQUE: dict[str, Callable[[], Job]] = {
    "ops": lambda: job(Solver(), Solver()),
    "fourier": lambda: job(Fourier(), Fourier()),
    "distances": lambda: job(Distances(), Distances()),
}

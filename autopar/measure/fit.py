"""α and β of collectives by least squares."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

SMALL_BYTES = 64 * 1024
"""Messages up to here are fitted apart from longer ones."""


@dataclass(frozen=True)
class Sample:
    """Seconds that a collective of `nbytes` (its larger side) over `ranks` adds to what it follows,
    which with it takes `whole_s`."""

    op: str
    nbytes: int
    ranks: int
    added_s: float
    whole_s: float


@dataclass(frozen=True)
class AlphaBeta:
    """α in seconds, β in seconds a byte, and the mean error relative to the whole time."""

    alpha_s: float
    beta_s: float
    error: float


Terms = tuple[float, float]
"""The factors of α and β: messages, and bytes on the way."""

_TERMS: Mapping[str, Callable[[float, int], Terms]] = MappingProxyType(
    {
        "ring twice": lambda b, n: (2 * (n - 1), 2 * (n - 1) / n * b),
        "ring": lambda b, n: (n - 1, (n - 1) / n * b),
        "pairwise": lambda b, n: (n - 1, (n - 1) / n * b),
        "tree": lambda b, n: ((n - 1).bit_length(), (n - 1).bit_length() * b),
        "chain": lambda b, n: (n - 1, b),
    }
)
"""Thakur, Rabenseifner and Gropp (2005), by algorithm."""

ALGORITHMS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("gloo", "all_reduce"): "ring",
        ("gloo", "all_gather"): "ring",
        ("gloo", "reduce_scatter"): "ring",
        ("gloo", "broadcast"): "tree",
        ("gloo", "all_to_all"): "pairwise",
        ("nccl", "all_reduce"): "ring",
        ("nccl", "all_gather"): "ring",
        ("nccl", "reduce_scatter"): "ring",
        ("nccl", "broadcast"): "chain",
        ("nccl", "all_to_all"): "pairwise",
    }
)
"""The algorithm whose α and β are fitted, by (backend, op): pytorch/gloo@081799c and
NVIDIA/nccl@5067397. gloo reduce-scatters by an all-reduce, of which each rank keeps its part."""

OPS = tuple(dict.fromkeys(op for _, op in ALGORITHMS))


def terms(backend: str, op: str, nbytes: float, ranks: int) -> Terms:
    """The factors of α and β in the op's time."""
    algorithm = ALGORITHMS[backend, op]
    twice = op == "all_reduce" or (backend, op) == ("gloo", "reduce_scatter")
    return _TERMS["ring twice" if algorithm == "ring" and twice else algorithm](nbytes, ranks)


def fit(backend: str, samples: Sequence[Sample]) -> AlphaBeta:
    """The least-squares fit of what the samples add.

    Each row is divided by its whole measured time, so that a small collective counts as much as a
    large. Where an unknown comes out at zero or below (noise: sizes on which the other decides),
    it is set to a thousandth of what would explain the samples alone, and the other is fitted.
    """
    weights = torch.tensor([sample.whole_s for sample in samples], dtype=torch.float64)
    factors = [terms(backend, s.op, s.nbytes, s.ranks) for s in samples]
    rows = torch.tensor(factors, dtype=torch.float64) / weights[:, None]
    added = torch.tensor([s.added_s for s in samples], dtype=torch.float64) / weights
    solution = torch.linalg.lstsq(rows, added[:, None]).solution[:, 0]
    for index in (0, 1):
        if solution[index] <= 0:
            solution = _other_alone(rows, added, index)
    error = (rows @ solution - added).abs().mean()
    return AlphaBeta(float(solution[0]), float(solution[1]), float(error))


def _other_alone(rows: torch.Tensor, added: torch.Tensor, small: int) -> torch.Tensor:
    other = 1 - small
    solution = torch.empty(2, dtype=torch.float64)
    solution[small] = 1e-3 * _alone(rows[:, small], added)
    solution[other] = _alone(rows[:, other], added - solution[small] * rows[:, small])
    return solution


def _alone(column: torch.Tensor, added: torch.Tensor) -> float:
    """One unknown's least squares; on samples that add nothing, next to nothing."""
    return max(float(column @ added / (column @ column)), 1e-15)


def fits(backend: str, samples: Sequence[Sample]) -> list[tuple[str, int, AlphaBeta]]:
    """(op, up to how many bytes or 0 for any, α and β) of each op, small messages and large."""
    found = []
    for op in OPS:
        own = [sample for sample in samples if sample.op == op]
        small = [sample for sample in own if sample.nbytes <= SMALL_BYTES]
        large = [sample for sample in own if sample.nbytes > SMALL_BYTES]
        if len(small) >= 2 and len(large) >= 2:
            found.append((op, SMALL_BYTES, fit(backend, small)))
            found.append((op, 0, fit(backend, large)))
        elif own:
            found.append((op, 0, fit(backend, own)))
    return found

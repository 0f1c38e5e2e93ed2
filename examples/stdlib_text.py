"""The source text of Python's own standard library as bytes: a corpus that every machine has."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

VOCAB = 256
"""One token a byte."""
EVALUATE_EVERY = 10
"""Every tenth file is kept for evaluation and never trained on."""
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
"""Folders that aren't the library proper: what a user installed, and tests."""
END_OF_FILE = b"\0"


@dataclass(frozen=True)
class Corpus:
    """The bytes of the files to train on and of those kept for evaluation: uint8, one dim each."""

    train: torch.Tensor
    evaluate: torch.Tensor
    train_files: tuple[Path, ...]
    evaluate_files: tuple[Path, ...]


def library_files(root: Path) -> tuple[Path, ...]:
    """Every Python source under `root`, sorted by its relative path, without tests and packages."""
    found = {path.relative_to(root): path for path in root.rglob("*.py") if path.is_file()}
    return tuple(
        found[relative]
        for relative in sorted(found, key=lambda path: path.parts)
        if not LEFT_OUT & set(relative.parts)
    )


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the standard library of the running Python, or the sources under `root`.

    Errors: ValueError where there are too few files to keep some for evaluation.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = library_files(root)
    if len(files) < EVALUATE_EVERY:
        raise ValueError(
            f"{root} holds {len(files)} Python files; at least {EVALUATE_EVERY} are needed to keep "
            "one for evaluation"
        )
    kept = files[EVALUATE_EVERY - 1 :: EVALUATE_EVERY]
    trained = tuple(path for path in files if path not in set(kept))
    return Corpus(_read(trained), _read(kept), trained, kept)


def _read(files: tuple[Path, ...]) -> torch.Tensor:
    text = b"".join(path.read_bytes() + END_OF_FILE for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def random_batch(
    text: torch.Tensor, samples: int, length: int, seed: int
) -> dict[str, torch.Tensor]:
    """`samples` windows of `length` bytes, anywhere in `text`; the same seed, the same windows.

    Returns the arguments of a Hugging Face causal model, which shifts the labels itself:
    input_ids and labels, both int64 (samples, length).
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - length + 1, (samples,), generator=generator)
    return _windows(text, starts, length)


def evaluation_batches(
    text: torch.Tensor, samples: int, length: int, batches: int
) -> list[dict[str, torch.Tensor]]:
    """`batches` batches of windows spread evenly over the whole of `text`."""
    starts = torch.linspace(0, len(text) - length, samples * batches, dtype=torch.float64).long()
    return [_windows(text, part, length) for part in starts.reshape(batches, samples)]


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> dict[str, torch.Tensor]:
    tokens = text[starts[:, None] + torch.arange(length)].long()
    return {"input_ids": tokens, "labels": tokens.clone()}

"""The example's corpus: the same windows on every rank and run, and evaluation kept apart."""

from pathlib import Path

import pytest
import torch
from stdlib_text import (
    EVALUATE_EVERY,
    VOCAB,
    Corpus,
    evaluation_batches,
    library_files,
    load_corpus,
    random_batch,
)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """25 files of known bytes in two folders, and what has to be left out."""
    for i in range(25):
        file = tmp_path / ("b" if i % 2 else "a") / f"m{i:02}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes([100 + i]) * 40)
    for folder in ("site-packages", "test", "a/tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "left_out.py").write_text("x")
    (tmp_path / "a" / "notes.txt").write_text("x")
    return tmp_path


def test_files_are_sorted_and_only_the_librarys_own(library: Path) -> None:
    names = [path.relative_to(library).as_posix() for path in library_files(library)]
    assert names == sorted(names)
    assert len(names) == 25
    assert not any("left_out" in name or "notes" in name for name in names)


def test_every_tenth_file_is_kept_for_evaluation(library: Path) -> None:
    files = library_files(library)
    corpus = load_corpus(library)
    assert corpus.evaluate_files == (files[9], files[19])
    assert len(corpus.train_files) == 23
    assert set(corpus.train_files) | set(corpus.evaluate_files) == set(files)
    kept = {files[9].read_bytes()[0], files[19].read_bytes()[0]}
    assert not kept & set(corpus.train.tolist())
    assert kept == set(corpus.evaluate.tolist()) - {0}


def test_bytes_are_those_of_the_files_in_order(library: Path) -> None:
    corpus = load_corpus(library)
    text = b"".join(path.read_bytes() + b"\0" for path in corpus.train_files)
    assert bytes(corpus.train.tolist()) == text


def test_too_few_files_is_an_error_with_the_number(tmp_path: Path) -> None:
    for i in range(EVALUATE_EVERY - 1):
        (tmp_path / f"m{i}.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"holds 9 Python files; at least 10"):
        load_corpus(tmp_path)


def test_a_batch_is_windows_of_the_text_and_depends_on_the_seed_alone(library: Path) -> None:
    text = load_corpus(library).train
    torch.manual_seed(1)
    batch = random_batch(text, samples=8, length=16, seed=3)
    torch.manual_seed(2)
    again = random_batch(text, samples=8, length=16, seed=3)
    other = random_batch(text, samples=8, length=16, seed=4)
    assert batch["input_ids"].shape == batch["labels"].shape == (8, 16)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], again["input_ids"])
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert not torch.equal(batch["input_ids"], other["input_ids"])
    windows = {bytes(row) for row in text.unfold(0, 16, 1).tolist()}
    assert {bytes(row) for row in batch["input_ids"].tolist()} <= windows


def test_windows_reach_the_first_and_the_last_byte(library: Path) -> None:
    text = load_corpus(library).train
    exact = random_batch(text[:16], samples=4, length=16, seed=0)["input_ids"]
    assert torch.equal(exact, text[:16].long().expand(4, 16))
    spread = evaluation_batches(text, samples=4, length=16, batches=3)
    assert len(spread) == 3
    assert torch.equal(spread[0]["input_ids"][0], text[:16].long())
    assert torch.equal(spread[-1]["input_ids"][-1], text[-16:].long())


def test_the_standard_library_itself_is_enough_to_train_on() -> None:
    corpus: Corpus = load_corpus()
    assert len(corpus.train) > 5_000_000
    assert 0.02 < len(corpus.evaluate) / len(corpus.train) < 0.3
    assert int(corpus.train.max()) < VOCAB

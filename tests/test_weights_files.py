"""Weights from safetensors: each rank reads its part."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pool import Pool
from safetensors.torch import save_file
from test_checkpoint_errors import message
from torch import Tensor
from toy_programs import HEADER, PROGRAMS, batch, loaded, one_process, plain_model

from autopar.runtime import TrainingModule, run_program, weights_files


def state() -> dict[str, Tensor]:
    """Without the second name of the tied weight, as `save_pretrained` writes it."""
    found = {name: tensor.contiguous() for name, tensor in plain_model().state_dict().items()}
    del found["head.weight"]
    return found


def two_files(folder: Path) -> None:
    """As `save_pretrained` leaves a large model."""
    whole = state()
    names = {
        name: f"model-0000{number % 2 + 1}-of-00002.safetensors"
        for number, name in enumerate(whole)
    }
    for file in sorted(set(names.values())):
        save_file({n: t for n, t in whole.items() if names[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    save_file({"another": torch.ones(1)}, folder / "another.safetensors")


def from_files(name: str, path: Path) -> tuple[list[str], int]:
    """What differs from the plain model, and how many elements were read."""
    parallel = TrainingModule(run_program(HEADER + PROGRAMS[name]))
    read: list[Tensor] = []
    original = weights_files._read

    def counting(*arguments: Any) -> Tensor:
        read.append(original(*arguments))
        return read[-1]

    with mock.patch.object(weights_files, "_read", counting):
        parallel.load_weights(path)
    found, expected = parallel.full_state_dict(), plain_model().state_dict()
    parallel.train_step(parallel.shard_batch(batch()))
    parallel.close()
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    return wrong + sorted(found.keys() ^ expected.keys()), sum(tensor.numel() for tensor in read)


@pytest.mark.parametrize("name", ["tp4", "tp2 dp2 sequence zero"])
def test_each_rank_reads_its_part(pool4: Pool, tmp_path: Path, name: str) -> None:
    two_files(tmp_path)
    read = []
    for wrong, elements in pool4.run(from_files, name, tmp_path):
        assert not wrong
        read.append(elements)
    total = sum(tensor.numel() for tensor in state().values())
    assert max(read) < 0.75 * total if name == "tp4" else max(read) < 0.45 * total


def test_one_file_and_other_dtypes(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({name: tensor.float() for name, tensor in state().items()}, path)
    for given in (path, str(path), tmp_path):
        parallel = one_process()
        parallel.load_weights(given)
        found = parallel.full_state_dict()
        for name, tensor in plain_model().state_dict().items():
            assert torch.equal(found[name], tensor.float().double())


def test_what_is_no_model_in_safetensors(tmp_path: Path) -> None:
    call = one_process().load_weights
    assert f"{tmp_path} holds no safetensors: pass a file" in message(call, tmp_path)
    assert "a holds no safetensors" in message(call, tmp_path / "a")
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"no tensors")
    assert f"{file} can't be read as safetensors" in message(call, tmp_path)
    save_file({"unused": torch.ones(3)}, file)
    assert "The weights given lack wte.weight, frozen, " in message(call, tmp_path)
    save_file({**state(), "spare": torch.ones(3)}, file)
    assert "The program has no spare: are these another model's?" in message(call, tmp_path)
    save_file({**state(), "unused": torch.ones(4)}, file)
    assert f"unused has shape (4,) in {tmp_path}; the program's is (3,)" in message(call, tmp_path)
    save_file(state(), file)
    save_file({"unused": torch.ones(3)}, tmp_path / "b.safetensors")
    assert f"unused is in two files of {tmp_path}" in message(call, tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "has no weight_map"),
        ("[", "this is not an index of safetensors"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "lists '../x.safetensors', which is no"),
        ('{"weight_map": {"a": "x.bin"}}', "lists 'x.bin', which is no safetensors file"),
        ('{"weight_map": {"a": "x.safetensors"}}', "x.safetensors can't be read"),
        ('{"weight_map": {}}', "holds no safetensors"),
    ],
)
def test_a_wrong_index(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert expected in message(one_process().load_weights, tmp_path)


def test_several_indices(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    assert "has several indices (a.safet" in message(one_process().load_weights, tmp_path)


def test_a_checkpoint_is_no_plain_model(tmp_path: Path) -> None:
    path = loaded().save_checkpoint(tmp_path)
    for given in (path, tmp_path):
        assert "load_checkpoint reads them" in message(one_process().load_weights, given)

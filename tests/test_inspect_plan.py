"""examples/inspect_plan.py answers from a plan's JSON alone."""

import functools
from pathlib import Path

import pytest
from edits import apply, planned
from inspect_plan import layer_answer, layer_paths, main
from models import gpt2

import autopar


@functools.cache
def plan() -> autopar.Plan:
    """GPT-2 with ZeRO in its first layer only."""
    job = gpt2()
    edited = apply(planned(job).plan, "second_layer_without_zero")
    return autopar.emit(job.model, edited).plan


@pytest.fixture
def file(tmp_path: Path) -> str:
    """The plan's file."""
    plan().save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def test_what_a_layer_does(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([file, "--layer", "0"]) == 0
    first = capsys.readouterr().out
    assert first.splitlines()[0] == "Layer transformer.h.0 of GPT2LMHeadModel:"
    assert "  ffn: data, tensor, zero stage=3\n    batch is split over dp (2)\n" in first
    assert "    ffn is split over tp (2)\n    3 parameters are sharded over dp (2)\n" in first
    assert main([file, "--layer", "transformer.h.1"]) == 0
    second = capsys.readouterr().out
    assert "  ffn: data, tensor\n" in second
    assert "sharded" not in second


def test_where_memory_goes(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([file, "--memory"]) == 0
    lines = capsys.readouterr().out.splitlines()
    predicted = plan().predicted
    assert lines[0].startswith(f"Memory of a device: {predicted.memory_bytes:,} of 6,319,127,552")
    assert [line.split()[0] for line in lines[1:]] == sorted(
        predicted.memory, key=lambda kind: -predicted.memory[kind]
    )
    counts = [int(line.split()[1].replace(",", "")) for line in lines[1:]]
    assert sum(counts) == predicted.memory_bytes


def test_what_is_communicated(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([file, "--communication"]) == 0
    lines = capsys.readouterr().out.splitlines()
    total = sum(one.bytes for one in plan().collectives)
    assert lines[0].startswith(f"Communication: {total:,} bytes a step on a device, ")
    assert len(lines) == 1 + len(plan().collectives)
    for one in plan().collectives:
        over = " and ".join(f"{axis} (2)" for axis in one.axes)
        wanted = f"over {over}, {one.phase}: {one.bytes:,} bytes in {one.count} calls"
        assert any(line.split()[0] == one.op and wanted in line for line in lines[1:])


def test_without_a_question(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([file]) == 0
    out = capsys.readouterr().out
    assert "Memory of a device: " in out and "Communication: " in out


@pytest.mark.parametrize("wanted", ["2", "-1", "transformer.h.9", "wte"])
def test_a_layer_that_is_not_there(
    file: str, capsys: pytest.CaptureFixture[str], wanted: str
) -> None:
    assert main([file, f"--layer={wanted}"]) == 2
    assert capsys.readouterr().err == (
        f"the plan has no layer {wanted!r}: there are 0 to 1, or transformer.h.0 to "
        "transformer.h.1\n"
    )


def test_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.json")]) == 2
    assert "can't read the plan" in capsys.readouterr().err


def test_layers_are_counted_as_numbers() -> None:
    job = gpt2(layers=11)
    many = autopar.compile(job.model, "cpu:4", job.batch, pin={"dp": 4}).plan
    paths = layer_paths(many)
    assert paths == [f"transformer.h.{i}" for i in range(11)]
    assert layer_answer(many, "10")[0].startswith("Layer transformer.h.10 ")

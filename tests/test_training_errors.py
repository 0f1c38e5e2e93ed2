"""What users do wrong, and what TrainingModule says."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn
from toy_programs import HEADER, PROGRAMS, batch, load, loaded, one_process, plain_model

from autopar.errors import AutoparError
from autopar.runtime import TrainingModule, run_program


def message(call: Any, *args: Any) -> str:
    with pytest.raises(AutoparError) as error:
        call(*args)
    return str(error.value)


def test_wrong_batches() -> None:
    parallel, whole = loaded(), batch()
    short = {name: tensor[:4] for name, tensor in whole.items()}
    assert message(parallel.train_step, short) == (
        "Input 'input_ids' has shape (4, 6) and dtype torch.int64; expected (8, 6) and torch.int64 "
        "(this rank's share, 1/1 of (8, 6) on dim 0). A program is for one batch size: compile "
        "again for another."
    )
    assert "'labels' has shape (8, 6) and dtype torch.int32" in message(
        parallel.train_step, {**whole, "labels": whole["labels"].int()}
    )
    assert "The batch has 1 tensors, the program takes 2: input_ids, labels" in message(
        parallel.train_step, whole["labels"]
    )
    assert "(4, 6)" in message(parallel.shard_batch, short)


def test_wrong_order_of_calls() -> None:
    assert "call load_weights or load_from_rank0 first" in message(
        one_process().train_step, batch()
    )
    parallel = loaded()
    assert message(parallel.optimizer_step) == (
        "optimizer_step() needs the gradients of a forward_backward() before it"
    )
    parallel.train_step(batch())
    assert "full_gradients() needs" in message(parallel.full_gradients)


def test_wrong_weights() -> None:
    parallel, state = one_process(), plain_model().state_dict()
    assert "has no extra: " in message(parallel.load_weights, {**state, "extra": torch.ones(1)})
    missing = {name: tensor for name, tensor in state.items() if name != "layers.1.ln.weight"}
    assert message(parallel.load_weights, missing) == "The weights given lack layers.1.ln.weight"
    assert "unused has shape (4,) in the weights given; the program's is (3,)" in message(
        parallel.load_weights, {**state, "unused": torch.ones(4)}
    )
    assert "Rank 0 has no model" in message(parallel.load_from_rank0, None)
    assert "is on the meta device: call load_weights" in message(
        parallel.load_from_rank0, plain_model().to("meta")
    )
    assert "compiled from another model" in message(parallel.load_from_rank0, nn.Linear(2, 2))


def test_wrong_optimizer() -> None:
    with pytest.raises(AutoparError, match="it returned list"):
        one_process(optimizer=lambda named: list(named))


def test_wrong_number_of_processes() -> None:
    with pytest.raises(AutoparError) as error:
        TrainingModule(run_program(HEADER + PROGRAMS["dp2 tp2"]))
    assert str(error.value) == (
        "The program is for 4 processes (dp2 · tp2), but 1 is running. "
        "Start it with: torchrun --nproc-per-node 4 your_script.py"
    )


def rank0_without_model() -> str:
    parallel = TrainingModule(run_program(HEADER + PROGRAMS["dp2 tp2"]))
    text = message(parallel.load_from_rank0, None)
    parallel.close()
    return text


def test_all_ranks_hear_of_rank0s_mistake(pool4: Pool) -> None:
    for text in pool4.run(rank0_without_model):
        assert "Rank 0 has no model to take the weights from" in text


def peers_disagree() -> str:
    parallel = load("dp2 tp2")
    local = parallel.shard_batch(batch())
    if dist.get_rank() == 3:
        local = {name: tensor.flip(0) for name, tensor in local.items()}
    text = message(parallel.train_step, local)
    parallel.close()
    return text


def test_peers_must_have_the_same_samples(pool4: Pool) -> None:
    for text in pool4.run(peers_disagree):
        assert text == (
            "Ranks 2 and 3 were given different local batches, but differ only along axes that "
            "don't split the batch (dp2 · tp2, batch over ('dp',)). Choose a rank's samples by "
            "data_parallel_rank, not by its global rank."
        )

"""Emitted-style programs on four processes against plain torch on one."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from test_runtime_collectives import broken
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from toy_programs import (
    BATCH,
    CLIP_NORM,
    FFN,
    HEADER,
    HIDDEN,
    PROGRAMS,
    SEQUENCE,
    VOCAB,
    adamw,
    batch,
    load,
    loaded,
    one_process,
    plain_model,
    reference,
)

from autopar.errors import AutoparError
from autopar.runtime import CollectiveCounter, TrainingModule, run_program


def train(name: str) -> dict[str, Any]:
    parallel = load(name, optimizer=adamw, clip_norm=CLIP_NORM)
    local = parallel.shard_batch(batch())
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(3):
        if step == 0:
            result["losses"].append(parallel.forward_backward(local))
            result["grads"] = parallel.full_gradients()
            result["norms"].append(parallel.optimizer_step())
        else:
            loss, norm = parallel.train_step(local)
            result["losses"].append(loss)
            result["norms"].append(norm)
    result["state"] = parallel.full_state_dict()
    result["evaluated"] = parallel.evaluate(local)
    parallel.close()
    return result


def largest_error(found: dict[str, Any], expected: dict[str, Any]) -> float:
    errors = [(found["evaluated"] - expected["evaluated"]).abs()]
    for key in ("losses", "norms"):
        errors += [(a - b).abs() for a, b in zip(found[key], expected[key], strict=True)]
    for key in ("grads", "state"):
        assert found[key].keys() == expected[key].keys()
        errors += [(found[key][k] - expected[key][k]).abs().max() for k in expected[key]]
    assert all(error.dtype == torch.float64 for error in errors)
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("name", PROGRAMS)
def test_three_clipped_steps(pool4: Pool, name: str) -> None:
    expected = reference()
    for found in pool4.run(train, name):
        assert largest_error(found, expected) < 1e-9


def train_with_broken_enter() -> dict[str, Any]:
    with broken("enter"):
        return train("dp2 tp2")


def test_broken_enter_turns_red(pool4: Pool) -> None:
    expected = reference()
    for found in pool4.run(train_with_broken_enter):
        assert abs(found["losses"][0] - expected["losses"][0]) < 1e-9  # the loss can't see it
        assert largest_error(found, expected) > 1e-2


def float32_gradients(name: str) -> dict[str, Tensor]:
    source = (HEADER + PROGRAMS[name]).replace("torch.float64", "torch.float32")
    parallel = TrainingModule(run_program(source))
    parallel.load_weights(plain_model().state_dict())
    parallel.forward_backward(parallel.shard_batch(batch()))
    return parallel.full_gradients()


@pytest.mark.parametrize("program", ["dp4 zero", "dp4 zero 1", "dp4 zero 2"])
def test_zero_sums_in_float32(pool4: Pool, program: str) -> None:
    expected = reference()["grads"]
    for found in pool4.run(float32_gradients, program):
        for name, grad in expected.items():
            assert (found[name] - grad).abs().max() < 1e-6


# ---------------------------------------------------------------- communication


def collectives_of_a_step(name: str) -> tuple[dict[Any, int], dict[Any, int]]:
    parallel = load(name, clip_norm=CLIP_NORM)
    local = parallel.shard_batch(batch())
    parallel.train_step(local)  # compares peers
    with CollectiveCounter(parallel.mesh) as counter:
        parallel.train_step(local)
    parallel.close()
    return dict(counter.bytes), dict(counter.calls)


def test_collectives_of_a_step(pool4: Pool) -> None:
    stream_bytes = 2 * SEQUENCE * HIDDEN * 8  # a microbatch on one rank, sequence whole
    both = 2 * (2 * HIDDEN + HIDDEN) + VOCAB * HIDDEN  # norms, biases, embedding
    split = 2 * (FFN * HIDDEN + FFN + HIDDEN * FFN // 2)
    for found_bytes, calls in pool4.run(collectives_of_a_step, "dp2 tp2 sequence"):
        assert found_bytes == {
            # 2 microbatches, 2 layers, forward and backward
            ("all_gather", ("tp",)): 8 * stream_bytes,
            ("reduce_scatter", ("tp",)): 8 * stream_bytes,
            ("all_reduce", ("dp", "tp")): both * 8 + 8 + 8,  # gradients, loss, norm
            ("all_reduce", ("dp",)): split * 8 + 8,  # gradients, count
        }
        assert calls["all_reduce", ("dp", "tp")] == 3 and calls["all_reduce", ("dp",)] == 2


def sharded_modules(name: str) -> list[str]:
    parallel = load(name)
    found = [
        key for key, module in parallel.model.named_modules() if isinstance(module, FSDPModule)
    ]
    parallel.close()
    return found


def test_zero_has_one_root(pool4: Pool) -> None:
    """Else no layer would prefetch the next one's parameters."""
    assert pool4.run(sharded_modules, "dp4 zero layers")[0] == ["", "layers.0", "layers.1"]


def test_collectives_of_zero(pool4: Pool) -> None:
    layer = 8 + 2 * FFN * HIDDEN + 2 * FFN + 8 * FFN  # ln and down padded from 6 rows to 8
    root = 20 * HIDDEN  # vocab padded from 18 rows
    for found_bytes, calls in pool4.run(collectives_of_a_step, "dp4 zero"):
        # 2 microbatches; gathered in forward and again in backward, the root in both as well
        assert calls["reduce_scatter", ("dp",)] == 2 * 3
        assert found_bytes["reduce_scatter", ("dp",)] == 2 * (2 * layer + root) * 8
        assert calls["all_gather", ("dp",)] == 2 * 2 * 3
        assert found_bytes["all_gather", ("dp",)] == 2 * 2 * (2 * layer + root) * 8


@pytest.mark.parametrize(("program", "sums"), [("dp4 zero 1", 1), ("dp4 zero 2", 2)])
def test_collectives_of_zero_1_and_2(pool4: Pool, program: str, sums: int) -> None:
    """Two microbatches: one all-gather a step, and one sum at stage 1."""
    layer = 8 + 2 * FFN * HIDDEN + 2 * FFN + 8 * FFN
    total = 2 * layer + 20 * HIDDEN
    for found_bytes, calls in pool4.run(collectives_of_a_step, program):
        assert calls["all_gather", ("dp",)] == 3
        assert found_bytes["all_gather", ("dp",)] == total * 8
        assert calls["reduce_scatter", ("dp",)] == sums * 3
        assert found_bytes["reduce_scatter", ("dp",)] == sums * total * 8


def after_failures(program: str) -> tuple[Tensor, Tensor]:
    """The loss and the norm after steps that failed half-way and weights changed by hand."""
    parallel = load(program)
    local = parallel.shard_batch(batch())
    second, forward = parallel.model.layers[1], parallel.model.layers[1].forward
    second.forward = None
    with pytest.raises(TypeError):
        parallel.train_step(local)
    second.forward = forward
    hook = parallel.model.wte.weight.register_hook(lambda grad: grad[:1])
    with pytest.raises(RuntimeError, match="changed the size"):  # the layers' sums are under way
        parallel.train_step(local)
    hook.remove()
    with torch.no_grad():
        for group in parallel.optimizer.param_groups:
            for value in group["params"]:
                value.mul_(0.5)
    evaluated = parallel.evaluate(local)
    assert parallel.forward_backward(local) == evaluated
    norm = parallel.optimizer_step()
    parallel.close()
    return evaluated, norm


@pytest.mark.parametrize("program", ["dp4 zero 1", "dp4 zero 2"])
def test_every_step_starts_anew(pool4: Pool, program: str) -> None:
    model = plain_model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(0.5)
    expected = model(**batch())
    expected.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for loss, norm in pool4.run(after_failures, program):
        assert abs(loss - expected) < 1e-9
        assert abs(norm - nn.utils.get_total_norm(grads)) < 1e-9


# ---------------------------------------------------------------- the rest of the interface


def dropout_losses() -> list[float]:
    source = HEADER + PROGRAMS["dp2 tp2"].replace(
        "        for layer in self.layers:",
        "        x = F.dropout(torch.ones_like(x), 0.5, self.training)\n"
        "        self.seen = x.sum().item()\n"
        "        for layer in self.layers:",
    )
    parallel = TrainingModule(run_program(source), seed=3)
    parallel.load_from_rank0(plain_model())
    draws = []
    for _ in range(2):
        parallel.forward_backward(parallel.shard_batch(batch()))
        draws.append(parallel.model.seen)
        torch.rand(dist.get_rank())
    parallel.evaluate(parallel.shard_batch(batch()))
    assert parallel.model.seen == BATCH // 2 * SEQUENCE * HIDDEN
    parallel.close()
    return draws


def test_data_ranks_draw_different_masks(pool4: Pool) -> None:
    """And tensor ranks the same, whatever else they draw."""
    first, second, third, fourth = pool4.run(dropout_losses)
    assert first == second and third == fourth and first[0] != third[0] and first[0] != first[1]


def build_groups() -> tuple[list[str], list[tuple[int, ...]]]:
    names: list[str] = []

    def make(pairs: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        named = list(pairs)
        names.extend(name for name, _ in named)
        flat = [p for _, p in named if p.ndim < 2]
        deep = [p for _, p in named if p.ndim >= 2]
        groups: list[dict[str, Any]] = [{"params": flat}, {"params": deep, "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.1)

    parallel = load("dp4 zero", optimizer=make)
    parallel.train_step(parallel.shard_batch(batch()))
    shapes = [tuple(p.shape) for p in parallel.optimizer.param_groups[1]["params"]]
    assert all(
        type(p) is nn.Parameter for g in parallel.optimizer.param_groups for p in g["params"]
    )
    parallel.close()
    return names, shapes


def test_optimizer_from_named_parameters(pool4: Pool) -> None:
    expected = [name for name, p in plain_model().named_parameters() if p.requires_grad]
    for rank, (names, shapes) in enumerate(pool4.run(build_groups)):
        assert sorted(names) == sorted(expected)
        assert shapes[0] == (3 if rank == 3 else 5, HIDDEN)


def test_one_process_without_process_group() -> None:
    parallel = loaded()
    result = parallel.train_step(batch())
    assert abs(result.loss - reference()["losses"][0]) < 1e-9
    assert parallel.data_parallel_size == 1 and parallel.data_parallel_rank == 0


def test_batch_is_read_by_name() -> None:
    parallel = loaded()
    named, expected = batch(), reference()["losses"][0]
    reordered = {"labels": named["labels"], "input_ids": named["input_ids"]}
    assert abs(parallel.evaluate(reordered) - expected) < 1e-9
    with pytest.raises(AutoparError, match="Pass the same structure"):
        parallel.evaluate((named["input_ids"], named["labels"]))


def test_traceback_shows_emitted_lines() -> None:
    parallel = loaded()
    parallel.model.wte = None
    with pytest.raises(AttributeError) as error:
        parallel.evaluate(batch())
    assert "F.embedding(input_ids, self.wte.weight)" in str(error.getrepr())


def test_tied_names_share_memory() -> None:
    state = loaded().full_state_dict()
    assert state["wte.weight"] is state["head.weight"]
    plain_model().load_state_dict(state)


def test_weights_come_from_either_tied_name() -> None:
    parallel, state = one_process(), plain_model().state_dict()
    del state["wte.weight"]
    parallel.load_weights(state)
    assert torch.equal(parallel.full_state_dict()["wte.weight"], state["head.weight"])


def test_torchruns_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": store.port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    one_process()
    assert dist.get_backend() == "gloo" and dist.get_world_size() == 1
    one_process()
    dist.destroy_process_group()

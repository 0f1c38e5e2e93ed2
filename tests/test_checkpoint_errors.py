"""What goes wrong with checkpoints: on disk, between ranks, between models; and what is said."""

import json
import pickle
import resource
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import differences, whole
from pool import Pool
from torch import nn
from toy_programs import HEADER, TENSOR, batch, load, loaded, one_process

from autopar.errors import AutoparError
from autopar.runtime import TrainingModule, keep_state, run_program

INDEX = "checkpoint.json"


def message(call: Callable[..., Any], *args: Any, **keywords: Any) -> str:
    try:
        call(*args, **keywords)
    except AutoparError as error:
        return str(error)
    raise AssertionError("no AutoparError")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint, the second of two."""
    parallel = loaded()
    parallel.train_step(batch())
    parallel.save_checkpoint(tmp_path)
    parallel.train_step(batch())
    return parallel.save_checkpoint(tmp_path)


def edit(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes an index as a stranger would who knows the format."""
    path = checkpoint / INDEX
    content = json.loads(path.read_text())["content"]
    change(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "content": content}))


# ---------------------------------------------------------------- which checkpoint


def test_no_complete_checkpoint(tmp_path: Path) -> None:
    call = one_process().load_checkpoint
    assert f"{tmp_path / 'a'} isn't a folder. Pass the folder" in message(call, tmp_path / "a")
    assert f"{tmp_path} holds no complete checkpoint. Pass" in message(call, tmp_path)
    (tmp_path / ".unfinished-000001-step-00000007").mkdir()
    assert "(only .unfinished-000001-step-00000007, cut off while it was saved)" in message(
        call, tmp_path
    )


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = message(loaded().save_checkpoint, tmp_path / "file")
    assert "can't hold checkpoints (FileExistsError" in text and "rank 0 can write to" in text
    assert "at least 1 checkpoint, not 0" in message(loaded().save_checkpoint, tmp_path, keep=0)
    assert "have no values yet" in message(one_process().save_checkpoint, tmp_path)


def test_the_newest_is_the_one_saved_last(tmp_path: Path) -> None:
    parallel = loaded()
    paths = []
    for step in (5, 6, 7):
        parallel.steps = step
        paths.append(parallel.save_checkpoint(tmp_path))
    assert [path.name for path in paths[1:]] == ["000002-step-00000006", "000003-step-00000007"]
    assert sorted(tmp_path.iterdir()) == paths[1:]
    again = one_process()
    again.load_checkpoint(tmp_path)
    assert again.steps == 7
    again.load_checkpoint(paths[1])  # back to an older one, and on from there
    assert again.save_checkpoint(tmp_path, keep=3).name == "000004-step-00000006"
    parallel.load_checkpoint(tmp_path)
    assert parallel.steps == 6 and len(list(tmp_path.iterdir())) == 3


# ---------------------------------------------------------------- corrupt or hostile


def refused(checkpoint: Path) -> str:
    """The error; the program must be as it was before, or refuse to train."""
    parallel = loaded()
    before = whole(parallel)
    text = message(parallel.load_checkpoint, checkpoint.parent)
    assert f"The checkpoint {checkpoint} is corrupt: " in text
    assert f"{checkpoint.parent}/000001-step-00000001 is the one before it" in text
    if differences(whole(parallel), before):
        assert "have no values yet" in message(parallel.train_step, batch())
    parallel.load_checkpoint(checkpoint.parent / "000001-step-00000001")
    assert parallel.steps == 1
    parallel.train_step(batch())
    return text


def test_files_that_are_not_what_was_written(saved: Path) -> None:
    data = saved / "rank-00000.safetensors"
    content = data.read_bytes()
    data.write_bytes(content[:-100])
    size = len(content)
    assert f"rank-00000.safetensors has {size - 100} bytes, {size} were written" in refused(saved)
    data.unlink()
    assert f"rank-00000.safetensors ({size} bytes) is missing" in refused(saved)
    changed = bytearray(content)
    changed[-5] ^= 1
    data.write_bytes(changed)
    assert "has other bytes than were written (CRC-32 differs)" in refused(saved)
    data.write_bytes(b"\xff" * 8 + content[8:])
    assert "rank-00000.safetensors can't be read" in refused(saved)
    data.write_bytes(content)
    loaded().load_checkpoint(saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "7",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"step":2', '"step":3'),
        lambda text: text.replace('"crc32":', '"crc":', 1),
        lambda text: text.replace("0.001", "NaN"),
        lambda text: "\udcff",
    ],
)
def test_an_index_that_is_not_what_was_written(saved: Path, change: Callable[[str], str]) -> None:
    path = saved / INDEX
    path.write_text(change(path.read_text()), errors="surrogateescape")
    assert f"{INDEX} can't be read" in refused(saved)


WEIGHT = "weight/layers.0.mlp.gate_up.weight"


def set_weight(content: dict[str, Any], **fields: Any) -> None:
    content["tensors"][WEIGHT].update(fields)


def set_chunk(content: dict[str, Any], place: int, value: Any) -> None:
    content["tensors"][WEIGHT]["chunks"][0][place] = value


def claim_another_file(content: dict[str, Any], name: str) -> None:
    content["files"][name] = content["files"].pop("rank-00000.safetensors")


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "path": (lambda c: claim_another_file(c, "../../etc/passwd"), "is no file of a checkpoint"),
    "absolute path": (lambda c: set_chunk(c, 2, "/etc/passwd"), "is no file of a checkpoint"),
    "unlisted file": (lambda c: set_chunk(c, 2, "rank-00007.safetensors"), "isn't among its files"),
    "format": (lambda c: c.update(format="autopar checkpoint 2"), "its format is"),
    "dtype": (lambda c: set_weight(c, dtype="__import__"), "KeyError"),
    "no chunks": (lambda c: set_weight(c, chunks=[]), "has 0 chunks"),
    "hole": (lambda c: set_chunk(c, 1, [15, 6]), "invalid fill"),
    "outside": (lambda c: set_chunk(c, 0, [1, 0]), "out of bounds"),
    "huge": (lambda c: set_chunk(c, 1, [2**40, 6]), "bytes lie in rank-00000.safetensors of"),
    "negative": (lambda c: set_chunk(c, 0, [-1, 0]), "should be a whole number"),
    "dims": (lambda c: set_chunk(c, 0, [0]), "hasn't 2 dims"),
    "not a list": (lambda c: set_weight(c, shape="16"), "should be a list"),
    "other section": (
        lambda c: c["tensors"].update({"extra/a": c["tensors"][WEIGHT]}),
        "it has extra",
    ),
    "parameters as an option": (
        lambda c: c["facts"].update({"optimizer.group/0/params": []}),
        "is no option",
    ),
    "a value of no kind": (
        lambda c: c["facts"].update({"optimizer.group/0/lr": {"code": "exit()"}}),
        "is no value",
    ),
    "state of nothing": (
        lambda c: c["facts"].update({"optimizer.value/x/nobody": 1}),
        "belongs to no parameter",
    ),
    "step": (lambda c: c["facts"].update(step="2"), "no whole numbers"),
    "no step": (lambda c: c["facts"].pop("step"), "'step'"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_index(saved: Path, forgery: str) -> None:
    change, expected = FORGERIES[forgery]
    edit(saved, change)
    assert expected in refused(saved)


class Bomb:
    """What a pickle may do to whoever loads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_pickles_are_never_loaded(saved: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    bomb = pickle.dumps(Bomb(sprung))
    pickle.loads(bomb)
    assert sprung.exists()
    sprung.unlink()
    for name in (".metadata", "rank-00000.safetensors", INDEX):
        size = len((saved / name).read_bytes()) if (saved / name).exists() else 0
        (saved / name).write_bytes(bomb.ljust(size, b"\0"))
        if name != ".metadata":
            refused(saved)
        assert not sprung.exists()


def test_random_state_that_is_none(saved: Path) -> None:
    """Bytes of the right number, with the right checksum, that are no generator's."""
    data = saved / "rank-00000.safetensors"
    content = bytearray(data.read_bytes())
    stream = torch.get_rng_state().numel()

    def change(index: dict[str, Any]) -> None:
        index["tensors"]["random/0/cpu"]["chunks"][0][3] = zlib.crc32(b"\1" * stream)

    length = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + length])["random/0/cpu@0"]["data_offsets"]
    content[8 + length + start : 8 + length + end] = b"\1" * stream
    data.write_bytes(content)
    edit(saved, change)
    before = torch.get_rng_state()
    assert "its random state is none" in refused(saved)
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------- another model, another state


def program(change: Callable[[str], str], **options: Any) -> TrainingModule:
    source = HEADER + TENSOR + 'MESH = (("dp", 1), ("tp", 1))\nMICROBATCHES = 2\n'
    assert change(source) != source
    return TrainingModule(run_program(change(source)), **options)


def test_another_models_checkpoint(saved: Path) -> None:
    renamed = program(lambda s: s.replace('"unused", 3', '"spare", 3'))
    assert (
        "is another model's: it has unused, the program hasn't; it has no spare. Compile the model "
        "that it was saved from"
    ) in message(renamed.load_checkpoint, saved)
    deeper = program(lambda s: s.replace("range(2)", "range(3)"))
    assert "it has no layers.2.ln.weight; " in message(deeper.load_checkpoint, saved)
    assert "; and 1 more. Compile" in message(deeper.load_checkpoint, saved)
    longer = program(lambda s: s.replace('"unused", 3', '"unused", 4'))
    assert ("its unused is (3,) torch.float64, the program's is (4,) torch.float64") in message(
        longer.load_checkpoint, saved
    )
    single = program(
        lambda s: s.replace("dtype = 6, 8, 18, torch.float64", "dtype = 6, 8, 18, torch.float32")
    )
    assert "the program's is (3,) torch.float32" in message(single.load_checkpoint, saved)


def grouped(named: Any) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named]
    return torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])


def regrouped(named: Any) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named]
    return torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])


def test_another_optimizers_state(saved: Path, tmp_path: Path) -> None:
    other = one_process(optimizer=torch.optim.SGD)
    assert (
        "The checkpoint's optimizer is AdamW, this run's is SGD: make the same one, or go on "
        'without its state: drop_state=("optimizer",).'
    ) in message(other.load_checkpoint, saved)
    other.load_checkpoint(saved, drop_state=("optimizer",))
    assert other.steps == 2 and not other.optimizer.state
    assert other.optimizer.param_groups[0]["lr"] == 1e-3
    groups = one_process(optimizer=grouped)
    assert "has 1 parameter groups, this run's has 2" in message(groups.load_checkpoint, saved)
    groups.load_checkpoint(saved, drop_state=("optimizer", "random"))
    path = groups.save_checkpoint(tmp_path / "groups")
    text = message(one_process(optimizer=regrouped).load_checkpoint, path)
    assert "is in group 0 of the checkpoint's AdamW and in group 1 of this run's" in text
    frozen = program(
        lambda s: s.replace('"unused", 3, dtype=dtype', '"unused", 3, dtype=dtype, trainable=False')
    )
    text = message(frozen.load_checkpoint, saved)
    assert "unused is in group 0 of the checkpoint's AdamW and in no group of this run's" in text


def test_names_to_drop(saved: Path) -> None:
    text = message(one_process().load_checkpoint, saved, drop_state=("momentum",))
    assert "drop_state names momentum; this checkpoint has optimizer, random." in text
    text = message(one_process().load_checkpoint, saved, drop_state="optimizer")
    assert "drop_state takes several names: ('optimizer',)" in text


class Counting(torch.optim.SGD):
    """Keeps what no checkpoint can hold."""

    kept: Any = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        first = self.param_groups[0]["params"][0]
        self.state[self.kept if self.kept is not None else first]["what"] = object()


def test_state_that_a_checkpoint_cannot_hold(tmp_path: Path) -> None:
    parallel = loaded()
    parallel.optimizer = Counting(parallel.optimizer.param_groups[0]["params"], lr=0.1)
    parallel.train_step(batch())
    text = message(parallel.save_checkpoint, tmp_path)
    assert "the optimizer's what of wte.weight is a object; a checkpoint holds numbers" in text
    parallel.optimizer.state.clear()
    parallel.optimizer.kept = nn.Parameter(torch.zeros(1))
    parallel.train_step(batch())
    text = message(parallel.save_checkpoint, tmp_path)
    assert "Counting has state that belongs to no parameter of the model" in text
    assert not list(tmp_path.iterdir())


def factored(folder: Path) -> tuple[str, str]:
    """Adafactor keeps a row and a column for each matrix."""
    make = partial(torch.optim.Adafactor, lr=0.01)
    parallel = load("dp4 microbatches", optimizer=make)
    parallel.train_step(parallel.shard_batch(batch()))
    parallel.save_checkpoint(folder)
    before = whole(parallel)
    again = load("dp4 microbatches", optimizer=make)
    again.load_checkpoint(folder)
    assert not differences(whole(again), before) and any("row_var" in key for key in before.state)
    split = load("dp2 tp2", optimizer=make)
    loading = message(split.load_checkpoint, folder)
    split.train_step(split.shard_batch(batch()))
    saving = message(split.save_checkpoint, folder)
    for one in (parallel, again, split):
        one.close()
    return loading, saving


def test_optimizer_state_that_cannot_be_split(pool4: Pool, tmp_path: Path) -> None:
    for loading, saving in pool4.run(factored, tmp_path):
        assert "can't be split as this plan splits the parameter (" in loading
        assert "only state with one element for each of the parameter's" in saving
        assert f"Saving {tmp_path}/000002-step-00000001 failed on rank" in saving


# ---------------------------------------------------------------- state that strategies keep


def with_errors(name: str) -> TrainingModule:
    parallel = load(name)
    of = ("layers.0.mlp.gate_up.weight", "layers.1.ln.weight")
    keep_state(parallel.model, "errors", "P", ("dp",), of)
    keep_state(parallel.model, "means", "I", ("dp",), of)
    return parallel


def kept(folder: Path) -> list[str]:
    parallel = with_errors("dp4 microbatches")
    for one in parallel.model.kept_state.values():
        one.value.copy_(torch.arange(one.value.numel()).view(one.value.shape))
        if one.kind == "P":
            one.value.mul_(dist.get_rank() + 1)
    parallel.save_checkpoint(folder)
    again = with_errors("dp2 tp2")
    for one in again.model.kept_state.values():
        one.value.fill_(-1)
    again.load_checkpoint(folder)
    first = again.mesh["dp"].rank == 0
    for one in again.model.kept_state.values():
        (leaf,) = (leaf for leaf in again.leaves if leaf.name == one.parameter)
        whole_value = leaf.whole(again.mesh, one.value)
        expected = torch.arange(whole_value.numel()).view(whole_value.shape)
        factor = 1 if one.kind == "I" else 10 * first
        assert torch.equal(whole_value, (expected * factor).double()), one
    plain = load("dp4 zero")
    texts = [message(plain.load_checkpoint, folder)]
    texts.append(message(plain.load_checkpoint, folder, drop_state=("errors",)))
    plain.load_checkpoint(folder, drop_state=("errors", "means"))
    plain.save_checkpoint(folder)
    again.load_checkpoint(folder)
    assert not any(one.value.any() for one in again.model.kept_state.values())
    for running in (parallel, again, plain):
        running.close()
    return texts


def test_state_of_strategies(pool4: Pool, tmp_path: Path) -> None:
    """Shares of a sum are saved summed, for the first rank; unknown state is an error."""
    for both, one in pool4.run(kept, tmp_path):
        assert "has state that this plan doesn't know: 'errors', 'means'" in both
        assert "drop_state=('errors', 'means',)." in both and "'means' (of" in one


# ---------------------------------------------------------------- one rank fails


def one_rank_cannot_write(folder: Path) -> tuple[str, list[str], int]:
    parallel = load("dp2 tp2")
    parallel.save_checkpoint(folder)
    if dist.get_rank() == 2:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    parallel.train_step(parallel.shard_batch(batch()))
    text = message(parallel.save_checkpoint, folder)
    if dist.get_rank() == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()  # rank 0 removes what was written
    there = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    parallel.save_checkpoint(folder)
    again = load("dp4 zero")
    again.load_checkpoint(folder)
    parallel.close()
    again.close()
    return text, there, again.steps


def test_one_rank_cannot_write(pool4: Pool, tmp_path: Path) -> None:
    for text, there, steps in pool4.run(one_rank_cannot_write, tmp_path):
        assert f"Saving {tmp_path}/000002-step-00000001 failed on rank 2: OSError:" in text
        assert "File too large" in text and f"{tmp_path} is as it was before" in text
        assert there == ["000001-step-00000000"] and steps == 1


def one_rank_cannot_read(folder: Path) -> tuple[str, str]:
    parallel = load("dp2 tp2")
    path = parallel.save_checkpoint(folder)
    if dist.get_rank() == 0:
        data = bytearray((path / "rank-00001.safetensors").read_bytes())
        data[8 + int.from_bytes(data[:8], "little")] ^= 1  # the first byte after the header
        (path / "rank-00001.safetensors").write_bytes(data)
    dist.barrier()
    again = load("tp4")
    text = message(again.load_checkpoint, folder)
    then = message(again.train_step, again.shard_batch(batch()))
    parallel.close()
    again.close()
    return text, then


def test_one_rank_cannot_read(pool4: Pool, tmp_path: Path) -> None:
    for text, then in pool4.run(one_rank_cannot_read, tmp_path):
        assert f"Loading {tmp_path}/000001-step-00000000 failed on rank" in text
        assert "in rank-00001.safetensors has other bytes than were written" in text
        assert "there is no earlier one beside it" in text and "have no values yet" in then


def ranks_with_other_rates(folder: Path) -> str:
    parallel = load("dp4 zero")
    parallel.optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank() // 3)
    text = message(parallel.save_checkpoint, folder)
    parallel.close()
    return text


def test_ranks_with_other_learning_rates(pool4: Pool, tmp_path: Path) -> None:
    for text in pool4.run(ranks_with_other_rates, tmp_path):
        assert "rank 3 has optimizer.group/0/lr = 0.2 where an earlier rank has 0.1" in text

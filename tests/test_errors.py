"""Wrong use of compile and of what it returns: an AutoparError with numbers and the next step."""

import re
from typing import Any

import pytest
import torch
from clusters import cluster
from models import Job, classifier, gpt2
from pool import Pool

import autopar
from autopar import AutoparError, InfeasibleError


def planned(job: Job, spec: Any = None, **keywords: Any) -> autopar.Compiled:
    """A job compiled for four devices, or for `spec`."""
    where = cluster() if spec is None else spec
    return autopar.compile(job.model, where, job.batch, loss=job.loss, **keywords)


def message(job: Job, spec: Any = None, **keywords: Any) -> str:
    """The text of the AutoparError that compiling ends in."""
    with pytest.raises(AutoparError) as caught:
        planned(job, spec, **keywords)
    return str(caught.value)


def with_samples(job: Job, count: int) -> Job:
    """The job with the first samples of its batch."""
    return Job(job.model, {name: t[:count] for name, t in job.batch.items()}, job.loss)


# ---------------------------------------------------------------- batch and microbatches


def test_batch_is_not_divisible() -> None:
    six = with_samples(classifier(), 6)
    assert message(six, pin={"dp": 4}) == (
        "the batch of 6 samples isn't divisible by 4 (dp 4, 1 microbatches)"
    )
    assert planned(six).plan.axes["dp"] in (1, 2)
    text = message(with_samples(classifier(), 7), forbid=["tp"])
    assert text == "the batch of 7 samples isn't divisible by 4 (dp 4, 1 microbatches)"


def test_microbatches_do_not_divide_the_batch() -> None:
    text = message(classifier(), pin={"microbatches": 3})
    assert text.startswith("no mesh of 4 devices is legal:")
    assert "dp2 · tp2: the batch of 8 samples isn't divisible by 6 (dp 2, 3 microbatches)" in text
    assert "dp4: the batch of 8 samples isn't divisible by 12 (dp 4, 3 microbatches)" in text
    assert message(classifier(), pin={"dp": 4, "microbatches": 4}) == (
        "the batch of 8 samples isn't divisible by 16 (dp 4, 4 microbatches)"
    )


# ---------------------------------------------------------------- cluster and mesh


def test_unknown_preset() -> None:
    text = message(classifier(), "tpu:4")
    assert text.startswith("unknown preset 'tpu': known are ") and "cpu" in text


@pytest.mark.parametrize(
    ("pin", "named"), [({"dp": 3}, "dp = 3"), ({"dp": 4, "tp": 2}, "dp = 4, tp = 2")]
)
def test_axes_do_not_fill_the_devices(pin: dict[str, int], named: str) -> None:
    assert message(gpt2(), pin=pin) == (
        f"no mesh fills 4 devices with {named}: the product of the axes must be the number of "
        "devices"
    )


def test_world_is_not_the_plans() -> None:
    program = planned(classifier(), pin={"dp": 2, "tp": 2})
    with pytest.raises(AutoparError) as caught:
        program.materialize()
    assert str(caught.value) == (
        "The program is for 4 processes (dp2 · tp2), but 1 is running. Start it with: "
        "torchrun --nproc-per-node 4 your_script.py"
    )


def materialized_for_two() -> str:
    """A task for the pool of four: what materializing a plan for two says."""
    program = planned(classifier(), cluster(devices=2), pin={"dp": 2})
    with pytest.raises(AutoparError) as caught:
        program.materialize()
    return str(caught.value)


def test_world_is_larger_than_the_plans(pool4: Pool) -> None:
    """The same on every rank."""
    (text,) = set(pool4.run(materialized_for_two))
    assert text.startswith("The program is for 2 processes (dp2), but 4 are running.")
    assert "torchrun --nproc-per-node 2" in text


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("job", "limit"), [(classifier(), 5_000), (gpt2(), 200_000)], ids=["mlp", "gpt2"]
)
@pytest.mark.parametrize("pin", [{}, {"dp": 4, "zero": False}], ids=["free", "dp4"])
def test_nothing_fits(job: Job, limit: int, pin: dict[str, Any]) -> None:
    """Short by exactly the number that the error states. (The plan's own account may say a little
    less: the search adds up what recompute holds at different times.)"""
    with pytest.raises(InfeasibleError) as caught:
        planned(job, cluster(memory_bytes=limit), pin=pin)
    short = caught.value.short_bytes
    need = limit + short
    text = str(caught.value)
    assert text.startswith(f"nothing fits into {limit:,} bytes") and "Give more memory" in text
    assert f"needs {need:,} bytes" in text and f"short by {short:,} " in text

    fits = planned(job, cluster(memory_bytes=need), pin=pin)
    assert 0.95 * need <= fits.plan.predicted.memory_bytes <= need
    with pytest.raises(InfeasibleError) as caught:
        planned(job, cluster(memory_bytes=need - 1), pin=pin)
    assert caught.value.short_bytes == 1


def test_memory_fraction() -> None:
    text = message(classifier(), cluster(memory_bytes=10_000), memory_fraction=0.5)
    assert text.startswith("nothing fits into 5,000 bytes")
    for fraction in (0.0, 1.5, -1.0):
        assert message(classifier(), memory_fraction=fraction) == (
            f"memory_fraction must lie in (0, 1], not {fraction}"
        )


# ---------------------------------------------------------------- pins


@pytest.mark.parametrize(
    ("pin", "text"),
    [
        (
            {"dpp": 2},
            "pin: 'dpp' is neither an axis (cp, dp, ep, pp, tp), 'microbatches', 'schedule', "
            "'layers', nor a strategy (context, data, ",
        ),
        ({"zero": {"stages": 3}}, "pin 'zero': no option 'stages'; there are stage"),
        ({"zero": 7}, "zero has no stage 7: legal are "),
        ({"tensor": 3}, "pin 'tensor': takes True or False, not 3"),
        ({"dp": 0}, "pin 'dp': 0 is not a positive whole number"),
        ({"dp": True}, "pin 'dp': True is not a positive whole number"),
        ({"microbatches": 1.5}, "pin 'microbatches': 1.5 is not a positive whole number"),
        ({"layers": 3}, "pin 'layers' must map globs of module names to pins, not 3"),
        (
            {"layers": {"transformer.layers.*": {"zero": 3}}},
            "pin layers['transformer.layers.*'] names no module with ops of its own; there are, ",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_unknown_pin(pin: dict[str, Any], text: str) -> None:
    assert message(gpt2(), pin=pin).startswith(text)


def test_unknown_name_forbidden() -> None:
    assert message(gpt2(), forbid=["xp"]).startswith("forbid: 'xp' is neither an axis")
    assert message(gpt2(), pin={"tp": 2}, forbid=["tp"]) == (
        "axis 'tp' is forbidden and pinned to 2"
    )


def test_pin_that_is_legal_nowhere() -> None:
    """Each region's refusal is quoted."""
    text = message(gpt2(), pin={"tp": 4, "zero": 3})
    assert text.startswith("'zero' is pinned, but legal in no region on tp4: ")
    for region in ("stream", "vocab", "heads", "ffn"):
        assert f"region {region}: its batch isn't split, nothing is replicated" in text
    text = message(classifier(), pin={"tp": 2, "sequence": True})
    assert "region vocab has no sequence dim" in text


def test_layers_pin_that_is_legal_in_none_of_its_regions() -> None:
    """Though the strategy is legal elsewhere."""
    pin = {"tp": 4, "layers": {"*.mlp.act": {"sequence": True}}}
    assert message(gpt2(), pin=pin) == (
        "'sequence' is pinned, but legal in no region of layers['*.mlp.act'] on tp4: "
        "region ffn: its own dim may be split by tensor"
    )


def test_axis_that_nothing_can_use() -> None:
    text = message(gpt2(), pin={"tp": 4, "tensor": False, "sequence": False})
    assert text == (
        "no region can use the axis tp = 4: 'tensor', whose axis it is, is off. Lift that pin, or "
        "leave tp at 1"
    )


@pytest.mark.parametrize("off", [{}, {"zero": 3}, {"recompute": "full"}])
@pytest.mark.parametrize(
    ("axis", "name", "by_module"),
    [("cp", "context", False), ("dp", "data", False), ("cp", "context", True)],
)
def test_axis_whose_strategy_is_off(
    axis: str, name: str, by_module: bool, off: dict[str, Any]
) -> None:
    """That comes before what follows from it for others."""
    pin: dict[str, Any] = {axis: 4, **off}
    pin |= {"layers": {"*": {name: False}}} if by_module else {name: False}
    assert message(gpt2(), pin=pin) == (
        f"no region can use the axis {axis} = 4: {name!r}, whose axis it is, is off. Lift that "
        f"pin, or leave {axis} at 1"
    )


# ---------------------------------------------------------------- the model


def test_model_without_a_loss() -> None:
    job = classifier()
    assert message(Job(job.model, {"x": job.batch["x"]}, None)) == (
        "Classifier returns a tensor (8, 8) without a loss: pass loss=, a callable of (outputs, "
        "batch), or let the batch carry the labels that make the model return one"
    )
    without = Job(gpt2().model, {"input_ids": gpt2().batch["input_ids"]}, None)
    assert "without a loss: pass loss=" in message(without)


# ---------------------------------------------------------------- batches of a running program


@pytest.fixture(scope="module")
def running() -> autopar.TrainingModule:
    """GPT-2 on one device, in this process."""
    return planned(gpt2(), cluster(devices=1)).materialize()


def wrong_batches() -> dict[str, tuple[Any, str]]:
    """What train_step gets, and how its error begins."""
    batch = gpt2().batch
    ids, labels = batch["input_ids"], batch["labels"]
    takes = "the program takes 2: input_ids, labels; given: "
    return {
        "fewer samples": (
            {"input_ids": ids[:4], "labels": labels[:4]},
            "Input 'input_ids' has shape (4, 16) and dtype torch.int64; expected (8, 16) and "
            "torch.int64 (this rank's share, 1/1 of (8, 16) on dim 0). A program is for one batch "
            "size: compile again for another.",
        ),
        "another dtype": (
            {"input_ids": ids, "labels": labels.float()},
            "Input 'labels' has shape (8, 16) and dtype torch.float32; expected (8, 16) and "
            "torch.int64",
        ),
        "one missing": ({"input_ids": ids}, f"The batch has 1 tensors, {takes}input_ids."),
        "one more": (
            {**batch, "mask": torch.ones(8, 16)},
            f"The batch has 3 tensors, {takes}input_ids, labels, mask.",
        ),
        "another name": (
            {"targets": labels, "input_ids": ids},
            f"The batch has 2 tensors, {takes}targets, input_ids.",
        ),
        "a list for a tensor": (
            {"input_ids": ids.tolist(), "labels": labels},
            f"The batch has 1 tensors, {takes}labels.",
        ),
        "nothing": (None, f"The batch has 0 tensors, {takes}none."),
    }


@pytest.mark.parametrize("wrong", wrong_batches().values(), ids=wrong_batches().keys())
def test_wrong_batch(running: autopar.TrainingModule, wrong: tuple[Any, str]) -> None:
    batch, text = wrong
    with pytest.raises(AutoparError, match=re.escape(text)):
        running.train_step(batch)


def test_order_of_a_dict_is_free(running: autopar.TrainingModule) -> None:
    batch = gpt2().batch
    turned = dict(reversed(batch.items()))
    assert list(turned) != list(batch)
    assert running.evaluate(turned) == running.evaluate(batch)
    with pytest.raises(autopar.AutoparError, match="Pass the same structure"):
        running.evaluate((batch["input_ids"], batch["labels"]))


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"pin": "dp"}, "pin must be a mapping such as"),
        ({"pin": {"layers": {"net.*": ["zero"]}}}, 'pin "layers" maps globs to mappings'),
        ({"forbid": "tp"}, "forbid must be a list of names"),
        ({"forbid": 3}, "forbid must be a list of names"),
        ({"forbid": [["tp"]]}, "forbid must be a list of names"),
        ({"clip_norm": -1.0}, "clip_norm must be above 0"),
        ({"clip_norm": "1"}, r"clip_norm must be above 0 .*, not '1'"),
        ({"gap": -1.0}, r"gap must lie in \[0, 1\)"),
        ({"gap": "x"}, r"gap must lie in \[0, 1\), not 'x'"),
        ({"gap": None}, r"gap must lie in \[0, 1\), not None"),
        ({"memory_fraction": True}, r"memory_fraction must lie in \(0, 1\], not True"),
        ({"memory_fraction": [1]}, r"memory_fraction must lie in \(0, 1\], not \[1\]"),
        ({"time_limit_s": True}, r"time_limit_s must be seconds, 0 or more, or None, not True"),
        ({"solver": "gurobi"}, r"no solver is called 'gurobi': choose \"highs\" or \"cbc\""),
        ({"time_limit_s": "5"}, r"time_limit_s must be seconds, 0 or more, or None, not '5'"),
        ({"time_limit_s": -1}, r"time_limit_s must be seconds"),
        ({"time_limit_s": float("nan")}, r"time_limit_s must be seconds"),
        ({"memory_fraction": 0.0}, r"memory_fraction must lie in \(0, 1\]"),
    ],
)
def test_wrong_keywords(keywords: dict[str, Any], text: str) -> None:
    job = classifier()
    with pytest.raises(autopar.AutoparError, match=text):
        autopar.compile(job.model, "cpu:4", job.batch, loss=job.loss, **keywords)


def test_a_model_is_a_module() -> None:
    with pytest.raises(autopar.AutoparError, match="model must be a"):
        autopar.compile("gpt2", "cpu:4", {})  # type: ignore[arg-type]

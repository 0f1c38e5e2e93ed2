"""Ops without a factor rule: replicated, but split by samples where a probe allows it."""

import warnings

import pytest
import torch
from equality import Comparison, compiled, run
from models import Job, float32_raised
from opaque_models import OPAQUE, job
from pool import Pool
from test_equality import check
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.capture.probe import Dependent, Independent, probe


def compare(name: str, case: str) -> Comparison:
    """A task for the pool."""
    with float32_raised(), warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.OpaqueWarning)
        made = OPAQUE[name]()
        return run(made, compiled(made, case))


@pytest.mark.parametrize(
    ("model", "case"),
    [
        ("ops", "dp4"),
        ("ops", "dp2_tp2"),
        ("ops", "dp4_microbatches2"),
        ("ops", "zero3_tp2"),
        ("fourier", "dp2_tp2"),
        ("distances", "dp4"),
    ],
)
def test_equality(pool4: Pool, model: str, case: str) -> None:
    """The ops run on a rank's samples, under tp whole on every rank; those that mix samples run on
    all of them."""
    check(pool4.run(compare, model, case))


def test_plan_and_warning_name_op_and_line() -> None:
    pattern = (
        r"(?s)Solver \(layers\.0\): aten\.cdist\.default at opaque_models\.py:\d+: no factor rule"
    )
    with pytest.warns(autopar.OpaqueWarning, match=pattern):
        program = compiled(OPAQUE["ops"](), "dp2_tp2")
    named = " ".join(program.plan.opaque)
    assert "aten.linalg_solve.default at opaque_models.py:" in named
    assert any("linalg_solve" in text and "priced by" in text for text in program.plan.assumptions)
    assert "Opaque: Solver (layers.0): aten.cdist" in program.plan.summary()
    assert "torch.ops.aten.linalg_solve.default(" in program.source


def test_op_that_mixes_samples_is_refused() -> None:
    """With its reason, where the batch has to be split."""
    with pytest.raises(autopar.AutoparError) as caught:
        compiled(OPAQUE["distances"](), "dp4_microbatches2")
    assert "aten.cdist.default at opaque_models.py:" in str(caught.value)


@torch.library.custom_op("autopar_tests::secret", mutates_args=())
def secret(x: Tensor) -> Tensor:
    """An op that only its author knows."""
    return x.sin()


@secret.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Secret(nn.Module):
    """A layer with that op."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, sequence, 12]."""
        result: Tensor = self.linear(x) + secret(x.detach())
        return result


def test_op_without_price_is_an_error() -> None:
    pattern = (
        r"op autopar_tests\.secret\.default \(secret.*, in Secret\) at test_opaque_ops\.py:\d+ has "
        r"no price.*register_flop_formula"
    )
    with pytest.raises(autopar.AutoparError, match=pattern):
        compiled(job(Secret(), Secret()), "dp4")


class Once(nn.Module):
    """One op on x [batch, 6]."""

    def __init__(self, op: object) -> None:
        super().__init__()
        self.op, self.scale = op, nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        result: Tensor = self.op(x * self.scale).sum()  # type: ignore[operator]
        return result


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (lambda x: torch.fft.rfft(x).abs(), ""),
        (lambda x: x.cumsum(1), ""),
        (lambda x: x.roll(2, 1), ""),
        (lambda x: torch.kron(x, torch.ones(1, 2)), ""),
        (lambda x: x.cumsum(0), "depends on other samples"),
        (lambda x: x.roll(2, 0), "depends on other samples"),
        (lambda x: x.roll(8, 0), "depends on other samples"),
        (lambda x: x.flip(0), "depends on other samples"),
        (lambda x: torch.cdist(x, x), "no dim that follows"),
        (lambda x: torch.rrelu(x, training=True), "draws random numbers"),
    ],
)
def test_probe(op: object, why: str) -> None:
    """Only what is independent in every draw is split. Eight samples: roll(8, 0) would be the
    identity on all of them, and on two or four."""
    captured = capture(Once(op), {"x": torch.randn(8, 6)})
    graph = captured.skeleton.graph
    names = ("cumsum", "fft_rfft", "roll", "flip", "cdist", "kron", "rrelu")
    node = next(n for n in graph.nodes if any(f"aten.{name}." in str(n.target) for name in names))
    (source,) = [n for n in node.all_input_nodes if n.meta["val"].shape[0] == 8 or why]
    found = probe(node, {source: (0, 1)})
    if why:
        assert isinstance(found, Dependent) and why in found.why, found
    else:
        assert found == Independent(((0, 1),))


def test_batch_with_a_literal_size_is_whole() -> None:
    """An op that was captured with the number of samples in its arguments runs on all of them."""
    made = Job(Once(lambda x: x.unfold(0, 8, 1)).double(), {"x": torch.randn(8, 6).double()}, None)
    with pytest.warns(autopar.OpaqueWarning, match=r"aten\.unfold\.default at test_opaque_ops"):
        program = compiled(made, "dp4")
    assert "# ---- mixing: nothing is split" in program.source

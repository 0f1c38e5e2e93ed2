"""Dropout on several ranks: one mask where a tensor is whole, different ones where it is split."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from equality import compiled
from models import Job, float32_raised, gpt2
from pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.capture import reference_loss
from autopar.runtime import ProcessMesh, masks_apart

RATE = 0.25
Masks = list[tuple[str, Tensor]]
"""What was kept in each call, in order: of "stream" tensors and of "attention" weights."""


# ---------------------------------------------------------------- what is dropped


@contextmanager
def replaced(dropout: Callable[..., Tensor], attention: Callable[..., Tensor]) -> Iterator[None]:
    """Other functions for dropout and attention in this process."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "dropout", dropout))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
        yield


@contextmanager
def recorded(masks: Masks) -> Iterator[None]:
    """The masks of all calls inside go into a list."""
    plain_dropout, plain_attention = F.dropout, F.scaled_dot_product_attention

    def dropout(x: Tensor, p: float, training: bool) -> Tensor:
        y = plain_dropout(x, p, training)
        masks.append(("stream", y != 0))
        return y

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        state = torch.get_rng_state()
        eye = torch.eye(k.shape[-2], dtype=v.dtype).expand(*v.shape[:2], -1, -1)
        masks.append(("attention", plain_attention(q, k, eye, **options) != 0))
        torch.set_rng_state(state)
        return plain_attention(q, k, v, **options)

    with replaced(dropout, attention):
        yield


@contextmanager
def given(masks: Masks) -> Iterator[None]:
    """All calls inside drop by these masks."""
    rest = iter(masks)

    def dropout(x: Tensor, p: float, training: bool = True, inplace: bool = False) -> Tensor:
        kind, mask = next(rest)
        assert kind == "stream" and p == RATE
        return x * mask / (1 - p)

    def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, **_: Any) -> Tensor:
        kind, mask = next(rest)
        assert kind == "attention" and dropout_p == RATE
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return (weights * mask / (1 - dropout_p)) @ v

    with replaced(dropout, attention):
        yield
    assert not list(rest)


# ---------------------------------------------------------------- whole models


def job() -> Job:
    """GPT-2 that drops a quarter everywhere."""
    return gpt2(dropout=RATE)


def trained(case: str) -> tuple[float, dict[str, Tensor], Masks]:
    """A task for the pool: loss, gradients and this rank's masks of one step."""
    masks: Masks = []
    with float32_raised():
        parallel = compiled(job(), case).materialize()
        local = parallel.shard_batch(job().batch)
        with recorded(masks):
            loss = parallel.forward_backward(local)
        gradients = parallel.full_gradients()
        parallel.close()
    return float(loss), gradients, masks


def whole(ranks: list[Masks], call: int, sequence: bool) -> Tensor:
    """A call's mask of the whole tensor, from those of (dp 0, tp 0), (dp 0, tp 1), (dp 1, tp 0)…"""
    kind = ranks[0][call][0]
    parts = [masks[call][1] for masks in ranks]
    if kind == "stream" and not sequence:
        assert torch.equal(parts[0], parts[1]) and torch.equal(parts[2], parts[3])
        samples = [parts[0], parts[2]]
    else:
        samples = [torch.cat(parts[i : i + 2], dim=1) for i in (0, 2)]
    return torch.cat(samples)


@pytest.mark.parametrize("case", ["dp2_tp2", "dp2_tp2_sequence"])
def test_masks_follow_from_the_split(pool4: Pool, case: str) -> None:
    """Masks are one where a tensor is whole, independent where it is split, and the plain model
    with the same masks has the same loss and gradients."""
    results = pool4.run(trained, case)
    ranks = [masks for _, _, masks in results]
    calls = [(kind, whole(ranks, i, "sequence" in case)) for i, (kind, _) in enumerate(ranks[0])]
    assert [kind for kind, _ in calls] == ["stream", *["attention", "stream", "stream"] * 2]
    for kind, mask in calls:
        check_random(kind, mask)
    for (_, one), (_, other) in itertools.combinations([c for c in calls if c[0] == "stream"], 2):
        check_independent(one, other)
    with float32_raised(), given(calls):
        plain = job()
        expected = reference_loss(plain.model, plain.batch, None)
        expected.backward()
    for loss, gradients, _ in results:
        assert abs(loss - expected.item()) <= 1e-9 * abs(expected.item())
        for name, parameter in plain.model.named_parameters():
            assert parameter.grad is not None
            error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert error <= 1e-9, name


def check_random(kind: str, mask: Tensor) -> None:
    """A share of 1 - RATE is kept, and halves of the tensor along samples, and along sequence or
    heads, don't have the same mask."""
    seen = torch.ones(mask.shape[-2:], dtype=torch.bool)
    seen = (seen.tril() if kind == "attention" else seen).expand(mask.shape)
    count = int(seen.sum())
    kept = float(mask[seen].double().mean())
    assert abs(kept - (1 - RATE)) <= 4 * math.sqrt(RATE * (1 - RATE) / count), (kind, kept)
    for dim in (0, 1):
        one, other = mask.chunk(2, dim)
        both = seen.chunk(2, dim)[0]
        check_independent(one[both], other[both])


def check_independent(one: Tensor, other: Tensor) -> None:
    """Two masks agree as often as chance has it."""
    chance = RATE**2 + (1 - RATE) ** 2
    agreed = float((one == other).double().mean())
    assert abs(agreed - chance) <= 5 * math.sqrt(chance * (1 - chance) / one.numel()), agreed


# ---------------------------------------------------------------- feature maps


class Maps(nn.Module):
    """Drops feature maps between two convolutions, and elements of SELU's kind after."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)
        self.drop, self.alpha = nn.Dropout2d(RATE), nn.AlphaDropout(RATE)

    def forward(self, x: Tensor) -> Tensor:
        """The mean of squares, a 0-d tensor."""
        y: Tensor = self.down(F.selu(self.drop(self.up(x))))
        z: Tensor = self.alpha(y)
        return z.square().mean()


def dropped_maps() -> Tensor:
    """A task for the pool: which feature maps this rank kept, [samples, channels]."""
    torch.manual_seed(2)
    one = Job(Maps().double(), {"x": torch.randn(32, 3, 4, 4, dtype=torch.float64)}, None)
    parallel = compiled(one, "dp2_tp2").materialize()
    plain, seen = torch.feature_dropout, []

    def dropout(x: Tensor, p: float, training: bool) -> Tensor:
        y = plain(x, p, training)
        seen.append(y)
        return y

    with mock.patch.object(torch, "feature_dropout", dropout):
        parallel.train_step(parallel.shard_batch(one.batch))
    parallel.close()
    (y,) = seen
    kept = (y != 0).flatten(2)
    assert torch.equal(kept.all(2), kept.any(2)) and kept.shape == (16, 8, 16)
    return kept.all(2)


def test_feature_maps(pool4: Pool) -> None:
    """Whole maps are dropped, on each rank others: of its samples and channels."""
    masks = pool4.run(dropped_maps)
    kept = float(torch.stack(masks).double().mean())
    assert abs(kept - (1 - RATE)) <= 4 * math.sqrt(RATE * (1 - RATE) / 512)
    for one, other in itertools.combinations(masks, 2):
        check_independent(one, other)


# ---------------------------------------------------------------- the function


def drawn() -> dict[str, Tensor]:
    """A task for the pool: what ranks of dp 2, tp 2 draw."""
    mesh = ProcessMesh((("dp", 2), ("tp", 2)))
    torch.manual_seed(11)
    found = {"before": torch.rand(4)}
    for axes in (("tp",), ("dp",), ("dp", "tp")):
        with masks_apart(mesh, *axes, training=True):
            found[" ".join(axes)] = torch.rand(4)
    found["after"] = torch.rand(4)
    state = torch.get_rng_state()
    with masks_apart(mesh, "tp", training=False):
        pass
    assert torch.equal(torch.get_rng_state(), state)

    def layer(x: Tensor) -> Tensor:
        with masks_apart(mesh, "tp", training=True):
            return F.dropout(x * x, 0.5)

    x = torch.full((64,), 2.0, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False)
    assert isinstance(y, Tensor)
    y.sum().backward()
    assert x.grad is not None
    # 2 x · mask / keep, of the mask of the second run, is x² · mask / keep of the first at x = 2.
    assert torch.equal(x.grad, y.detach())
    mesh.close()
    return found


def test_ranks_draw_apart_along_the_axes_named(pool4: Pool) -> None:
    """And alike along others; what all draw afterwards is the same; layers run again draw again
    what they drew."""
    ranks = pool4.run(drawn)
    alike = {
        name: {
            (i, j)
            for i, j in itertools.combinations(range(4), 2)
            if torch.equal(ranks[i][name], ranks[j][name])
        }
        for name in ranks[0]
    }
    every = set(itertools.combinations(range(4), 2))
    assert alike == {
        "before": every,
        "tp": {(0, 2), (1, 3)},
        "dp": {(0, 1), (2, 3)},
        "dp tp": set(),
        "after": every,
    }
    assert not torch.equal(ranks[0]["tp"], ranks[0]["before"])


# ---------------------------------------------------------------- what can't be


class OneMask(nn.Module):
    """Drops of a table of positions, the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.out = nn.Parameter(torch.randn(6, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The mean of squares, a 0-d tensor."""
        y: Tensor = self.out(x + F.dropout(self.places, 0.1, self.training))
        return y.square().mean()


class OfPairs(nn.Module):
    """Drops of the products of all pairs of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The mean of squares, a 0-d tensor."""
        y = self.out(x)
        return F.dropout(y @ y.t(), 0.1, self.training).square().mean()


@pytest.mark.parametrize(
    ("model", "shape", "text"),
    [
        (OneMask(), (8, 6, 8), "masks for dropout of p_places in OneMask, which is the same for"),
        (OfPairs(), (8, 8), "a region (mixing of OfPairs) has dropout and runs on the whole batch"),
    ],
)
def test_data_ranks_can_not_share_a_mask(
    model: nn.Module, shape: tuple[int, ...], text: str
) -> None:
    """What they all hold can't be dropped from: their streams differ."""
    batch = {"x": torch.randn(shape)}
    with pytest.raises(autopar.AutoparError) as error:
        autopar.compile(model, "cpu:4", batch, pin={"dp": 4})
    assert text in str(error.value)

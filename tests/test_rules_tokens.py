"""Rules for sorting, choosing and counting tokens, told true: what they free gives the same in
halves, and what they refuse would not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 (its operator)
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.graph.analyse import analyse

TOKENS, HIDDEN, EXPERTS, K = 16, 4, 4, 2
Function = Callable[[Tensor, Tensor], Tensor]


def ids_of(x: Tensor) -> Tensor:
    """Some expert for each token and choice."""
    chosen: Tensor = x[:, :EXPERTS].topk(K, dim=-1)[1]
    return chosen.reshape(-1)


def sorted_and_back(x: Tensor, w: Tensor) -> Tensor:
    """Rows sorted by expert, each times its expert's row, and put back by the inverse."""
    ids, order = torch.sort(ids_of(x))
    rows = x[order // K] * w[ids]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0))
    return rows[inverse].view(-1, K, HIDDEN).sum(1)


def back_by_argsort(x: Tensor, w: Tensor) -> Tensor:
    """The same with argsorts."""
    ids = ids_of(x)
    order = torch.argsort(ids)
    return (x[order // K] * w[ids[order]])[torch.argsort(order)].view(-1, K, HIDDEN).sum(1)


def back_by_index_add(x: Tensor, w: Tensor) -> Tensor:
    """The same, combined by adding where the positions point."""
    ids, order = torch.sort(ids_of(x))
    rows = x[order // K] * w[ids]
    return torch.zeros_like(x).index_add(0, order // K, rows)


def by_gather(x: Tensor, w: Tensor) -> Tensor:
    """Scores of the experts chosen, repeated tokens."""
    chosen = x.topk(K, dim=-1)[1]
    weights = torch.gather(x, 1, chosen).reshape(-1, 1)
    rows = x.repeat_interleave(K, dim=0) * w[chosen.reshape(-1)] * weights
    return rows.view(-1, K, HIDDEN).sum(1)


def by_groups(x: Tensor, w: Tensor) -> Tensor:
    """Groups chosen first: a mask scattered."""
    scores = x.view(-1, 2, 2).sum(-1)
    mask = (
        torch.zeros_like(scores)
        .scatter(1, scores.topk(1, dim=-1)[1], 1)
        .unsqueeze(-1)
        .expand(-1, 2, 2)
    )
    return x.masked_fill(mask.reshape(-1, 4) == 0, 0.0) * w[0]


def grouped(x: Tensor, w: Tensor) -> Tensor:
    """Grouped matmuls over sorted rows, offsets counted from the same ids."""
    ids, order = torch.sort(ids_of(x))
    counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    matrices = w.unsqueeze(1) * w.unsqueeze(2)
    rows = torch.ops.transformers.grouped_mm_fallback(x[order // K], matrices, ends)
    out: Tensor = rows[torch.argsort(order)].view(-1, K, HIDDEN).sum(1)
    return out


FREE: list[Function] = [
    sorted_and_back,
    back_by_argsort,
    back_by_index_add,
    by_gather,
    by_groups,
    grouped,
]


def left_sorted(x: Tensor, w: Tensor) -> Tensor:
    """Sorted rows beside unsorted ones: which meet depends on all tokens."""
    return x + x[torch.argsort(x[:, 0])]


def first_sorted(x: Tensor, w: Tensor) -> Tensor:
    """Half of the sorted rows, whatever is in them."""
    half = x[torch.argsort(x[:, 0])][: x.shape[0] // 2]
    return torch.cat([half, half])


def running(x: Tensor, w: Tensor) -> Tensor:
    """A running sum over tokens."""
    return x.cumsum(0)


def another_row(x: Tensor, w: Tensor) -> Tensor:
    """Rows picked by an index that has nothing to do with where they are."""
    return x[x.argmax(-1)]


def inverse_of_others(x: Tensor, w: Tensor) -> Tensor:
    """Put back by the inverse of another order."""
    rows = x[torch.argsort(x[:, 0])]
    return rows[torch.argsort(torch.argsort(x[:, 1]))]


def other_counts(x: Tensor, w: Tensor) -> Tensor:
    """Groups that are not the counts of the ids that the rows are sorted by."""
    _, order = torch.sort(ids_of(x))
    others = ids_of(x.flip(1))
    counts = torch.histc(others.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    matrices = w.unsqueeze(1) * w.unsqueeze(2)
    rows = torch.ops.transformers.grouped_mm_fallback(x[order // K], matrices, ends)
    out: Tensor = rows[torch.argsort(order)].view(-1, K, HIDDEN).sum(1)
    return out


def falling_counts(x: Tensor, w: Tensor) -> Tensor:
    """Rows sorted downwards, groups counted upwards."""
    ids, order = torch.sort(ids_of(x), descending=True)
    counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    matrices = w.unsqueeze(1) * w.unsqueeze(2)
    rows = torch.ops.transformers.grouped_mm_fallback(x[order // K], matrices, ends)
    out: Tensor = rows[torch.argsort(order)].view(-1, K, HIDDEN).sum(1)
    return out


def shared_counts(x: Tensor, w: Tensor) -> Tensor:
    """Every token sees how many chose each expert."""
    return x * torch.histc(ids_of(x).float(), bins=EXPERTS, min=0, max=EXPERTS - 1)


REFUSED: list[Function] = [
    left_sorted,
    first_sorted,
    running,
    another_row,
    inverse_of_others,
    other_counts,
    falling_counts,
    shared_counts,
]


class Wrapped(nn.Module):
    """A function of scaled tokens."""

    def __init__(self, function: Function, w: Tensor) -> None:
        super().__init__()
        self.function = function
        self.scale, self.w = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(w)

    def forward(self, x: Tensor) -> Tensor:
        """The function."""
        return self.function(x * self.scale, self.w)


def squares(outputs: Tensor, batch: Any) -> Tensor:
    """A loss."""
    return outputs.pow(2).sum()


def why_whole(function: Function, x: Tensor, w: Tensor) -> list[str]:
    """Why the tokens can't be split, as the rules say; nothing where they can."""
    model = analyse(capture(Wrapped(function, w), {"x": x}, squares))
    assert not model.skeleton.opaque or function in REFUSED, model.skeleton.opaque
    dims = [region.dim("batch") for region in model.skeleton.regions]
    return [*model.mixing, *(dim.blocked for dim in dims if dim is not None and dim.blocked)]


def halves(function: Function, x: Tensor, w: Tensor) -> Tensor:
    """The function of each half of the tokens."""
    return torch.cat([function(half.clone(), w) for half in x.chunk(2)])


def example() -> tuple[Tensor, Tensor]:
    """Tokens and experts' rows."""
    torch.manual_seed(5)
    return torch.randn(TOKENS, HIDDEN), torch.randn(EXPERTS, HIDDEN)


@pytest.mark.parametrize("function", FREE, ids=lambda f: f.__name__)
def test_what_is_free_gives_the_same_in_halves(function: Function) -> None:
    """Each rank does with its tokens what one device does with all."""
    x, w = example()
    assert why_whole(function, x, w) == []
    torch.testing.assert_close(halves(function, x, w), function(x, w))


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_what_is_refused_would_not(function: Function) -> None:
    """The rules say why, and running it in halves anyway is wrong."""
    x, w = example()
    assert why_whole(function, x, w)
    assert (halves(function, x, w) - function(x, w)).abs().max() > 1e-3


class SortedLayers(nn.Module):
    """Layers that get tokens in an order of their values."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(2)]
        self.layers = nn.ModuleList(pairs)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] → 0-d."""
        x = x[x.sum(-1).argsort()]
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_a_sorted_dim_that_enters_a_layer_is_an_error_with_the_line() -> None:
    """Only the run knows its order, and a layer is read apart."""
    captured = capture(SortedLayers(), {"x": torch.randn(TOKENS, HIDDEN)})
    where = r"the call of layers\.0 with index \(test_rules_tokens\.py:\d+\): only the run knows"
    with pytest.raises(autopar.AutoparError, match=where):
        analyse(captured)

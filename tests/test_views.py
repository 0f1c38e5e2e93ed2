"""Which shapes a tensor can be seen in without a copy, against torch's own answer."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.layouts.views import is_view


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Parts of tensors, permuted and expanded."""
    shape = draw(st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=5))
    more = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    x = torch.empty([n + extra for n, extra in zip(shape, more, strict=True)], device="meta")
    for dim, length in enumerate(shape):
        x = x.narrow(dim, 0, length)
    x = x.permute(draw(st.permutations(range(len(shape)))))
    return x.expand([draw(st.sampled_from((1, 2))) if n == 1 else n for n in x.shape])


@st.composite
def shapes(draw: st.DrawFn, numel: int) -> list[int]:
    """A shape of so many elements."""
    out: list[int] = []
    while numel > 1 and len(out) < 5:
        out.append(draw(st.sampled_from([n for n in range(1, numel + 1) if numel % n == 0])))
        numel //= out[-1]
    return [*out, numel]


@given(st.data())
def test_a_view_is_what_torch_calls_one(data: st.DataObject) -> None:
    x = data.draw(tensors())
    out = data.draw(shapes(math.prod(x.shape)))
    try:
        x.view(out)
        possible = True
    except RuntimeError:
        possible = False
    assert is_view(x.shape, x.stride(), out) == possible

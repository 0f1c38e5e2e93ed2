"""Whether an op without a rule treats the samples of a batch one by one: found out by running it.

The op is run on small random tensors, whole and in two pieces along the batch. Only if every
output of the whole is the pieces' outputs one after the other, in every draw and for several
numbers of samples, are the samples independent. Numbers of samples without a common divisor: a
roll by two samples is the identity on two.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor

from autopar.capture.functional import mutates
from autopar.capture.opaque_code import Place, code_of
from autopar.runtime.samples import same

PIECES = ((1, 1), (2, 3), (3, 4))
"""Samples in the two pieces of each draw."""
MAX_ELEMENTS = 2**20
"""Of one tensor; other dims of larger ones are shrunk, equal sizes to equal sizes."""
SEED = 7


@dataclass(frozen=True)
class Independent:
    """The samples are independent: where the batch lies in each output."""

    outputs: tuple[Place, ...]


@dataclass(frozen=True)
class Dependent:
    """They aren't, or that can't be found out; `why` says what "it" does."""

    why: str


class _UnusableError(Exception):
    """A draw that says nothing."""


Sizes = Callable[[int], int]


def probe(node: torch.fx.Node, places: Mapping[torch.fx.Node, Place]) -> Independent | Dependent:
    """Runs the op of a node whose inputs have the batch at `places` (others don't have it)."""
    if _draws_random(node):
        return Dependent("it draws random numbers")
    if mutates(node):
        return Dependent("it writes to its input")
    problems: dict[str, None] = {}
    found: Independent | None = None
    for kind in ("normal", "positive", "definite"):
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(SEED)
                answer = _draws(node, places, kind)
        except _UnusableError as error:
            problems[str(error)] = None
            continue
        if isinstance(answer, Dependent):
            return answer
        found = answer
    if found is None:
        return Dependent(f"it can't be tried on small tensors ({next(iter(problems))})")
    return found


def draws_for_all(node: torch.fx.Node) -> bool:
    """Whether an opaque op, or a layer's own code, draws random numbers for all samples together:
    on ranks that should do the same they would be different ones."""
    code = code_of(node)
    return _draws_random(node) if code is None else bool(code.random and code.mixing)


def _draws_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _draws(
    node: torch.fx.Node, places: Mapping[torch.fx.Node, Place], kind: str
) -> Independent | Dependent:
    sizes = _shrink(node, places)
    counts, wholes, halves = [], [], []
    for first, second in PIECES:
        count = first + second
        given = {n: _draw(n, count, places.get(n), sizes, kind) for n in node.all_input_nodes}
        counts.append(count)
        wholes.append(_run(node, given))
        cuts: list[dict[torch.fx.Node, Tensor]] = [{}, {}]
        for n, tensor in given.items():
            dim, rest = places.get(n, (0, 1))
            sections = [first * sizes(rest), second * sizes(rest)]
            both = tensor.split(sections, dim) if n in places else (tensor, tensor)
            cuts[0][n], cuts[1][n] = both
        halves.append([_run(node, cut) for cut in cuts])
    outputs = []
    for index in range(len(wholes[0])):
        place = _place([tuple(whole[index].shape) for whole in wholes], counts)
        if place is None:
            return Dependent("what it returns has no dim that follows the number of samples")
        for whole, parts in zip(wholes, halves, strict=True):
            if not same(whole[index], [part[index] for part in parts], place[0]):
                return Dependent("what it returns for a sample depends on other samples")
        outputs.append(place)
    return Independent(tuple(outputs))


def _shrink(node: torch.fx.Node, places: Mapping[torch.fx.Node, Place]) -> Sizes:
    """The size to use for each size of a dim (the batch apart): itself where tensors are small."""
    lengths: set[int] = set()
    largest = 0
    for n in node.all_input_nodes:
        dim, rest = places.get(n, (None, 1))
        others = [int(s) for i, s in enumerate(n.meta["val"].shape) if i != dim] + [rest]
        lengths |= set(others)
        largest = max(largest, math.prod(others) * sum(PIECES[-1]))
    if largest <= MAX_ELEMENTS:
        return lambda length: length
    small = {length: 4 + i for i, length in enumerate(sorted(x for x in lengths if x > 4))}
    return lambda length: small.get(length, length)


def _draw(
    node: torch.fx.Node, samples: int, place: Place | None, sizes: Sizes, kind: str
) -> Tensor:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        raise _UnusableError(f"its input {node.name} is no tensor")
    dim, rest = place if place is not None else (None, 1)
    shape = [
        samples * sizes(rest) if i == dim else sizes(int(length))
        for i, length in enumerate(value.shape)
    ]
    if not (value.is_floating_point() or value.is_complex()):
        return torch.randint(0, 2, shape).to(value.dtype)
    wide = torch.complex128 if value.is_complex() else torch.float64
    if kind == "positive":
        return torch.rand(shape, dtype=torch.float64).mul(0.8).add(0.1).to(wide)
    drawn = torch.randn(shape, dtype=wide)
    if kind == "definite":
        square = (
            len(shape) >= 2 and shape[-1] == shape[-2] and (dim is None or dim < len(shape) - 2)
        )
        return drawn @ drawn.mH + torch.eye(shape[-1], dtype=wide) if square else drawn
    if dim is not None:  # samples of different means
        spread = [length if i == dim else 1 for i, length in enumerate(shape)]
        drawn = drawn + 3 * torch.randn(spread, dtype=torch.float64)
    return drawn


def _run(node: torch.fx.Node, given: Mapping[torch.fx.Node, Tensor]) -> list[Tensor]:
    """The op's outputs, its literal arguments as they are."""
    args: Any = torch.fx.map_arg(node.args, lambda n: given[n])
    kwargs: Any = torch.fx.map_arg(node.kwargs, lambda n: given[n])
    try:
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:  # any op, any message: it becomes the reason
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _UnusableError(lines[0]) from error
    outputs = list(result) if isinstance(result, (list, tuple)) else [result]
    if not all(isinstance(output, Tensor) for output in outputs):
        raise _UnusableError("it doesn't return tensors")
    if not all(bool(torch.isfinite(output).all()) for output in outputs):
        raise _UnusableError("its results aren't finite")
    return outputs


def _place(shapes: Sequence[tuple[int, ...]], counts: Sequence[int]) -> Place | None:
    """The one dim that follows the counts, and how much of it belongs to a sample."""
    if len({len(shape) for shape in shapes}) != 1:
        return None
    moving = [i for i, lengths in enumerate(zip(*shapes, strict=True)) if len(set(lengths)) > 1]
    if len(moving) != 1:
        return None
    (dim,) = moving
    rest = {shape[dim] / count for shape, count in zip(shapes, counts, strict=True)}
    if len(rest) != 1:
        return None
    share = rest.pop()
    return (dim, int(share)) if share == int(share) else None

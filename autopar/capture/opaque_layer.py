"""Layers that can't be exported: what small real runs tell of them.

The model is run, on fake tensors, with 2 and with 4 samples; its opaque layers run for real there.
Which dims of their inputs and outputs follow the samples is seen, not guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture.explain import users_place
from autopar.capture.layer_op import TensorMeta
from autopar.capture.opaque_code import OpaqueCode, OpaqueWork, Place, Slot
from autopar.capture.real_layer import RealLayer, draw, tensors_of
from autopar.capture.stub import LayerCall, Result
from autopar.errors import AutoparError
from autopar.runtime.samples import same

COUNTS = (2, 4)
"""Samples of the small runs."""
DRAWS = 6


@dataclass(frozen=True)
class Seen:
    """A layer's call and its result, with one number of samples."""

    call: LayerCall
    result: Result


@dataclass(frozen=True)
class Learned:
    """An opaque layer: its call and result with 2 and 4 samples, and what is known of its code."""

    seen: tuple[Seen, Seen]
    code: OpaqueCode
    error: Exception

    def result(self, samples: int) -> Result:
        """The result with another number of samples: sizes go on as they did from 2 to 4."""
        two, four = (seen.result for seen in self.seen)
        leaves = []
        for a, b in zip(two.leaves, four.leaves, strict=True):
            if isinstance(a, tuple):
                shape = tuple(
                    x + (y - x) * (samples - 2) // 2
                    for x, y in zip(a[0].shape, b[0].shape, strict=True)
                )
                leaves.append((_contiguous(a[0].dtype, shape), a[1]))
            else:
                leaves.append(a)
        return Result(tuple(leaves), two.spec)


def _contiguous(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorMeta:
    stride = 1
    out: list[int] = []
    for length in reversed(shape):
        out.insert(0, stride)
        stride *= max(length, 1)
    return TensorMeta(dtype, shape, tuple(out))


def learn(
    two: Seen, four: Seen, originals: Mapping[str, Tensor], samples: int, error: Exception
) -> Learned:
    """What is known of a layer that was seen with 2 and with 4 samples. `samples`: of the batch.

    Errors: AutoparError where its results can't be foretold, whatever it raises itself.
    """
    candidate = four.call.candidate
    where = f"{candidate.path} ({type(candidate.module).__name__})"
    call = _call(four.call, where)
    inputs = tuple(_place(a, b) for a, b in zip(two.call.inputs, four.call.inputs, strict=True))
    outputs = [_place(a, b) for a, b in zip(_metas(two.result), _metas(four.result), strict=True)]
    real = RealLayer(candidate.path, candidate.module, originals)
    mixing = _mixing(real, four, inputs, outputs)
    costs = [
        real.cost(*seen.call.arguments(_with_grad(seen.call, inputs, count)))
        for seen, count in zip((two, four), COUNTS, strict=True)
    ]
    figures = zip(vars(costs[0]).values(), vars(costs[1]).values(), strict=True)
    work = OpaqueWork(*(max(0, a + (b - a) * (samples - 2) // 2) for a, b in figures))
    first = str(error).strip().splitlines() or [""]
    code = OpaqueCode(
        f"{type(error).__name__}: {first[0][:120]}".rstrip(": "),
        users_place(error),
        call,
        inputs,
        tuple(place or (0, 1) for place in outputs),
        mixing,
        real.dropped,
        work,
    )
    return Learned((two, four), code, error)


def _metas(result: Result) -> list[TensorMeta]:
    return [leaf[0] for leaf in result.leaves if isinstance(leaf, tuple)]


def _place(two: TensorMeta, four: TensorMeta) -> Place | None:
    """The one dim that follows the samples."""
    if len(two.shape) != len(four.shape):
        return None
    moving = [i for i, (a, b) in enumerate(zip(two.shape, four.shape, strict=True)) if a != b]
    if len(moving) != 1 or two.shape[moving[0]] % 2 or four.shape[moving[0]] % 4:
        return None
    dim = moving[0]
    rest = two.shape[dim] // 2
    return (dim, rest) if four.shape[dim] == 4 * rest else None


def _call(call: LayerCall, where: str) -> Any:
    """The call's structure as plain Python, with slots."""
    slots: Any = tuple(Slot(i) for i in range(len(call.inputs)))
    found = call.arguments(slots)
    if not _plain(found):
        raise AutoparError(
            f"{where} can't be exported, and is called with more than tensors, plain values and "
            "tuples, lists and dicts of them: it can't run as it is either"
        )
    return found


def _plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_plain, value))
    if type(value) is dict:
        return all(type(k) is str and _plain(v) for k, v in value.items())
    return isinstance(value, (Slot, bool, int, float, str, torch.dtype, type(None)))


def _with_grad(call: LayerCall, places: Sequence[Place | None], samples: int) -> tuple[Tensor, ...]:
    drawn = draw(call.inputs, places, samples, seed=0)
    return tuple(
        t.requires_grad_(needs and t.is_floating_point())
        for t, needs in zip(drawn, call.needs_grad, strict=True)
    )


def _mixing(
    real: RealLayer,
    four: Seen,
    inputs: Sequence[Place | None],
    outputs: Sequence[Place | None],
) -> str:
    """Why the layer's samples depend on each other, or "" where no draw shows that.

    Errors: AutoparError where what it returns changes its shape, or its plain values, with the
    inputs' values.
    """
    if not any(inputs):
        return "its inputs don't carry the batch"
    if None in outputs:
        return "what it returns has no dim that follows the number of samples"
    problem, results = "", []
    for training in (True, False):
        for seed in range(DRAWS):
            drawn = draw(four.call.inputs, inputs, 4, seed)
            whole, buffers = _run(real, four, drawn, training)
            again, _ = _run(real, four, drawn, training, seed=seed + 1)
            results += [whole, again]
            check_shapes(real.path, real.module, results)
            tensors = tensors_of(whole)
            if not all(torch.equal(a, b) for a, b in zip(tensors, tensors_of(again), strict=True)):
                real.dropped = True
                return "it draws random numbers beside dropout"
            halves = [_cut(drawn, inputs, start) for start in (0, 2)]
            parts = [_run(real, four, half, training) for half in halves]
            if any(not torch.equal(buffers[n], parts[0][1][n]) for n in buffers):
                return "it updates its buffers from all samples"
            for index, place in enumerate(outputs):
                assert place is not None
                pieces = [tensors_of(part)[index] for part, _ in parts]
                if not same(tensors[index], pieces, place[0]):
                    mode = "training" if training else "eval"
                    problem = f"what it returns for a sample depends on other samples ({mode} mode)"
    return problem


def _run(
    real: RealLayer, seen: Seen, tensors: Sequence[Tensor], training: bool, seed: int = 0
) -> tuple[Any, dict[str, Tensor]]:
    args, kwargs = seen.call.arguments(tuple(tensors))
    buffers = {name: tensor.clone() for name, tensor in real.buffers.items()}
    with torch.no_grad():
        return real.run(args, kwargs, training=training, seed=seed, buffers=buffers), buffers


def _cut(tensors: Sequence[Tensor], places: Sequence[Place | None], start: int) -> list[Tensor]:
    return [
        t if place is None else t.narrow(place[0], start * place[1], 2 * place[1])
        for t, place in zip(tensors, places, strict=True)
    ]


def check_shapes(path: str, module: nn.Module, results: Sequence[Any]) -> None:
    """Errors: AutoparError where a layer's results, for inputs of one shape, differ in more than
    tensors' values: nobody could tell what it returns."""
    found = []
    for result in results:
        leaves, spec = pytree.tree_flatten(result)
        shapes = [tuple(v.shape) if isinstance(v, Tensor) else v for v in leaves]
        found.append((shapes, spec))
    other = next((one for one in found if one != found[0]), None)
    if other is not None:
        raise AutoparError(
            f"{path} ({type(module).__name__}) can't be exported, and what it returns changes its "
            f"shape, or numbers in it, with the values of its inputs ({found[0][0]} and "
            f"{other[0]}): it can't run as it is either. Let it return tensors whose shapes follow "
            "from its inputs' shapes"
        )

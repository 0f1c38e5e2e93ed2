"""Layers that could not be captured: the model's own code on this rank's parameters."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError
from autopar.runtime.leaves import Leaf
from autopar.runtime.lend import lent
from autopar.runtime.parameters import Container
from autopar.runtime.samples import same

Place = tuple[int, int]
"""A tensor's dim with the samples, and how much of it belongs to one."""


class OpaqueLayer(Container):
    """Declares the parameters and buffers of a layer and runs the code of the layer itself.

    `INPUT_DIMS` and `OUTPUT_DIMS` say where the samples lie in the tensors of a call and of its
    results, where the layer runs on a share of them; None where it runs on all.
    """

    INPUT_DIMS: ClassVar[tuple[Place | None, ...] | None] = None
    OUTPUT_DIMS: ClassVar[tuple[Place, ...] | None] = None

    def bind(self, name: str, code: nn.Module) -> None:
        """Takes the layer, called `name` in the model, whose code runs."""
        own: dict[int, str] = {}
        names = {}
        for kind in (code.named_parameters, code.named_buffers):
            for alias, tensor in kind(remove_duplicate=False):
                names[alias] = own.setdefault(id(tensor), alias)
        # Not as attributes: the layer's own tensors are none of this program's.
        self.__dict__.update(_name=name, _code=code, _names=names, _checked=False)

    def run(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """The tensors that the layer returns. The first time that there are several samples to run
        on a share of: checks that samples are independent (forward alone, in eval mode).

        Errors: AutoparError where they aren't.
        """
        if "_code" not in self.__dict__:
            raise AutoparError(
                "the program runs a layer's own code: pass the model that it was compiled from as "
                "TrainingModule(..., code=model)"
            )
        if self.INPUT_DIMS is not None and not self._checked:
            self._check(args, kwargs)
        outputs = self._call(args, kwargs, self.training, copied=False)
        trainable = [p for p in self.parameters() if p.requires_grad]
        if torch.is_grad_enabled() and trainable and self.INPUT_DIMS is not None:
            leaves = pytree.tree_leaves((args, kwargs))
            given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            outputs = _with_all(outputs, given, trainable)
        return tuple(outputs)

    def _call(self, args: Any, kwargs: Any, training: bool, copied: bool) -> list[Tensor]:
        code: nn.Module = self.__dict__["_code"]
        tensors = {name: self._tensor(own) for name, own in self.__dict__["_names"].items()}
        if copied:
            tensors = {n: t if t.requires_grad else t.clone() for n, t in tensors.items()}
        code.train(training)
        with lent(code, tensors):
            outputs = code(*args, **kwargs)
        found = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        return [leaf.contiguous() for leaf in found]

    def _tensor(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        owner = self.get_submodule(path)
        return owner.get_parameter(leaf) if leaf in owner._parameters else owner.get_buffer(leaf)

    def _check(self, args: Any, kwargs: Any) -> None:
        assert self.INPUT_DIMS is not None and self.OUTPUT_DIMS is not None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        places = dict(zip(where, self.INPUT_DIMS, strict=True))
        samples = min(leaves[i].shape[place[0]] // place[1] for i, place in places.items() if place)
        if samples < 2:
            return
        half = samples // 2

        def part(start: int, stop: int) -> list[Tensor]:
            cut = list(leaves)
            for i, place in places.items():
                if place is not None:
                    dim, rest = place
                    cut[i] = leaves[i].narrow(dim, start * rest, (stop - start) * rest)
            some_args, some_kwargs = pytree.tree_unflatten(cut, spec)
            return self._call(some_args, some_kwargs, training=False, copied=True)

        with torch.no_grad(), torch.random.fork_rng():
            whole, parts = part(0, samples), [part(0, half), part(half, samples)]
        self.__dict__["_checked"] = True
        for index, (dim, _) in enumerate(self.OUTPUT_DIMS):
            if not same(whole[index], [p[index] for p in parts], dim):
                raise AutoparError(
                    f"the layer {self.__dict__['_name']} ({type(self.__dict__['_code']).__name__}) "
                    f"treats samples together: what it returns for {samples} samples isn't what it "
                    "returns for the two halves of them, so that it can't run on each rank's "
                    'share. Compile with forbid=("data",) and one microbatch, or change the layer'
                )


def drop_unused(leaves: Iterable[Leaf]) -> None:
    """Takes away the gradients of parameters that no sample of any rank used, of layers that run on
    shares of them: the plain model gives them none, and its optimizer lets them be."""
    for leaf in leaves:
        on_shares = isinstance(leaf.module, OpaqueLayer) and leaf.module.INPUT_DIMS is not None
        if on_shares and leaf.grad is not None and _never_used(leaf.grad):
            leaf.registered.grad = leaf.value.grad = None


def _never_used(gradient: Tensor) -> bool:
    parts = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return bool(len(parts) and (parts == 0).all() and parts.signbit().all())


def _with_all(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor]:
    """The outputs, the first that has a gradient made to give every parameter one: of zeros where
    the code didn't use it. Else ranks whose samples took another branch would wait for each other.

    Zeros of a parameter that wasn't used are negative, of one that was positive: only where all
    that is summed up is negative zeros does a sum have their sign (see `drop_unused`).
    """
    out = list(outputs)
    for index, output in enumerate(out):
        if output.is_floating_point() or output.is_complex():
            used = _reached(out, inputs)
            signs = [1.0 if id(p) in used else -1.0 for p in parameters]
            out[index] = _All.apply(output, signs, *parameters)  # type: ignore[no-untyped-call]
            break
    return out


def _reached(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> set[int]:
    """The identities of the leaves that outputs depend on other than through inputs."""
    seen = {tensor.grad_fn for tensor in inputs}
    todo: list[Any] = [tensor.grad_fn for tensor in outputs]
    found: set[int] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        todo += [source for source, _ in node.next_functions]
    return found


class _All(torch.autograd.Function):
    """The first input; zeros of these signs are the gradients of the others."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, signs: Sequence[float], *parameters: Tensor) -> Tensor:
        ctx.like = [(tuple(p.shape), p.dtype, p.device) for p in parameters]
        ctx.signs = signs
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        both = zip(ctx.signs, ctx.like, strict=True)
        zeros = [sign * torch.zeros(shape, dtype=d, device=v) for sign, (shape, d, v) in both]
        return (grads[0], None, *zeros)

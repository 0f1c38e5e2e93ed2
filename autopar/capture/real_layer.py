"""A layer run for real, on small random inputs, while the model around it is fake."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from autopar.capture.layer_op import TensorMeta
from autopar.capture.opaque_code import Place
from autopar.runtime.lend import lent

SEED = 11


@dataclass(frozen=True)
class Cost:
    """What one forward and backward took."""

    flops: int
    backward_flops: int
    bytes: int
    backward_bytes: int
    saved_bytes: int


class RealLayer:
    """A layer's code with real weights of its own: copies of the model's, or random ones where the
    model is on meta. Errors of the code itself come through."""

    def __init__(self, path: str, module: nn.Module, originals: Mapping[str, Tensor]) -> None:
        """`originals`: the model's parameters and buffers under all their names."""
        self.path, self.module = path, module
        made: dict[int, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(SEED)
        with _disable_current_modes():
            for kind in (module.named_parameters, module.named_buffers):
                for name, _ in kind(remove_duplicate=False):
                    original = originals[f"{path}.{name}"]
                    if id(original) not in made:
                        made[id(original)] = _real(original, generator)
                    self.weights[name] = made[id(original)]
        self.dropped = False
        """Whether a run has dropped at random."""

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The real buffers by name."""
        names = {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        return {name: tensor for name, tensor in self.weights.items() if name in names}

    def run(
        self,
        args: Any,
        kwargs: Any,
        *,
        training: bool,
        seed: int = SEED,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """What the layer returns, without dropout. `buffers`: those to use instead, which it may
        change; left out, copies."""
        with _disable_current_modes():
            given = buffers or {name: tensor.clone() for name, tensor in self.buffers.items()}
        weights = {**self.weights, **given}
        with _real_world(self.module, training), lent(self.module, weights):
            torch.manual_seed(seed)
            mode = _NoDropout()
            with mode:
                outputs = self.module(*args, **kwargs)
            self.dropped |= mode.dropped
        return outputs

    def cost(self, args: Any, kwargs: Any) -> Cost:
        """Counted op by op; attention by its plain formula."""
        own = {tensor.untyped_storage()._cdata for tensor in self.weights.values()}
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in own:
                kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        counts = [FlopCounterMode(display=False), FlopCounterMode(display=False)]
        moved = [_Moved(), _Moved()]
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with _disable_current_modes(), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            with hooks, counts[0], moved[0]:
                outputs = self.run(args, kwargs, training=True)
            ends = [t for t in tensors_of(outputs) if t.requires_grad]
            with counts[1], moved[1]:
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
        for tensor in self.weights.values():
            tensor.grad = None
        saved = sum(t.untyped_storage().nbytes() for t in kept.values())
        flops = [int(count.get_total_flops()) for count in counts]
        return Cost(flops[0], flops[1], moved[0].bytes, moved[1].bytes, saved)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def draw(
    metas: Sequence[TensorMeta], places: Sequence[Place | None], samples: int, seed: int
) -> list[Tensor]:
    """Random tensors like these, with this number of samples where they have a place for them.
    Samples differ in their mean; integers are 0 or 1."""
    with _disable_current_modes():
        generator = torch.Generator().manual_seed(seed)
        return [_drawn(m, p, samples, generator) for m, p in zip(metas, places, strict=True)]


def _drawn(
    meta: TensorMeta, place: Place | None, samples: int, generator: torch.Generator
) -> Tensor:
    shape = list(meta.shape)
    if place is not None:
        shape[place[0]] = samples * place[1]
    if not (meta.dtype.is_floating_point or meta.dtype.is_complex):
        return torch.randint(0, 2, shape, generator=generator).to(meta.dtype)
    drawn = torch.randn(shape, generator=generator)
    if place is not None:
        spread = [length if i == place[0] else 1 for i, length in enumerate(shape)]
        drawn = drawn + 2 * torch.randn(spread, generator=generator)
    return drawn.to(meta.dtype)


def _real(original: Tensor, generator: torch.Generator) -> Tensor:
    if not original.is_meta:
        copy = original.detach().to("cpu", copy=True)
    elif original.is_floating_point() or original.is_complex():
        fan = original.shape[-1] if original.dim() > 1 else 1
        drawn = torch.randn(tuple(original.shape), generator=generator) / fan**0.5
        if original.dim() < 2:  # scales of norms, variances
            drawn = 0.5 + torch.rand(tuple(original.shape), generator=generator)
        copy = drawn.to(original.dtype)
    else:
        copy = torch.zeros(tuple(original.shape), dtype=original.dtype)
    return copy.requires_grad_(original.requires_grad)


@contextmanager
def _real_world(module: nn.Module, training: bool) -> Iterator[None]:
    modes = [(m, m.training) for m in module.modules()]
    try:
        with _disable_current_modes(), torch.random.fork_rng(devices=[]):
            module.train(training)
            yield
    finally:
        for m, mode in modes:
            m.training = mode


class _NoDropout(TorchFunctionMode):
    """Dropout at rate 0 inside; remembers whether there was any."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", ""), dict(kwargs or {})
        position, key = (4, "dropout_p") if name == "scaled_dot_product_attention" else (1, "p")
        if "dropout" in name or key == "dropout_p":
            rate = args[position] if len(args) > position else given.get(key, 0.0)
            self.dropped |= bool(rate)
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            elif key in given or key == "p":
                given[key] = 0.0
        return func(*args, **given)


class _Moved(TorchDispatchMode):
    """Adds up what ops read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returns = [r.alias_info for r in func._schema.returns]
        if all(info is None or info.is_write for info in returns):
            tensors = tensors_of((args, kwargs, result))
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return result

"""Parameters of an emitted module: local tensors under the plain model's names, and what they are
parts of.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.runtime.layout import Dim, axes_of, local_shape, whole_size
from autopar.runtime.process_mesh import ProcessMesh


@dataclass(frozen=True)
class Declaration:
    """What a local parameter or buffer is a part of.

    `dims` are the whole tensor's, `sums` the axes over which the local gradient is partial, `also`
    the further names under which the plain model knows it, relative to the declaring module.
    """

    dims: tuple[Dim, ...]
    sums: tuple[str, ...]
    dtype: torch.dtype
    also: tuple[str, ...]
    buffer: bool
    trainable: bool
    persistent: bool
    synced: tuple[str, ...] = ()
    """The axes among `sums` that the program's `sync_gradients` takes care of."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(whole_size(dim) for dim in self.dims)

    @property
    def axes(self) -> frozenset[str]:
        """The axes that the tensor is cut over."""
        return frozenset().union(*(axes_of(dim) for dim in self.dims))


@dataclass(frozen=True)
class Sharded:
    """How ZeRO shards a parameter, on dim 0: over the axes, at stage 1 its optimizer state, at 2
    its gradient as well, at 3 all of it.
    """

    axes: tuple[str, ...]
    stage: Literal[1, 2, 3]


class Container(nn.Module):
    """A module that holds parameters and submodules under the plain model's names.

    Children with numbers for names are reached by these, also where a stage has only some of them:
    `self.transformer.h[2]`, `self.transformer.h[2:4]`.
    """

    mesh: ProcessMesh

    def __init__(self) -> None:
        super().__init__()
        self.declarations: dict[str, Declaration] = {}
        """What this module declared, by name relative to it."""
        self.kept_state: dict[tuple[str, str], Any] = {}
        """What strategies keep beside parameters, by (parameter, name); on the root only."""
        self.sharded: dict[str, Sharded] = {}
        """How ZeRO shards declared parameters, by the same names."""

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> list[nn.Module]: ...

    def __getitem__(self, index: int | slice) -> nn.Module | list[nn.Module]:
        if isinstance(index, slice):
            last = max(int(name) for name in self._modules if name.isdecimal())
            return [self[i] for i in range(*index.indices(last + 1))]
        return self.get_submodule(str(index))

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([child for name, child in self.named_children() if name.isdecimal()])


def declare(
    module: Container,
    name: str,
    *dims: Dim,
    sums: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    also: Sequence[str] = (),
    buffer: bool = False,
    trainable: bool = True,
    persistent: bool = True,
    synced: Sequence[str] = (),
) -> None:
    """Registers this rank's part of a parameter (or buffer), zero so far, on the mesh's device.

    `dims` are those of the whole tensor (see `autopar.runtime.layout`). `persistent` as in
    `register_buffer`: False keeps a buffer out of state dicts. `synced`: axes among `sums` over
    which the program's own `sync_gradients` sums the gradient.
    """
    mesh = module.mesh
    declaration = Declaration(
        dims,
        tuple(sums),
        dtype,
        tuple(also),
        buffer,
        trainable and not buffer,
        persistent,
        tuple(synced),
    )
    overlap = declaration.axes & set(sums)
    assert not overlap, f"{name} is cut over {sorted(overlap)} and summed over them as well"
    assert set(sums) <= set(mesh.axes), f"{name} is summed over {sums}, the mesh is {mesh.layout}"
    assert name not in module.declarations, f"{name} is declared twice"
    module.declarations[name] = declaration
    # Zeros, since padding stays what it is here.
    local = torch.zeros(local_shape(dims, mesh.layout), dtype=dtype, device=mesh.device)
    path, _, leaf = name.rpartition(".")
    parent = _submodule(module, path)
    _check_free(parent, leaf)
    if buffer:
        parent.register_buffer(leaf, local, persistent=persistent)
    else:
        parent.register_parameter(leaf, nn.Parameter(local, requires_grad=trainable))


def declare_layers(
    module: Container, name: str, layers: Sequence[nn.Module] | Mapping[str, nn.Module]
) -> None:
    """Puts `layers` under `name` by their index, `module.<name>[0]` and so on, or by their keys."""
    parent = _submodule(module, name)
    named = layers if isinstance(layers, Mapping) else dict(enumerate(layers))
    for key, layer in named.items():
        _check_free(parent, str(key))
        parent.add_module(str(key), layer)


def run_layers(layers: Sequence[nn.Module], carried: int, *tensors: Tensor) -> Tensor:
    """Runs layers one after the other; each takes `tensors`, but at index `carried` what the layer
    before returned."""
    given = list(tensors)
    for layer in layers:
        given[carried] = layer(*given)
    return given[carried]


def declared(root: nn.Module) -> Iterator[tuple[str, Container, str, Declaration]]:
    """Everything declared in `root` and below: the name in the plain model, the module that
    declared it, the name there, the declaration.
    """
    for prefix, module in root.named_modules():
        if isinstance(module, Container):
            for name, declaration in module.declarations.items():
                yield (f"{prefix}.{name}" if prefix else name), module, name, declaration


def _submodule(module: Container, path: str) -> Container:
    """The container at a dotted path, made where it is missing."""
    for part in path.split(".") if path else ():
        if part not in module._modules:
            _check_free(module, part)
            module.add_module(part, Container())
        child = module._modules[part]
        assert isinstance(child, Container), f"{path} runs through a {type(child).__name__}"
        module = child
    return module


def _check_free(module: Container, name: str) -> None:
    if hasattr(module, name):
        raise AutoparError(
            f"The model's name {name!r} is taken: emitted modules use it themselves. Rename it in "
            "the model."
        )

"""The state of any torch.optim optimizer as parts of whole tensors, by parameter name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.checkpoint.index import Facts, Index
from autopar.runtime.checkpoint.values import decode, encode
from autopar.runtime.leaves import Leaf
from autopar.runtime.pieces import Parts, parts_of, whole
from autopar.runtime.process_mesh import ProcessMesh

SECTION = "optimizer"
CLASS = "optimizer.class"
GROUPS = "optimizer.groups"
GROUP = "optimizer.group"
"""optimizer.group/INDEX/OPTION: a hyperparameter."""
MEMBER = "optimizer.member"
"""optimizer.member/PARAMETER: the index of its group."""
VALUE = "optimizer.value"
"""optimizer.value/KEY/PARAMETER: state that isn't a tensor."""
DEVICE = "optimizer.on_device"
"""optimizer.on_device/KEY/PARAMETER: a scalar that lies beside the parameter, not on the CPU."""
NOT_OPTIONS = frozenset({"params", "param_names"})


# ---------------------------------------------------------------- saving


def state_parts(
    optimizer: torch.optim.Optimizer, leaves: tuple[Leaf, ...], mesh: ProcessMesh
) -> tuple[dict[str, Parts], dict[str, Any]]:
    """Tensors of the state as "optimizer/KEY/PARAMETER", and what else an optimizer is.

    Errors: AutoparError for state that can't be put together from the ranks' parts or isn't data.
    """
    by_value = {id(leaf.value): leaf for leaf in leaves}
    facts = dict(_group_facts(optimizer, by_value))
    parts: dict[str, Parts] = {}
    for parameter, state in optimizer.state.items():
        leaf = by_value.get(id(parameter))
        if leaf is None:
            raise AutoparError(
                f"{type(optimizer).__name__} has state that belongs to no parameter of the model: "
                f"a checkpoint can't hold it."
            )
        for key, value in state.items():
            if "/" in key:
                raise AutoparError(f"the optimizer's state {key!r} has a / in its name: rename it.")
            name = f"{key}/{leaf.name}"
            if not isinstance(value, Tensor):
                facts[f"{VALUE}/{name}"] = encode(value, f"the optimizer's {key} of {leaf.name}")
                continue
            parts[f"{SECTION}/{name}"] = _state_part(leaf, mesh, key, value)
            if not value.ndim and value.device.type != "cpu":
                facts[f"{DEVICE}/{name}"] = True
    return parts, facts


def _group_facts(
    optimizer: torch.optim.Optimizer, by_value: Mapping[int, Leaf]
) -> Iterator[tuple[str, Any]]:
    yield CLASS, type(optimizer).__name__
    yield GROUPS, len(optimizer.param_groups)
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in by_value:  # a stage of frozen layers has one of no use
                yield f"{MEMBER}/{by_value[id(parameter)].name}", index
        for option in group.keys() - NOT_OPTIONS:
            what = f"the option {option} of the optimizer's group {index}"
            yield f"{GROUP}/{index}/{option}", encode(group[option], what)


def _state_part(leaf: Leaf, mesh: ProcessMesh, key: str, value: Tensor) -> Parts:
    if value.shape == leaf.value.shape:
        return parts_of(leaf, mesh, value)
    if not value.ndim or _whole_here(leaf):
        return whole(value)
    raise AutoparError(
        f"the optimizer's {key} of {leaf.name} has shape {tuple(value.shape)} for a part of shape "
        f"{tuple(leaf.value.shape)} (of {leaf.declaration.shape}): only state with one element for "
        "each of the parameter's can be put together. Use another optimizer, or a plan that leaves "
        "the parameter whole."
    )


def _whole_here(leaf: Leaf) -> bool:
    return tuple(leaf.value.shape) == leaf.declaration.shape


# ---------------------------------------------------------------- loading


@dataclass(frozen=True, eq=False)
class Restored:
    """An optimizer's state from a checkpoint: to be filled, then to be taken over."""

    parts: Mapping[str, Parts]
    state: Mapping[Leaf, dict[str, Any]]
    options: tuple[dict[str, Any], ...]
    """Hyperparameters by group."""
    on_device: frozenset[tuple[Leaf, str]]

    def apply(self, optimizer: torch.optim.Optimizer, leaves: tuple[Leaf, ...]) -> None:
        """Replaces the optimizer's state and hyperparameters; its groups stay the same objects, so
        that a scheduler's hold on them lasts.
        """
        for leaf in leaves:
            optimizer.state.pop(leaf.value, None)
        for leaf, state in self.state.items():
            optimizer.state[leaf.value] = {
                key: value.to(leaf.value.device) if (leaf, key) in self.on_device else value
                for key, value in state.items()
            }
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(options)


def restored(
    index: Index,
    optimizer: torch.optim.Optimizer,
    leaves: tuple[Leaf, ...],
    by_saved_name: Mapping[str, Leaf],
    mesh: ProcessMesh,
) -> Restored:
    """Empty tensors for this rank's part of the state. `by_saved_name`: leaves by the names that
    the checkpoint uses.

    Errors: AutoparError where the state is another optimizer's; ValueError for what isn't data.
    """
    _check_optimizer(index.facts, optimizer, leaves, by_saved_name)
    parts: dict[str, Parts] = {}
    state: dict[Leaf, dict[str, Any]] = {}
    on_device = set()
    for name, saved in index.tensors.items():
        if (found := _key_and_leaf(name, SECTION, by_saved_name)) is None or not found[1].here:
            continue
        key, leaf = found
        tensor, parts[name] = _empty(leaf, mesh, key, saved.shape, saved.dtype)
        state.setdefault(leaf, {})[key] = tensor
    for name, value in index.facts.items():
        if (found := _key_and_leaf(name, VALUE, by_saved_name)) is not None and found[1].here:
            state.setdefault(found[1], {})[found[0]] = decode(value)
        if (found := _key_and_leaf(name, DEVICE, by_saved_name)) is not None and found[1].here:
            on_device.add((found[1], found[0]))
    options = tuple(
        _options(index.facts, number, group) for number, group in enumerate(optimizer.param_groups)
    )
    return Restored(parts, state, options, frozenset(on_device))


def _check_optimizer(
    facts: Facts,
    optimizer: torch.optim.Optimizer,
    leaves: tuple[Leaf, ...],
    by_saved_name: Mapping[str, Leaf],
) -> None:
    ours, theirs = type(optimizer).__name__, facts.get(CLASS)
    advice = 'make the same one, or go on without its state: drop_state=("optimizer",)'
    if ours != theirs:
        raise AutoparError(
            f"The checkpoint's optimizer is {theirs}, this run's is {ours}: {advice}."
        )
    groups = len(optimizer.param_groups)
    if facts.get(GROUPS) != groups:
        raise AutoparError(
            f"The checkpoint's {theirs} has {facts.get(GROUPS)} parameter groups, this run's has "
            f"{groups}: {advice}."
        )
    by_value = {id(leaf.value): leaf.name for leaf in leaves}
    here = {
        by_value[id(parameter)]: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) in by_value
    }
    there = {}
    for name, number in facts.items():
        section, _, saved_name = name.partition("/")
        if section == MEMBER:
            leaf = by_saved_name.get(saved_name)
            if leaf is not None and not leaf.here:
                continue
            there[leaf.name if leaf else saved_name] = number
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise AutoparError(
                f"{name} is in {_group(there.get(name))} of the checkpoint's {theirs} and in "
                f"{_group(here.get(name))} of this run's: {advice}."
            )


def _group(number: int | None) -> str:
    return "no group" if number is None else f"group {number}"


def _key_and_leaf(
    name: str, section: str, by_saved_name: Mapping[str, Leaf]
) -> tuple[str, Leaf] | None:
    """Of "SECTION/KEY/PARAMETER". Errors: ValueError for a parameter that isn't saved."""
    found, _, rest = name.partition("/")
    if found != section:
        return None
    key, _, parameter = rest.partition("/")
    if parameter not in by_saved_name:
        raise ValueError(f"{name} belongs to no parameter")
    return key, by_saved_name[parameter]


def _empty(
    leaf: Leaf, mesh: ProcessMesh, key: str, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Parts]:
    """A tensor for this rank's part of the state, and where its elements lie in the whole."""
    if shape == leaf.declaration.shape:
        tensor = torch.zeros_like(leaf.value, dtype=dtype, requires_grad=False)  # padding as well
        return tensor, parts_of(leaf, mesh, tensor)
    if not shape:
        tensor = torch.empty((), dtype=dtype, device="cpu")
        return tensor, whole(tensor)
    if _whole_here(leaf):
        tensor = torch.empty(shape, dtype=dtype, device=leaf.value.device)
        return tensor, whole(tensor)
    raise AutoparError(
        f"the optimizer's {key} of {leaf.name} has shape {shape} in the checkpoint, which can't be "
        f"split as this plan splits the parameter {leaf.declaration.shape}: load it under a plan "
        'that leaves the parameter whole, or go on without: drop_state=("optimizer",).'
    )


def _options(facts: Facts, number: int, group: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    for name, value in facts.items():
        if name.startswith(f"{GROUP}/{number}/"):
            option = name.removeprefix(f"{GROUP}/{number}/")
            if option in NOT_OPTIONS:
                raise ValueError(f"{name} is no option")
            current = group.get(option)
            device = current.device if isinstance(current, Tensor) else None
            options[option] = decode(value, device)
    return options

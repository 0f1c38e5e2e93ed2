"""What capture hands on: one FX graph per unique block, and the skeleton that calls them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx


@dataclass(frozen=True)
class GraphInput:
    """A tensor that a graph takes, in call order: its placeholder's name and its metadata."""

    node: str
    requires_grad: bool


@dataclass(frozen=True)
class CapturedGraph:
    """A flat graph of composite ATen ops. Placeholders: parameters, buffers, constants, inputs;
    every node's `meta["val"]` is a FakeTensor (on cpu) or a tuple of them. The single output node
    returns a flat tuple of tensors.

    `params` and `buffers` map placeholder names to names relative to the block (to the model, for
    the skeleton); two placeholders never share a parameter. `constants` maps placeholder names to
    real tensors that the export lifted.
    """

    name: str
    graph: torch.fx.Graph
    params: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    inputs: tuple[GraphInput, ...]


@dataclass(frozen=True)
class Layer:
    """One instance of a unique block: its path in the model and the block's index."""

    path: str
    block: int


@dataclass(frozen=True)
class ParamMeta:
    """A parameter of the model: `names` has its own name first, then those tied to it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True)
class Capture:
    """The whole model. The skeleton's graph holds a call
    `torch.ops.autopar.layer.default([tensors], path)` (outputs by getitem) for each layer, in
    order; the tensors are those of the block's `inputs`. The skeleton's only output is the loss.

    `batch_leaves` names the tensors of the batch in pytree order, aligned with `skeleton.inputs`;
    `batch_spec` is the batch's torch pytree spec.
    """

    model_class: str
    skeleton: CapturedGraph
    blocks: tuple[CapturedGraph, ...]
    layers: tuple[Layer, ...]
    params: tuple[ParamMeta, ...]
    buffers: Mapping[str, torch.Tensor]
    """Buffers by name with the model's real values (non-persistent ones too); meta where the model
    is on meta."""
    transient_buffers: frozenset[str]
    """Buffers that state dicts leave out (`persistent=False`)."""
    batch_leaves: tuple[str, ...]
    batch_spec: Any
    batch_values: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Plain values of the batch, named like tensors: they are part of the graphs."""
    notes: tuple[str, ...] = field(default=())

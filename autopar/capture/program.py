"""capture(): from a model and a batch to graphs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy

from autopar.capture.alike import Traced, kind_of, traced_as
from autopar.capture.captured import Capture, CapturedGraph, GraphInput, Layer, ParamMeta
from autopar.capture.export import BlockProgram, export, to_graph
from autopar.capture.fake import QuickFakeMode, faked, training_mode
from autopar.capture.find import find_candidates, without_shared
from autopar.capture.gradients import check_gradients, layer_nodes
from autopar.capture.masks import simplify_block, simplify_skeleton, sites_of
from autopar.capture.prune import pruned, without_unused_weights
from autopar.capture.reference import Loss, plain_values, tensor_leaves
from autopar.capture.skeleton import SkeletonTracer, opaque_graph
from autopar.capture.stub import LayerCall, Recorder
from autopar.capture.unique import unique_blocks
from autopar.collector import collector_paused
from autopar.errors import AutoparError


def capture(model: nn.Module, batch: Any, loss: Loss | None = None) -> Capture:
    """The graphs of `reference_loss(model, batch, loss)` in train mode.

    Repeated layers are exported once for each kind. Nothing is allocated, whatever the model's
    size and device (meta too), and the model is afterwards as it was. The batch's tensors give
    shapes and dtypes only.

    Raises AutoparError where a layer can't be exported (its path, class and the line are named),
    where there is no loss, or where no trainable parameter is reached from it.
    """
    params, buffers = _params(model), dict(model.named_buffers(remove_duplicate=False))
    originals = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
    mode = QuickFakeMode(allow_non_fake_inputs=True)
    with collector_paused(), training_mode(model) as notes, faked(model, mode):
        found, shared = without_shared(model, find_candidates(model))
        tracer = SkeletonTracer(model, batch, loss, mode, originals, found)
        program, recorder, refused = tracer.export()
        names = [name for name, _ in tensor_leaves(batch)[0]]
        inputs = tuple(GraphInput(name, False) for name in names)
        skeleton = to_graph(type(model).__name__, program, inputs)
        calls = _called(skeleton, recorder)
        known: dict[str, ExportedProgram] = {}
        blocks, index = unique_blocks(calls, lambda call: _export_block(call, mode, tracer, known))
    layers = tuple(Layer(c.candidate.path, i) for c, i in zip(calls, index, strict=True))
    blocks = _with_gradients(_with_unique_names(blocks), layers, calls)
    skeleton, blocks, layers, causal = _simplified(skeleton, blocks, layers)
    result = Capture(
        model_class=type(model).__name__,
        skeleton=skeleton,
        blocks=blocks,
        layers=layers,
        params=params,
        buffers=buffers,
        transient_buffers=_transient_buffers(model),
        batch_leaves=tuple(names),
        batch_spec=tensor_leaves(batch)[2],
        batch_values=plain_values(batch),
        notes=(*notes, *shared, *refused, *causal),
    )
    return replace(result, notes=result.notes + check_gradients(result))


def _transient_buffers(model: nn.Module) -> frozenset[str]:
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    )


def _params(model: nn.Module) -> tuple[ParamMeta, ...]:
    aliases: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_lazy(parameter):
            raise AutoparError(f"{name} has no shape yet: run a lazy model once before compiling")
        aliases.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    return tuple(
        ParamMeta(tuple(names), tuple(t.shape), t.dtype, t.requires_grad)
        for names, t in ((aliases[key], tensors[key]) for key in aliases)
    )


def _called(skeleton: CapturedGraph, recorder: Recorder) -> list[LayerCall]:
    """The calls that contribute to the loss, in order; their nodes lose the description of their
    outputs, which only tracing needed."""
    calls = []
    for node in layer_nodes(skeleton.graph):
        node.args = node.args[:2]
        node.meta["val"] = tuple(node.meta["val"])
        calls.append(recorder.calls[str(node.args[1])])
    return calls


def _export_block(
    call: LayerCall, mode: FakeTensorMode, tracer: SkeletonTracer, known: dict[str, ExportedProgram]
) -> CapturedGraph:
    """The graph of a layer. `known`: of each kind of layers the program that was exported last."""
    if call.candidate.path in tracer.opaque:
        return opaque_graph(call, tracer.opaque[call.candidate.path], tracer.samples, mode)
    with mode:
        tensors = tuple(
            meta.empty().requires_grad_(needs)
            for meta, needs in zip(call.inputs, call.needs_grad, strict=True)
        )
    module, path = call.candidate.module, call.candidate.path
    kind = kind_of(call)
    program: ExportedProgram | Traced | None = None
    try:
        if kind in known:
            program = traced_as(known[kind], BlockProgram(call), tensors)
        if program is None:
            program = export(BlockProgram(call), tensors)
            known[kind] = program
    except AutoparError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever torch raises, the layer runs as it is)
        tracer.learn(call.candidate, error)
        return opaque_graph(call, tracer.opaque[path], tracer.samples, mode)
    inputs = tuple(GraphInput(n, g) for n, g in zip(call.names, call.needs_grad, strict=True))
    return to_graph(type(module).__name__, program, inputs)


def _with_unique_names(blocks: tuple[CapturedGraph, ...]) -> tuple[CapturedGraph, ...]:
    """Blocks of one class are numbered: T5Block, T5Block_2."""
    seen: Counter[str] = Counter()
    result = []
    for block in blocks:
        seen[block.name] += 1
        count = seen[block.name]
        result.append(replace(block, name=f"{block.name}_{count}") if count > 1 else block)
    return tuple(result)


def _with_gradients(
    blocks: tuple[CapturedGraph, ...], layers: tuple[Layer, ...], calls: list[LayerCall]
) -> tuple[CapturedGraph, ...]:
    """An input of a block requires a gradient where it does in any of its layers."""
    needs: Mapping[int, list[tuple[bool, ...]]] = {i: [] for i in range(len(blocks))}
    for layer, call in zip(layers, calls, strict=True):
        needs[layer.block].append(call.needs_grad)
    return tuple(
        replace(
            block,
            inputs=tuple(
                GraphInput(given.node, any(column))
                for given, column in zip(block.inputs, zip(*needs[i], strict=True), strict=True)
            ),
        )
        for i, block in enumerate(blocks)
    )


def _simplified(
    skeleton: CapturedGraph, blocks: tuple[CapturedGraph, ...], layers: tuple[Layer, ...]
) -> tuple[CapturedGraph, tuple[CapturedGraph, ...], tuple[Layer, ...], tuple[str, ...]]:
    """Masks recognised, unused inputs, outputs, weights and layers gone; notes on the masks."""
    masks, notes = simplify_skeleton(skeleton)
    sites: dict[int, list[list[torch.fx.Node]]] = {i: [] for i in range(len(blocks))}
    block_of = {layer.path: layer.block for layer in layers}
    for node in layer_nodes(skeleton.graph):
        sites[block_of[str(node.args[1])]].append(sites_of(node))
    for index, block in enumerate(blocks):
        notes += simplify_block(block, sites[index], masks)
    blocks = pruned(skeleton, blocks, layers)
    left = {str(node.args[1]) for node in layer_nodes(skeleton.graph)}
    layers = tuple(layer for layer in layers if layer.path in left)
    used = sorted({layer.block for layer in layers})
    return (
        without_unused_weights(skeleton),
        tuple(blocks[i] for i in used),
        tuple(Layer(layer.path, used.index(layer.block)) for layer in layers),
        notes,
    )

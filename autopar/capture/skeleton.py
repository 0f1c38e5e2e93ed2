"""The trace of a model with its layers stubbed, and what to do where layers can't be traced."""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from autopar.capture.captured import CapturedGraph, GraphInput
from autopar.capture.explain import capture_error, innermost_module
from autopar.capture.export import SkeletonProgram, export, foreign_weights
from autopar.capture.fake import fake_like
from autopar.capture.find import Candidate, as_candidate, without_shared
from autopar.capture.layer_op import TensorMeta, opaque_op
from autopar.capture.opaque_layer import COUNTS, DRAWS, Learned, Seen, check_shapes, learn
from autopar.capture.real_layer import RealLayer, draw
from autopar.capture.reference import Loss, tensor_leaves
from autopar.capture.stub import LayerCall, Recorder, stubbed
from autopar.errors import AutoparError


def batch_size(shapes: list[tuple[int, ...]]) -> int:
    """The first size that most tensors of a batch have; of equals the first tensor's."""
    sized = [shape[0] for shape in shapes if shape]
    if not sized:
        raise AutoparError("no tensor of the batch has a dim; the first dim must be the batch")
    return int(max(sized, key=lambda length: (sized.count(length), -sized.index(length))))


class SkeletonTracer:
    """Traces a model on fake tensors, its candidates stubbed. `opaque`: what small real runs told
    of the layers among them that can't be traced."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss | None,
        mode: FakeTensorMode,
        originals: Mapping[str, Tensor],
        candidates: tuple[Candidate, ...],
    ) -> None:
        """`originals`: the model's real (or meta) parameters and buffers under all their names."""
        self.model, self.loss, self.mode = model, loss, mode
        self.originals, self.candidates = originals, candidates
        self.named, self.leaves, self.spec = tensor_leaves(batch)
        self.opaque: dict[str, Learned] = {}

    def export(self) -> tuple[ExportedProgram, Recorder, tuple[str, ...]]:
        """The skeleton. Where a layer turns out to be used in a way that a stub can't serve, all
        layers of its class stay inline; where one can't be traced, those like it become opaque. The
        trace then starts again.

        Errors: AutoparError that names layer and line where the rest of the model can't be traced.
        """
        notes: tuple[str, ...] = ()
        while True:
            known = {p: learned.result(self.samples) for p, learned in self.opaque.items()}
            recorder = Recorder(known=known)
            try:
                with stubbed(self.model, self.candidates, recorder):
                    program = export(self._program(), self._tensors(self.samples))
                if not (recorder.refused or (recorder.touched and foreign_weights(program))):
                    return program, recorder, notes
            except AutoparError:
                raise
            except Exception as error:  # noqa: BLE001 (raised again, or the layer runs as it is)
                if recorder.failed is not None:
                    self.learn(*recorder.failed)
                    continue
                if not recorder.refused and not recorder.touched:
                    if isinstance(error, (IndexError, KeyError)) and self.candidates:
                        # Most likely what hooks inside layers should have collected (router
                        # logits, say), which stubs can't give.
                        self.candidates = ()
                        where = f"{type(error).__name__} with layers apart: {error}"
                        notes += (f"all layers stay inline: {where}",)
                        continue
                    self.learn(self._inner(error), error)
                    continue
            path, reason = next(iter((recorder.refused or recorder.touched).items()))
            kind = next(type(c.module) for c in self.candidates if c.path == path)
            if path in self.opaque:
                raise self._error(self.opaque[path].error, f"{path}: {reason}")
            self.candidates = tuple(c for c in self.candidates if type(c.module) is not kind)
            notes += (f"layers of class {kind.__name__} stay inline: {path}: {reason}",)

    @property
    def samples(self) -> int:
        """Samples of the whole batch."""
        return batch_size([tuple(tensor.shape) for _, tensor in self.named])

    def learn(self, candidate: Candidate, error: Exception) -> None:
        """Makes a layer that raised, and all that are like it, opaque.

        Errors: AutoparError, of the layer's error, where it can't run as it is either.
        """
        if candidate.path in self.opaque:
            raise self._error(error, "") from error
        errors = {candidate.signature: error}
        two, four = self._trials(errors)
        for path, seen in four.items():
            if path not in self.opaque:
                own = errors[seen.call.candidate.signature]
                self.opaque[path] = self._learned(two[path], seen, own)
        if candidate.path not in self.opaque:
            raise self._error(error, "it isn't called")

    def _trials(self, errors: dict[str, Exception]) -> list[dict[str, Seen]]:
        """The small runs. Layers that raise there join those in `errors` (by signature)."""
        first = next(iter(errors.values()))
        while True:
            recorder = Recorder()
            try:
                found = []
                for count in COUNTS:
                    recorder = self._recorder(errors, count)
                    with stubbed(self.model, self.candidates, recorder), self.mode:
                        self._program()(*self._tensors(count))
                    found.append(
                        {
                            p: Seen(recorder.calls[p], recorder.results[p])
                            for p in recorder.real
                            if p in recorder.calls
                        }
                    )
                return found
            except AutoparError:
                raise
            except Exception as error:  # noqa: BLE001 (raised again, or the layer runs as it is)
                failed = recorder.failed[0] if recorder.failed else self._inner(error)
                if failed.signature in errors or failed.path in self.opaque:
                    raise self._error(first, str(error)) from first
                errors[failed.signature] = error

    def _learned(self, two: Seen, four: Seen, error: Exception) -> Learned:
        """Layers of one signature are run once."""
        for known in self.opaque.values():
            if known.seen[1].call.signature == four.call.signature and known.error is error:
                return Learned((two, four), known.code, error)
        return learn(two, four, self.originals, self.samples, error)

    def _inner(self, error: Exception) -> Candidate:
        """The module that the skeleton failed in, as one more candidate."""
        path, module = innermost_module(error, self.model)
        within = [c for c in self.candidates if path == c.path or path.startswith(f"{c.path}.")]
        if not path or within or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise self._error(error, "") from error
        found = as_candidate(path, module)
        others = tuple(c for c in self.candidates if not c.path.startswith(f"{path}."))
        kept, notes = without_shared(self.model, (*others, found))
        if found not in kept:
            raise self._error(error, notes[-1]) from error
        self.candidates = (*others, found)
        return found

    def _recorder(self, errors: Mapping[str, Exception], samples: int) -> Recorder:
        """One that runs opaque layers, and those whose signature is in `errors`, for real."""
        real = {
            c.path: _on_random(RealLayer(c.path, c.module, self.originals), samples)
            for c in self.candidates
            if c.signature in errors or c.path in self.opaque
        }
        return Recorder(real=real)

    def _program(self) -> SkeletonProgram:
        return SkeletonProgram(self.model, self.leaves, self.spec, self.loss)

    def _tensors(self, samples: int) -> tuple[Tensor, ...]:
        whole = self.samples
        out = []
        for _, tensor in self.named:
            fake = fake_like(tensor, self.mode)
            if samples != whole and fake.dim() and fake.shape[0] == whole:
                with self.mode:
                    fake = torch.empty((samples, *fake.shape[1:]), dtype=fake.dtype, device="cpu")
            out.append(fake)
        return tuple(out)

    def _error(self, error: Exception, second: str) -> AutoparError:
        plain = capture_error(error, self.model, "")
        if not second or second.splitlines()[0] in str(plain):
            return plain
        return AutoparError(f"{plain}\n  It can't run as it is either: {second.splitlines()[0]}")


def _on_random(layer: RealLayer, seed: int) -> Callable[[Any, Any], Any]:
    """The layer on random tensors instead of the fake ones that it is called with."""

    def call(args: Any, kwargs: Any) -> Any:
        values, spec = pytree.tree_flatten((args, kwargs))
        fakes = [v for v in values if isinstance(v, Tensor)]
        results = []
        for number in range(DRAWS):
            metas = [TensorMeta.of(v) for v in fakes]
            drawn = draw(metas, [None] * len(fakes), 0, DRAWS * seed + number)
            rest = iter(
                t.requires_grad_(f.requires_grad and t.is_floating_point())
                for t, f in zip(drawn, fakes, strict=True)
            )
            leaves = [next(rest) if isinstance(v, Tensor) else v for v in values]
            real_args, real_kwargs = pytree.tree_unflatten(leaves, spec)
            results.append(layer.run(real_args, real_kwargs, training=True))
        check_shapes(layer.path, layer.module, results)
        return results[0]

    return call


def opaque_graph(
    call: LayerCall, learned: Learned, samples: int, mode: FakeTensorMode
) -> CapturedGraph:
    """A block of one op, which stands for the layer's own code."""
    module, graph = call.candidate.module, torch.fx.Graph()
    weights: dict[str, dict[str, str]] = {"p": {}, "b": {}}
    placeholders: list[torch.fx.Node] = []
    for prefix, named in (("p", module.named_parameters()), ("b", module.named_buffers())):
        for name, value in named:
            node = graph.placeholder(f"{prefix}_{re.sub(r'[^0-9a-zA-Z_]', '_', name)}")
            node.target, node.meta["val"] = node.name, value
            weights[prefix][node.name] = name
            placeholders.append(node)
    inputs = []
    with mode:
        for name, meta, needs in zip(call.names, call.inputs, call.needs_grad, strict=True):
            node = graph.placeholder(name)
            node.target, node.meta["val"] = node.name, meta.empty().requires_grad_(needs)
            inputs.append(node)
        result = learned.result(samples)
        values = tuple(leaf[0].empty() for leaf in result.leaves if isinstance(leaf, tuple))
    what = f"{type(module).__name__} {call.signature}"
    node = graph.call_function(opaque_op(), (inputs, placeholders, what))
    node.meta.update(
        val=values, opaque_code=learned.code, nn_module_stack={"": ("", type(module).__name__)}
    )
    outputs = []
    for index, value in enumerate(values):
        item = graph.call_function(operator.getitem, (node, index))
        item.meta["val"] = value
        outputs.append(item)
    graph.output(tuple(outputs)).meta["val"] = None
    graph.lint()
    return CapturedGraph(
        type(module).__name__,
        graph,
        weights["p"],
        weights["b"],
        {},
        tuple(GraphInput(n.name, g) for n, g in zip(inputs, call.needs_grad, strict=True)),
    )

"""`declare(...)` lines: what each local parameter is a part of."""

from collections.abc import Mapping

import torch

from autopar.emit.names import Lengths
from autopar.emit.text import strings
from autopar.graph.factors import Cat, DimExpr, Leaf, unsorted
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.flow import Flow
from autopar.layouts.layout import Layout
from autopar.mesh import Mesh


def declaration(
    name: str,
    dims: tuple[DimExpr, ...],
    layout: Layout,
    lengths: Lengths,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    also: tuple[str, ...] = (),
    buffer: bool = False,
    trainable: bool = True,
    persistent: bool = True,
    synced: tuple[str, ...] = (),
) -> str:
    """One declare call, whole dims with their splits."""
    words = [f'"{name}"', *(whole_dim(expr, layout, lengths) for expr in dims)]
    sums = [axis for axis, _ in mesh.axes if any(p.axis == axis for p in layout.varying)]
    if sums and trainable and not buffer:
        words.append(f"sums={strings(sums)}")
        if synced:
            words.append(f"synced={strings(synced)}")
    if dtype != torch.float32:
        words.append(f"dtype={dtype}")
    if also:
        words.append(f"also={strings(also)}")
    if buffer:
        words.append("buffer=True" if persistent else "buffer=True, persistent=False")
    elif not trainable:
        words.append("trainable=False")
    return f"declare(self, {', '.join(words)})"


def whole_dim(expr: DimExpr, layout: Layout, lengths: Lengths) -> str:
    """A whole dim and how it is cut: "hidden", '(split(heads, "tp"), head_dim)', "cat(…)"."""
    factors = [_factor(factor, layout, lengths) for factor in unsorted(expr)]
    if not factors:
        return "1"
    return factors[0] if len(factors) == 1 else f"({', '.join(factors)})"


def _factor(factor: Leaf | Cat, layout: Layout, lengths: Lengths) -> str:
    if isinstance(factor, Cat):
        return f"cat({', '.join(whole_dim(s, layout, lengths) for s in factor.segments)})"
    split = layout.split(factor.name)
    text = lengths.text((factor,), Layout())
    if not split:
        return text
    function = "split_padded" if factor.padded(split) else "split"
    return f"{function}({text}, {', '.join(f'{p.axis!r}' for p in split)})".replace("'", '"')


def weight_lines(
    flow: Flow,
    lengths: Lengths,
    names: Mapping[str, tuple[str, ...]],
    transient: frozenset[str],
) -> list[str]:
    """The declare lines of a block's parameters and buffers. `names`: placeholder (of those that
    are declared) → the names (own first) relative to the block; `transient`: buffers that state
    dicts leave out."""
    plans = [entry for candidate in flow.choices.values() for entry in candidate.params]
    synced = {name: tuple(p.axis for p in plan.sync.axes) for name, plan in plans if plan.sync}
    captured, out = flow.block.captured, []
    for node in flow.block.graph.nodes:
        if node.op != "placeholder" or node.name not in names:
            continue
        value = flow.block.values[node.name]
        own, *also = names[node.name]
        out.append(
            declaration(
                own,
                value.dims,
                flow.params.get(node.name, Layout()),
                lengths,
                flow.setting.mesh,
                dtype=node.meta["val"].dtype,
                also=tuple(also),
                buffer=node.name in captured.buffers,
                trainable=value.needs_grad,
                persistent=own not in transient,
                synced=synced.get(own, ()),
            )
        )
    return out


def unused_lines(model: ModelGraph) -> list[str]:
    """The declare lines of weights that no graph reads."""
    capture, out = model.capture, []
    for name in model.unused_weights():
        buffer = capture.buffers.get(name)
        if buffer is None:
            param = model.param(name)
            words = [f'"{name}"', *map(str, param.shape)]
            if param.dtype != torch.float32:
                words.append(f"dtype={param.dtype}")
            if len(param.names) > 1:
                words.append(f"also={strings(param.names[1:])}")
            if not param.trainable:
                words.append("trainable=False")
        else:
            words = [f'"{name}"', *map(str, buffer.shape), f"dtype={buffer.dtype}", "buffer=True"]
            if name in capture.transient_buffers:
                words.append("persistent=False")
        out.append(f"declare(self, {', '.join(words)})")
    return out

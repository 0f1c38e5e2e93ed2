"""What capture and analysis found in a model, as figures and as a table (`autopar inspect`)."""

import io
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from autopar.capture import capture
from autopar.capture.reference import Loss
from autopar.default_batch import batch_or_default
from autopar.graph.analyse import analyse
from autopar.graph.factors import expr_leaves
from autopar.graph.model_graph import Block, ModelGraph
from autopar.layouts.effects import compute_effects
from autopar.layouts.layout import Setting
from autopar.layouts.sizes import Term, saved_terms, text_of, value_of
from autopar.mesh import AxisPart, Mesh
from autopar.plugin import Dim, Region

HALVES = (AxisPart("half", 2),)
NOWHERE = "(inputs)"
"""Where ops stand that need no gradient and belong to no region."""


@dataclass(frozen=True)
class RegionFigures:
    """One region of one layer, unsplit, for the whole batch. Saved bytes are a sum of products of
    named dims; what lies in no region has neither dims nor parameters."""

    name: str
    ops: int
    dims: tuple[Dim, ...]
    parameters: int
    forward_flops: int
    backward_flops: int
    moved_bytes: int
    saved: Mapping[Term, int]
    saved_bytes: int

    @property
    def splittable(self) -> bool:
        """Whether the region has a dim of its own that two devices can share."""
        return any(d.internal and not d.blocked and d.fits(HALVES) for d in self.dims)


@dataclass(frozen=True)
class BlockFigures:
    """A unique block (or the skeleton), and how many layers are of its kind."""

    name: str
    count: int
    regions: tuple[RegionFigures, ...]
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    buffers: tuple[str, ...]
    opaque: Mapping[str, str]


@dataclass(frozen=True)
class ModelFigures:
    """A whole model. `ties` lists names of one parameter, `frozen` and `unused` names."""

    name: str
    batch: int
    layers: int
    blocks: tuple[BlockFigures, ...]
    parameters: int
    ties: tuple[tuple[str, ...], ...]
    frozen: tuple[str, ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...]

    def total(self, figure: str) -> int:
        """A figure of the regions ("forward_flops", "saved_bytes") summed over all layers."""
        return sum(b.count * getattr(r, figure) for b in self.blocks for r in b.regions)

    @property
    def splittable_share(self) -> float:
        """The share of the parameters that lie in regions with a dim to split over two devices."""
        all_ = sum(b.count * r.parameters for b in self.blocks for r in b.regions)
        some = sum(b.count * r.parameters for b in self.blocks for r in b.regions if r.splittable)
        return some / all_ if all_ else 0.0


def inspect(model: nn.Module, batch: Any = None, loss: Loss | None = None) -> ModelGraph:
    """The analysed graphs of a model, as `autopar.compile` sees them; print its `summary()`.

    `model`, `batch` and `loss` are what `compile` takes; a batch that is left out is made for one
    device. Errors: AutoparError where the model can't be captured.
    """
    given, _ = batch_or_default(model, batch, 1)
    return analyse(capture(model, given, loss))


def figures(model: ModelGraph) -> ModelFigures:
    """Everything that `summary` prints."""
    capture_ = model.capture
    counts = Counter(layer.block for layer in model.layers)
    blocks = tuple(
        _block(block, model, counts[i] if i else 1) for i, block in enumerate(model.blocks)
    )
    return ModelFigures(
        capture_.model_class,
        model.batch_size,
        len(model.layers),
        blocks,
        sum(math.prod(p.shape) for p in capture_.params),
        tuple(p.names for p in capture_.params if len(p.names) > 1),
        tuple(p.names[0] for p in capture_.params if not p.trainable),
        model.unused_weights(),
        capture_.notes,
    )


def _block(block: Block, model: ModelGraph, count: int) -> BlockFigures:
    shapes = {block.params[n.name]: n for n in block.graph.nodes if n.name in block.params}
    regions = [_region(block, region.name, region) for region in block.regions]
    outside = _region(block, None, None)
    return BlockFigures(
        block.name,
        count,
        (*regions, *([outside] if outside.ops else [])),
        tuple((name, tuple(node.meta["val"].shape)) for name, node in shapes.items()),
        tuple(block.captured.buffers.values()),
        block.opaque,
    )


def _region(block: Block, name: str | None, region: Region | None) -> RegionFigures:
    whole = Setting(Mesh(()), (), 1)
    ops = [op for op in block.ops.values() if op.region == name and op.kind != "layer"]
    work = [e for op in ops for e in compute_effects(block, op, None, whole)]
    saved = {} if name is None else saved_terms(block, name)
    sizes = {
        leaf.name: leaf.size
        for value in block.values.values()
        for expr in value.dims
        for leaf in expr_leaves(expr)
    }
    return RegionFigures(
        name or NOWHERE,
        len(ops),
        region.dims if region else (),
        sum(math.prod(p.shape) for p in region.params) if region else 0,
        sum(e.flops for e in work if e.phase == "forward"),
        sum(e.flops for e in work if e.phase == "backward"),
        sum(e.bytes for e in work),
        saved,
        value_of(saved, sizes),
    )


# ---------------------------------------------------------------- as a table


def summarise_model(model: ModelGraph) -> str:
    """The figures as text tables, 120 columns wide."""
    found = figures(model)
    out = io.StringIO()
    console = Console(file=out, width=120, highlight=False, color_system=None)
    console.print(
        f"{found.name}: {found.parameters:,} parameters, {found.layers} layers of "
        f"{len(found.blocks) - 1} kinds, batch {found.batch}; forward "
        f"{found.total('forward_flops'):.4g} flops, backward {found.total('backward_flops'):.4g}, "
        f"saved {found.total('saved_bytes'):,} B; {found.splittable_share:.1%} of the parameters "
        "in regions that two devices can split"
    )
    for block in found.blocks:
        console.print(_table(block))
        for op, reason in block.opaque.items():
            console.print(f"  opaque: {op}: {reason}")
    for title, lines in (
        ("tied", [" = ".join(names) for names in found.ties]),
        ("frozen", list(found.frozen)),
        ("unused", list(found.unused)),
        ("note", list(found.notes)),
    ):
        for line in lines:
            console.print(f"{title}: {line}")
    return out.getvalue()


def _table(block: BlockFigures) -> Table:
    table = Table(title=f"{block.count} × {block.name}", title_justify="left")
    for column in ("region", "ops", "dims", "parameters", "forward flops", "saved bytes"):
        table.add_column(column, overflow="fold")
    for region in block.regions:
        table.add_row(
            region.name,
            str(region.ops),
            ", ".join(map(_dim_text, region.dims)),
            f"{region.parameters:,}",
            f"{region.forward_flops:.4g}",
            text_of(region.saved),
        )
    return table


def _dim_text(dim: Dim) -> str:
    role = "" if dim.name.startswith(dim.role) or dim.role == "other" else f" ({dim.role})"
    mark = "*" if dim.internal and not dim.blocked else ""
    return f"{dim.name}{mark} {dim.size}{role}"

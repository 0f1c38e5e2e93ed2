"""The skeleton cut into parts at layer boundaries: which ops, weights and values lie where.

An op runs in the part of the last layer that it depends on; one that depends on no layer, in the
first part that uses it. Ops on the batch and buffers alone carry no gradient: every part that needs
one runs it. A value used in later parts is handed on from part to part.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch.fx

from autopar.errors import AutoparError
from autopar.graph.model_graph import Block
from autopar.graph.ops import class_of, op_name
from autopar.layouts.layout import Setting
from autopar.mesh import AxisPart, Split


@dataclass(frozen=True)
class Cut:
    """`layers`: the paths of each part's layers. `parts`: in which parts a node of the skeleton
    runs or, of a weight, lies. `boundaries[p]`: the values that part p hands to part p + 1."""

    layers: tuple[tuple[str, ...], ...]
    parts: Mapping[str, tuple[int, ...]]
    boundaries: tuple[tuple[str, ...], ...]

    @property
    def count(self) -> int:
        """How many parts there are."""
        return len(self.layers)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many layers each part has: what makes the cut of one skeleton."""
        return tuple(len(paths) for paths in self.layers)

    def part_of(self, path: str) -> int:
        """The part that holds a layer."""
        return next(p for p, paths in enumerate(self.layers) if path in paths)

    def runs(self, node: str, part: int) -> bool:
        """Whether a node of the skeleton is in a part."""
        return part in self.parts.get(node, ())

    def shared(self, stages: int) -> Mapping[str, tuple[int, ...]]:
        """The weights that lie on several stages, with those stages."""
        where = {n: tuple(sorted({p % stages for p in ps})) for n, ps in self.parts.items()}
        return {n: found for n, found in where.items() if len(found) > 1}

    def passed_on(self, part: int) -> tuple[str, ...]:
        """The values that a part receives and hands on."""
        if not 0 < part < self.count - 1:
            return ()
        return tuple(v for v in self.boundaries[part] if v in self.boundaries[part - 1])


@dataclass(frozen=True)
class Here:
    """One part's view of the skeleton: what of it runs and lies here. `axis`: the stages'."""

    cut: Cut
    part: int
    axis: AxisPart

    def has(self, node: str) -> bool:
        """Whether a node of the skeleton is in the part."""
        return self.cut.runs(node, self.part)

    def sums(self, weight: str) -> Split:
        """The axis over which copies of a weight on several stages sum their gradients."""
        shared = self.cut.shared(self.axis.size)
        return (self.axis,) if weight in shared else ()


def heres(cut: Cut, setting: Setting) -> tuple[Here, ...]:
    """The skeleton as each part has it."""
    assert setting.schedule is not None
    axis = setting.mesh.part(setting.schedule.axis)
    return tuple(Here(cut, part, axis) for part in range(cut.count))


def layer_calls(block: Block) -> tuple[torch.fx.Node, ...]:
    """The skeleton's calls of layers, in order."""
    return tuple(
        n for n in block.graph.nodes if n.name in block.ops and block.ops[n.name].kind == "layer"
    )


def make_cut(block: Block, counts: Iterable[int]) -> Cut:
    """The cut with so many layers in each part.

    Errors: AutoparError where the loss would lie before the last part.
    """
    calls = layer_calls(block)
    layers: list[tuple[str, ...]] = []
    where: dict[str, int] = {}
    start = 0
    for part, count in enumerate(counts):
        chosen = calls[start : start + count]
        layers.append(tuple(str(call.args[1]) for call in chosen))
        where.update({call.name: part for call in chosen})
        start += count
    assert start == len(calls), (start, len(calls))
    free = _free(block)
    _place(block, where, free)
    fixed: dict[str, tuple[int, ...]] = {name: (part,) for name, part in where.items()}
    parts = _spread(block, fixed, free, len(layers))
    writes = [n for n in block.graph.nodes if _writes(n) and n.name not in block.prologue]
    if writes:  # nothing uses a write: it goes with the buffer
        fixed |= {n.name: parts.get(n.args[0].name) or (0,) for n in writes if n.name in free}
        parts = _spread(block, fixed, free, len(layers))
    for node in writes:
        found = parts[node.args[0].name]
        if len(found) > 1:
            raise AutoparError(
                f"{node.args[0].name} is changed by the model and used in parts {found} of it, so "
                "that layers can't lie in stages"
            )
    (loss,) = block.outputs()
    if parts[loss.name] != (len(layers) - 1,):
        raise AutoparError(
            "the loss doesn't depend on the model's last layers, so that layers can't lie in stages"
        )
    parts |= {n.name: (len(layers) - 1,) for n in block.graph.nodes if n.op == "output"}
    return Cut(tuple(layers), parts, _boundaries(block, where, len(layers)))


def _free(block: Block) -> frozenset[str]:
    """What follows from the batch, buffers and constants alone."""
    found = set(block.inputs())
    for node in block.graph.nodes:
        if node.op == "placeholder" and block.is_weight(node.name):
            if node.name not in block.params:
                found.add(node.name)
        elif node.op == "call_function" and node.name in block.ops:
            inputs = {n.name for n in node.all_input_nodes}
            if block.ops[node.name].kind != "layer" and inputs <= found:
                found.add(node.name)
        elif node.op == "call_function" and {n.name for n in node.all_input_nodes} <= found:
            found.add(node.name)
    return frozenset(found)


def _writes(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and class_of(op_name(node)) == "buffer_update"


def _spread(
    block: Block, fixed: Mapping[str, tuple[int, ...]], free: frozenset[str], count: int
) -> dict[str, tuple[int, ...]]:
    """`fixed` with the parts of what every part that needs it has."""
    counted = _behind_counts(block)  # every part makes the counts itself
    parts = dict(fixed)
    for node in reversed(block.graph.nodes):
        weight = node.op == "placeholder" and block.is_weight(node.name)
        if node.name in fixed or not (weight or node.name in free - block.prologue):
            continue
        used = {p for user in node.users for p in parts.get(user.name, ())}
        if weight and node.name in counted:
            used = set(range(count))
        parts[node.name] = tuple(sorted(used))
    return parts


def _behind_counts(block: Block) -> frozenset[str]:
    found: set[str] = set(block.counts)
    for node in reversed(block.graph.nodes):
        if node.name in found:
            found |= {n.name for n in node.all_input_nodes}
    return frozenset(found)


def _place(block: Block, where: dict[str, int], free: frozenset[str]) -> None:
    """Adds the part of every op that isn't free; `where` has the layers' calls."""
    skip = free | block.prologue
    ops = [
        n
        for n in block.graph.nodes
        if n.op == "call_function" and n.name not in skip and n.name not in where
    ]
    for node in ops:
        behind = [where[n.name] for n in node.all_input_nodes if n.name in where]
        if behind:
            where[node.name] = max(behind)
    for node in reversed(ops):
        if node.name not in where:
            used = [where[user.name] for user in node.users if user.name in where]
            where[node.name] = min(used, default=0)
    for node in ops:  # one of several results is where they are made
        source = node.args[0] if node.args else None
        if isinstance(source, torch.fx.Node) and source.name not in block.values:
            where[node.name] = where.get(source.name, where[node.name])


def _boundaries(block: Block, where: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    found: list[list[str]] = [[] for _ in range(count - 1)]
    for node in block.graph.nodes:
        if node.name in where and node.name in block.values:
            last = max((where[user.name] for user in node.users if user.name in where), default=-1)
            for part in range(where[node.name], last):
                found[part].append(node.name)
    return tuple(tuple(values) for values in found)

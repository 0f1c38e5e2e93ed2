"""Regions: ops that share their choices.

A region lives from the birth of an internal dim to its contraction (`ffn` from the first to the
last linear of an MLP, `heads` from q/k/v to the output projection). What needs a gradient and
remains is the block's "stream": norms, residual adds, and the block's boundary. Ops without a
gradient are input ops: they run unsplit but for the batch, and are sliced where they are used.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import torch.fx

from autopar.capture.captured import CapturedGraph
from autopar.capture.opaque_code import code_of
from autopar.graph.batch_mixing import has_pairs, share_makers
from autopar.graph.dims import BlockDims
from autopar.graph.factors import Factor, Product, leaves, resolve
from autopar.graph.flags import Flags
from autopar.graph.model_graph import STREAM
from autopar.graph.ops import VIEW_CLASSES, class_of, drops, is_tensor, op_name, shape_of
from autopar.graph.routes import Route, find_route
from autopar.graph.rules.products import is_attention, seen
from autopar.plugin import Dim, ParamInfo, Region, Role

ROLES: dict[str, Role] = {
    "batch": "batch",
    "sequence": "sequence",
    "hidden": "hidden",
    "heads": "heads",
    "kv_heads": "heads",
    "query_group": "query_group",
    "vocab": "vocab",
    "ffn": "ffn",
    "channels": "channels",
    "experts": "experts",
    "expert_groups": "experts",
}
MIXING = "mixing"
"""The region of ops with a gradient that need the whole batch (a contrastive loss, say)."""


@dataclass
class Internal:
    """An internal region in the making."""

    leaves: list[Factor]
    ops: list[torch.fx.Node]
    role: str = ""
    name: str = ""


class BlockRegions:
    """The regions of one block: `owner` maps op names to region names (input ops are absent)."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        captured: CapturedGraph,
        known: BlockDims,
        flags: Flags,
        prologue: frozenset[str],
    ) -> None:
        self.graph = graph
        self.captured = captured
        self.known = known
        self.flags = flags
        self.prologue = prologue
        self.internal: list[Internal] = []
        self.owner: dict[str, str] = {}

    # ---- what a node carries

    def weight(self, node: torch.fx.Node) -> bool:
        """Whether a node is a parameter, a buffer or a constant."""
        c = self.captured
        return node.name in c.params or node.name in c.buffers or node.name in c.constants

    def tensor_leaves(self, node: torch.fx.Node) -> list[Factor]:
        """All leaves of a node's tensors, with repetitions."""
        return [f for t in self.known.dims.get(node, ()) for d in t for f in leaves(d)]

    def carried(self, node: torch.fx.Node, *, weights: bool = True) -> list[Factor]:
        """The leaves that an op touches, in order."""
        around = [node, *node.all_input_nodes]
        kept = [n for n in around if weights or not self.weight(n)]
        return list(dict.fromkeys(f for n in kept for f in self.tensor_leaves(n)))

    def blocked(self, node: torch.fx.Node) -> dict[Factor, str]:
        """The leaves that must be whole for an op, with reasons."""
        info = self.known.ops[node]
        out = {f: why for dim, why in info.blocked for f in leaves(dim)}
        out |= {f: _PART_OF_SUM for dim in info.contract for f in _parts(dim)}
        for n in [node, *node.all_input_nodes]:
            if is_tensor(n):
                every = self.tensor_leaves(n)
                for f in every:
                    if every.count(f) > 1:
                        out.setdefault(f, f"{n.name} has it twice, as queries by keys")
        return out

    def routes(self) -> dict[str, Route]:
        """Region → how its tokens can be sent to their experts. Dims must be named."""
        found = {name: find_route(self, self._nodes(name)) for name in self._names()}
        return {name: route for name, route in found.items() if route is not None}

    def freeze(self, routes: Mapping[str, Route]) -> tuple[Region, ...]:
        """The regions as plugins see them; the stream first."""
        return tuple(self._region(name, routes.get(name)) for name in self._names())

    def _names(self) -> list[str]:
        return [STREAM, *(internal.name for internal in self.internal)]

    def _nodes(self, name: str) -> list[torch.fx.Node]:
        return [n for n in self.graph.nodes if self.owner.get(n.name) == name]

    def _region(self, name: str, route: Route | None) -> Region:
        nodes = self._nodes(name)
        inner = {f for r in self.internal if r.name == name for f in r.leaves}
        found: dict[Factor, None] = {}
        if name == STREAM:
            for node in (*self.known.inputs, *self.known.outputs):
                if not self.weight(node):
                    found.update(dict.fromkeys(self.tensor_leaves(node)))
        for node in nodes:
            for n in [node, *node.all_input_nodes]:
                if not self.weight(n):
                    found.update(dict.fromkeys(self.tensor_leaves(n)))
        for internal in self.internal:
            if internal.name == name:  # a table's rows, say, lie in no activation
                found.update(dict.fromkeys(internal.leaves))
        dims = tuple(self._dim(f, f in inner, nodes, name) for f in found)
        if route is not None:
            dims = tuple(
                replace(d, rows=route.rows) if d.name in route.experts else d for d in dims
            )
        dropout = any(_drops(node) for node in nodes)
        ops = [n for n in nodes if is_attention(n) and n.name not in self.known.opaque]
        attention = tuple(seen(self.known.dims, n) for n in ops)
        params = self._params(name, route)
        return Region(name, self.captured.name, dims, params, dropout, attention=attention)

    def _dim(self, leaf: Factor, internal: bool, nodes: list[torch.fx.Node], name: str) -> Dim:
        role = ROLES.get(leaf.hint, "other")
        why = {node: self._why_blocked(node, leaf) for node in nodes}
        blocking = [node for node in nodes if why[node]]
        others = [node for node in blocking if not is_attention(node)]
        first = (others or blocking)[:1]
        blocked = f"{why[first[0]]} ({first[0].name})" if first else ""
        if not others:
            misplaced = "" if internal else self._misplaced(leaf, nodes, name)
            elsewhere = self._partly_fused(leaf, nodes) or misplaced
            if elsewhere or not blocking:
                return Dim(leaf.name, leaf.size, role, internal, elsewhere, pads=leaf.pads)
        names = () if others else tuple(node.name for node in blocking)
        return Dim(leaf.name, leaf.size, role, internal, blocked, blocking=names)

    def _why_blocked(self, node: torch.fx.Node, leaf: Factor) -> str:
        """Why a leaf must be whole for an op, or ""."""
        return self.blocked(node).get(leaf) or next(
            (w for dim, w in self.known.ops[node].unlowered if leaf in leaves(dim)), ""
        )

    def _partly_fused(self, leaf: Factor, nodes: list[torch.fx.Node]) -> str:
        """Why a dim that only some rows of a fused weight have can't be split, or "": the other
        rows would be the same on every rank, each with a part of their gradient."""
        for node in nodes:
            for n in node.all_input_nodes:
                if n.name not in self.captured.params:
                    continue
                for dim in self.known.dims[n][0]:
                    if _in_some_segments(dim, leaf):
                        return (
                            f"only a part of the fused weight {self.captured.params[n.name]} has it"
                        )
        return ""

    def _misplaced(self, leaf: Factor, nodes: list[torch.fx.Node], name: str) -> str:
        """Why a carried dim can't be cut at the region's boundary, or ""."""
        for node in nodes:
            crossing = [n for n in node.all_input_nodes if self.owner.get(n.name) != name]
            users = [u for u in node.users if u.name not in self.prologue]
            if any(self.owner.get(u.name) != name for u in users):
                crossing.append(node)
            for n in crossing:
                if not self.weight(n) and not_major(self, n, leaf):
                    return f"it is not the major part of a dim of {n.name}"
        if name == STREAM:  # also what it only passes on
            for n in (*self.known.inputs, *self.known.outputs):
                if not self.weight(n) and not_major(self, n, leaf):
                    return f"it is not the major part of a dim of {n.name}"
        return ""

    def _params(self, name: str, route: Route | None) -> tuple[ParamInfo, ...]:
        out = []
        for node in self.graph.nodes:
            if node.name in self.captured.params:
                regions = [self.owner[u.name] for u in node.users if u.name in self.owner]
                if (regions[0] if regions else STREAM) == name:
                    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
                    out.append(
                        ParamInfo(
                            self.captured.params[node.name],
                            shape_of(node),
                            dtype,
                            node.name in self.flags.needs_grad,
                            _experts_of(route, node),
                        )
                    )
        return tuple(out)


def _experts_of(route: Route | None, weight: torch.fx.Node) -> tuple[str, ...]:
    inside = route is not None and all(user.name in route.span for user in weight.users)
    return route.experts if route is not None and inside else ()


_PART_OF_SUM = "the op sums over it and what it is concatenated with"


def _parts(dim: Sequence[Factor]) -> set[Factor]:
    """The leaves that only some segments of a concatenation have. A sum over a concatenation with
    one of them split would count the others on every rank."""
    found: set[Factor] = set()
    for factor in resolve(dim):
        if factor.segments is not None:
            each = [set(leaves(segment)) for segment in factor.segments]
            found |= each[0].union(*each) - each[0].intersection(*each)
    return found


def _drops(node: torch.fx.Node) -> bool:
    code = code_of(node)
    return drops(node) if code is None else code.random


def _in_some_segments(dim: Product, leaf: Factor) -> bool:
    for factor in resolve(dim):
        if factor.segments is not None and leaf in leaves([factor]):
            having = [leaf in leaves(segment) for segment in factor.segments]
            if not all(having) or any(_in_some_segments(s, leaf) for s in factor.segments):
                return True
    return False


def not_major(regions: BlockRegions, node: torch.fx.Node, leaf: Factor) -> bool:
    """Whether a leaf lies in a tensor's dims other than as the major factor of one."""
    dims = [d for t in regions.known.dims.get(node, ()) for d in t]
    within = [d for d in dims if leaf in leaves(d)]
    return any(resolve(d)[0] is not leaf for d in within)


def find_regions(
    graph: torch.fx.Graph,
    captured: CapturedGraph,
    known: BlockDims,
    flags: Flags,
    prologue: frozenset[str],
) -> BlockRegions:
    """The regions of one block. Ops in `prologue` serve the losses' counts and belong to none."""
    regions = BlockRegions(graph, captured, known, flags, prologue)
    ops = [n for n in graph.nodes if n.op == "call_function" and n.name not in prologue]
    grads = [n for n in ops if n.name in flags.needs_grad or _has_grad_outputs(n, flags)]
    mixing = [n for n in ops if _mixes_samples(regions, n, n in grads)]
    for node in mixing:
        regions.owner[node.name] = MIXING
    regions.internal = _internal_regions(regions, grads)
    if mixing:
        regions.internal.append(Internal([], mixing, MIXING, MIXING))
    for internal in regions.internal:
        for node in internal.ops:
            regions.owner.setdefault(node.name, internal.name)
    _absorb_views(regions, ops)
    _absorb_shares(regions)
    _absorb_scalars(regions, grads)
    _absorb_minor(regions, ops)
    for node in grads:
        if not _of_layer(node):
            regions.owner.setdefault(node.name, STREAM)
    _absorb_shares(regions)
    _absorb_orders(regions, ops)
    _join_outputs(regions, ops)
    return regions


def _join_outputs(regions: BlockRegions, ops: list[torch.fx.Node]) -> None:
    """The outputs of an op with several are in its region: no layout lies between."""
    for node in ops:
        if op_name(node) == "getitem" and not _of_layer(node):
            source = node.args[0]
            assert isinstance(source, torch.fx.Node)
            if source.name in regions.owner:
                regions.owner[node.name] = regions.owner[source.name]
            else:
                regions.owner.pop(node.name, None)


def _mixes_samples(regions: BlockRegions, node: torch.fx.Node, grad: bool) -> bool:
    """Whether an op runs on the whole batch only: it gets a region of its own, so that what comes
    before and after can still split the batch. Of ops on inputs, those that make or take pairs of
    samples (labels compared with each other)."""
    if _of_layer(node):
        return False
    if grad:
        return any(f.hint == "batch" for f in regions.blocked(node))
    return node.name in regions.flags.from_batch and any(
        has_pairs(regions.known, n) for n in [node, *node.all_input_nodes]
    )


def _absorb_orders(regions: BlockRegions, ops: list[torch.fx.Node]) -> None:
    """Sorted dims can't cross a region's boundary: what is sorted, and where positions in it come
    from, is made in the region that uses it."""
    for node in reversed(ops):
        near = any(_sorted(regions, n) for n in (node, *node.all_input_nodes))
        if near and node.name not in regions.owner:
            users = [regions.owner[u.name] for u in node.users if u.name in regions.owner]
            if users:
                regions.owner[node.name] = users[0]


def _sorted(regions: BlockRegions, node: torch.fx.Node) -> bool:
    dims = [d for t in regions.known.dims.get(node, ()) for d in t]
    return any(factor.order_of is not None for d in dims for factor in resolve(d))


def _of_layer(node: torch.fx.Node) -> bool:
    """Whether a node is a layer call or one of its outputs: its layout is the layer's business."""
    source = node.args[0] if op_name(node) == "getitem" else node
    return isinstance(source, torch.fx.Node) and class_of(op_name(source)) == "layer"


def _has_grad_outputs(node: torch.fx.Node, flags: Flags) -> bool:
    return isinstance(node.meta["val"], (list, tuple)) and any(
        u.name in flags.needs_grad for u in node.users
    )


ATTENTION_OWN = frozenset({"heads", "kv_heads", "query_group"})
"""Hints of dims that attention splits even where they cross a block's boundary (biases by head)."""


def _external(regions: BlockRegions) -> set[Factor]:
    known, out = regions.known, set()
    for node in known.inputs:
        if not regions.weight(node):
            out |= set(regions.tensor_leaves(node))
    for node in known.outputs:
        out |= set(regions.tensor_leaves(node))
    for node in known.ops:
        if class_of(op_name(node)) == "layer" or regions.owner.get(node.name) == MIXING:
            out |= set(regions.carried(node))
    return {leaf for leaf in out if leaf.hint not in ATTENTION_OWN}


def _internal_regions(regions: BlockRegions, ops: list[torch.fx.Node]) -> list[Internal]:
    external = _external(regions)
    carriers: dict[Factor, list[torch.fx.Node]] = {}
    blocked: set[Factor] = set()
    contracted: set[Factor] = set()
    ops = [n for n in ops if regions.owner.get(n.name) != MIXING]
    for node in ops:
        for leaf in regions.carried(node):
            if leaf not in external:
                carriers.setdefault(leaf, []).append(node)
        blocked |= set(regions.blocked(node))
        contracted |= {f for dim in regions.known.ops[node].contract for f in leaves(dim)}
    order = {node: i for i, node in enumerate(ops)}
    born = sorted(
        (f for f in carriers if f not in blocked and f in contracted),
        key=lambda f: (order[carriers[f][0]], -len(carriers[f])),
    )
    overlap: nx.Graph[Factor] = nx.Graph()
    overlap.add_nodes_from(born)
    for i, f in enumerate(born):
        for g in born[:i]:
            shared = len(set(carriers[f]) & set(carriers[g]))
            if 2 * shared > min(len(carriers[f]), len(carriers[g])):
                overlap.add_edge(f, g)
    found = []
    for component in nx.connected_components(overlap):
        inner = [f for f in born if f in component]
        nodes = sorted({n for f in inner for n in carriers[f]}, key=lambda n: order[n])
        if _of_samples(regions, nodes):
            found.append(Internal(inner, nodes, _role(inner, nodes)))
    found.sort(key=lambda r: order[r.ops[0]])
    counts: dict[str, int] = {}
    for internal in found:
        stem = "experts" if _of_experts(regions, internal) else internal.role
        counts[stem] = counts.get(stem, 0) + 1
        internal.name = stem if counts[stem] == 1 else f"{stem}_{counts[stem]}"
    return found


def _of_samples(regions: BlockRegions, nodes: list[torch.fx.Node]) -> bool:
    """Whether ops work on the batch, and not on weights alone. A batch of one sample has no dim:
    then what is computed from it counts."""

    def has_batch(ops: Iterable[torch.fx.Node]) -> bool:
        return any(f.hint == "batch" for n in ops for f in regions.carried(n, weights=False))

    if has_batch(nodes):
        return True
    return not has_batch(regions.known.ops) and any(
        n.name in regions.flags.from_batch for n in nodes
    )


def _of_experts(regions: BlockRegions, internal: Internal) -> bool:
    return any(f.hint == "experts" for n in internal.ops for f in regions.carried(n))


def _role(inner: list[Factor], nodes: list[torch.fx.Node]) -> str:
    classes = {class_of(op_name(n)) for n in nodes}
    if "attention" in classes:
        return "heads"
    if any(f.hint == "vocab" for f in inner):
        return "vocab"
    return "channels" if "convolution" in classes else "ffn"


def _absorb_views(regions: BlockRegions, ops: list[torch.fx.Node]) -> None:
    """Views at a region's edge belong to their consumers' region; so do casts before them."""
    for node in reversed(ops):
        if node.name in regions.owner or class_of(op_name(node)) not in VIEW_CLASSES:
            continue
        users = {regions.owner.get(u.name) for u in node.users}
        if len(users) == 1 and None not in users:
            regions.owner[node.name] = str(users.pop())


def _absorb_shares(regions: BlockRegions) -> None:
    """Sums of which an op takes each rank's own part are made in its region."""
    for node, user in share_makers(regions.known).items():
        if user.name in regions.owner:
            regions.owner.setdefault(node.name, regions.owner[user.name])


def _absorb_scalars(regions: BlockRegions, ops: list[torch.fx.Node]) -> None:
    """What a loss goes through (a division by its count, say) stays with it."""
    for node in ops:
        if node.name in regions.owner or not is_tensor(node) or shape_of(node):
            continue
        makers = [regions.owner[n.name] for n in node.all_input_nodes if n.name in regions.owner]
        if makers:
            regions.owner[node.name] = makers[0]


def _absorb_minor(regions: BlockRegions, ops: list[torch.fx.Node]) -> None:
    """A region may be entered and left only where the batch and the sequence are major parts of
    dims: neighbours join it until that holds."""
    carried = {
        f for n in ops for f in regions.carried(n) if f.hint in ("batch", "sequence") and f.size > 1
    }

    def minor(node: torch.fx.Node) -> bool:
        return not regions.weight(node) and any(not_major(regions, node, f) for f in carried)

    changed = True
    while changed:
        changed = False
        for node in ops:
            if node.name in regions.owner or class_of(op_name(node)) == "layer":
                continue
            near = [
                regions.owner[n.name]
                for n in node.all_input_nodes
                if n.name in regions.owner and minor(n)
            ]
            if minor(node):
                near += [regions.owner[u.name] for u in node.users if u.name in regions.owner]
            if near:
                regions.owner[node.name] = near[0]
                changed = True

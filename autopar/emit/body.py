"""The statements of one method: a walk over a graph in which every op becomes an expression.

An expression that is used once, soon and cheaply is written where it is used; the others get a
name. A value that is needed in another layout than it was made in is converted by explicit calls.
"""

import re
from collections.abc import Iterable

import torch.fx

from autopar.capture.opaque_code import code_of
from autopar.emit.again import run_again
from autopar.emit.dropout import masks_line
from autopar.emit.names import Lengths, Names, wish
from autopar.emit.opaque import call_text
from autopar.emit.printing import Printer, segment_bounds
from autopar.emit.text import atom
from autopar.graph.again import pieces
from autopar.graph.factors import DimExpr, expr_leaves
from autopar.graph.ops import arguments, class_of, drops, op_name, shape_of
from autopar.graph.rules.shapes import slice_bounds
from autopar.layouts.convert import EXCHANGES, Step
from autopar.layouts.flow import Flow, normal
from autopar.layouts.layout import Layout
from autopar.layouts.program import runs_alone
from autopar.layouts.typing import input_layout

INLINE_LENGTH = 72
INLINE_KINDS = frozenset({"pointwise", "view", "permute", "reduction"})
NAMED_OPS = frozenset({"clone"})


class Body:
    """Statements of a forward (or of `counts`) over one flow."""

    def __init__(
        self, flow: Flow, names: Names, lengths: Lengths, skip: frozenset[str] = frozenset()
    ) -> None:
        """`skip`: ops that this method doesn't print."""
        self.flow, self.names, self.lengths, self.skip = flow, names, lengths, skip
        self.block = flow.block
        self.lines: list[str] = []
        self.texts: dict[tuple[str, Layout], str] = {}
        self.outputs: dict[str, list[str]] = {}
        self.products: dict[str, str] = {}
        self.routings: dict[tuple[str, Layout], str] = {}
        self.printer = Printer(self)
        self.region: str | None = None
        self.keep: frozenset[str] = frozenset()
        """Values that this method returns: they have names."""

    # ---- what the printer asks for

    def operand(self, node: torch.fx.Node, source: torch.fx.Node) -> str:
        """The text of an input in the layout that the op needs, converting it where it must."""
        return self.converted(source.name, self.flow.need(node, source.name))

    def out_shape(self, node: torch.fx.Node) -> list[str]:
        """Local sizes of the result's dims."""
        layout = self.made(node.name)
        dims = self.block.values[node.name].dims
        if layout.dispatched:  # only the run knows how many rows came in
            return ["-1", *(self.lengths.text(expr, layout) for expr in dims[1:])]
        return [self.lengths.text(expr, layout) for expr in dims]

    def pieces(self, node: torch.fx.Node) -> list[str]:
        """Local sizes of a split's outputs along its dim."""
        dim = arguments(node)["dim"]
        users = {u.args[1]: u for u in node.users}
        out = []
        for index, value in enumerate(node.meta["val"]):
            if index in users:
                name = users[index].name
                expr = self.block.values[name].dims[dim]
                out.append(self.lengths.text(expr, self.made(name)))
            else:
                out.append(str(int(value.shape[dim])))
        return out

    def split_axes(self, node: torch.fx.Node, source: torch.fx.Node, dim: int) -> tuple[str, ...]:
        """The axes over which an input's dim is split as the op takes it."""
        layout = self.flow.need(node, source.name)
        (expr,) = (self.block.values[source.name].dims[dim],)
        found = [part for leaf in expr_leaves(expr) for part in layout.split(leaf.name)]
        return tuple(part.axis for part in found)

    def padded(self, node: torch.fx.Node, source: torch.fx.Node, dim: int) -> str:
        """The whole size of an input's dim as text where ranks' pieces are padded, or ""."""
        layout, expr = self.flow.need(node, source.name), self.block.values[source.name].dims[dim]
        pads = any(leaf.padded(layout.split(leaf.name)) for leaf in expr_leaves(expr))
        return self.lengths.text(expr, Layout()) if pads else ""

    def bounds(self, node: torch.fx.Node) -> tuple[int, int | None]:
        """A slice's local start and stop (None: to the end)."""
        args = arguments(node)
        source = args["self"]
        dim = args["dim"] % len(shape_of(source))
        whole = shape_of(source)[dim]
        start, stop = slice_bounds(args, whole)
        layout, setting = self.flow.need(node, source.name), self.flow.setting

        def local(expr: DimExpr) -> int:
            return setting.local_length(expr, layout)

        def full(expr: DimExpr) -> int:
            return setting.local_length(expr, Layout())

        expr = self.block.values[source.name].dims[dim]
        low, high = segment_bounds(expr, local, full, start, stop)
        return low, None if stop == whole else high

    def is_opaque(self, node: torch.fx.Node) -> bool:
        """Whether the op runs as it was captured, with its literal arguments."""
        return bool(self.block.ops[node.name].opaque)

    def local_shape(self, node: torch.fx.Node, source: torch.fx.Node) -> tuple[int, ...]:
        """The local shape of an input as the op takes it."""
        dims = self.block.values[source.name].dims
        return self.flow.setting.local_shape(dims, self.flow.need(node, source.name))

    def form(self, node: torch.fx.Node) -> tuple[str, tuple[str, ...]] | None:
        """The function that runs the op in its strategy's way, and the axes that it takes."""
        typing = self.flow.typings.get(node.name)
        if typing is None or typing.form is None or not typing.form.function:
            return None
        axes = tuple(part.axis for part in typing.form.axes)
        return typing.form.function.split(":", 1)[1], axes

    def local_out(self, node: torch.fx.Node) -> tuple[int, ...]:
        """The local shape of the op's result."""
        return self.flow.setting.local_shape(
            self.block.values[node.name].dims, self.made(node.name)
        )

    # ---- values

    def made(self, name: str) -> Layout:
        """The layout in which a value exists first."""
        if name in self.flow.made:
            return self.flow.made[name]
        if name in self.flow.params:
            return self.flow.params[name]
        return input_layout(self.block.values[name], self.flow.setting)

    def put(self, name: str, text: str) -> None:
        """Remember the text of a value as it was made."""
        self.texts[name, self.made(name)] = text

    def converted(self, name: str, need: Layout) -> str:
        """The text of a value in a layout; prints the conversion on its first use."""
        if (name, need) not in self.texts:
            text = self.texts[name, self.made(name)]
            stem = text if text.isidentifier() else wish(self._node(name))
            for step in self.flow.conversions[name, need]:
                if step.function in EXCHANGES:
                    text = self._exchange(step, name, need, text)
                    continue
                text = step_text(step, text)
            if (name, need) in self.routings:
                text = f"{self.routings[name, need]}.ends"
            elif self.flow.conversions[name, need]:
                variable = self.names.fresh(f"{stem}_{_suffix(self.flow, name, need)}")
                self.lines.append(f"{variable} = {text}")
                text = variable
            self.texts[name, need] = text
        return self.texts[name, need]

    def _exchange(self, step: Step, name: str, need: Layout, text: str) -> str:
        """Rows that travel to their experts or back, along a route that is found once."""
        if step.function == "route":
            axes = self.printer.axis(tuple(part.axis for part in step.parts))
            variable = self.names.fresh("routing")
            self.lines.append(f"{variable} = route({text}, {axes})")
            self.routings[name, need] = variable
            return variable
        route, typings = self.block.routes[str(self.block.ops[name].region)], self.flow.typings
        (ends,) = {
            typings[n].needs[route.ends] for n in route.on_rows if route.ends in typings[n].needs
        }
        ends = normal(self.block.values[route.ends], ends)
        self.converted(route.ends, ends)
        return f"{step.function}({text}, {self.routings[route.ends, ends]})"

    def _node(self, name: str) -> torch.fx.Node:
        return self.block.node(name)

    # ---- statements

    def run(self, nodes: Iterable[torch.fx.Node]) -> None:
        """Print these ops in order; those of a region that runs again alone as one function."""
        alone = [name for name, c in self.flow.choices.items() if runs_alone(c)]
        sets = [
            frozenset(name for name, op in self.block.ops.items() if op.region == region)
            for region in alone
        ]
        for is_function, piece in pieces(nodes, sets):
            if is_function:
                run_again(self, piece)
            else:
                for node in piece:
                    self.op(node)

    def op(self, node: torch.fx.Node) -> None:
        """Print one op: a statement, or a text kept for its only use."""
        name = op_name(node)
        if name == "getitem":
            self.put(node.name, self.outputs[node.args[0].name][node.args[1]])  # type: ignore[union-attr,index]
            return
        self._heading(node)
        if class_of(name) == "buffer_update" and not self.is_opaque(node):
            self._update(node)
            return
        if isinstance(node.meta["val"], (list, tuple)):
            self._several(node)
            return
        fused = self._with_bias(node)
        text = fused or self.printer.text(node)
        if self._is_product_for_bias(node):
            self.products[node.name] = text
        if _is_name(text) or self._inline(node, text):
            self.put(node.name, text)
            return
        variable = self.names.fresh(wish(node))
        statement = f"{variable} = {text}{self._comment(node)}"
        data = self.flow.setting.data
        opened = None if self.is_opaque(node) else masks_line(node, self.made(node.name), data)
        if opened is not None:
            self.lines.append(opened)
            statement = f"    {statement}"
        self.lines.append(statement)
        self.put(node.name, variable)

    def _update(self, node: torch.fx.Node) -> None:
        """A buffer changes in training, as it does in the plain model's."""
        buffer = self.printer.arg(node, node.args[0])
        words = [self.printer.arg(node, a) for a in node.args[1:]]
        words += [f"{k}={self.printer.arg(node, v)}" for k, v in node.kwargs.items()]
        self.lines += ["if self.training:", f"    {buffer}.{op_name(node)}({', '.join(words)})"]
        self.put(node.name, buffer)

    def _several(self, node: torch.fx.Node) -> None:
        users = {u.args[1]: u for u in node.users}
        count = len(node.meta["val"])
        code = code_of(node)
        variables = [
            self.names.fresh(wish(users[i]) if i in users else "_unused") for i in range(count)
        ]
        left = ", ".join(variables) + ("," if count == 1 else "")
        if code is not None:
            inputs: tuple[torch.fx.Node, ...] = tuple(node.args[0])  # type: ignore[arg-type]
            text = f"self.run({call_text(code, [self.operand(node, n) for n in inputs])})"
        else:
            text = self.printer.text(node)
        self.lines.append(f"{left} = {text}")
        self.outputs[node.name] = variables

    def _heading(self, node: torch.fx.Node) -> None:
        region = self.block.ops[node.name].region
        if region is None or region == self.region or not self.flow.choices:
            return
        self.region = region
        self.lines.append(self.heading(region))

    def heading(self, region: str) -> str:
        """The comment above a region's statements."""
        parts = [
            f"{' · '.join(p.axis for p in split)} splits {dim}"
            for dim, split in self.flow.choices[region].splits
        ]
        again = ", recomputed in the backward" if runs_alone(self.flow.choices[region]) else ""
        return f"# ---- {region}: {', '.join(parts) or 'nothing is split'}{again}"

    def _inline(self, node: torch.fx.Node, text: str) -> bool:
        kind, name = class_of(op_name(node)), op_name(node)
        users = [u for u in node.users if u.name not in self.skip]
        if len(users) != 1 or name in NAMED_OPS or drops(node) or node.name in self.keep:
            return False
        if any(map(_changes, node.all_input_nodes)):
            return False
        (user,) = users
        if user.op != "call_function" or self.flow.need(user, node.name) != self.made(node.name):
            return False
        if self._is_product_for_bias(node):  # also into the next region: else it runs twice
            return True
        ops = self.block.ops
        if ops[user.name].region != ops[node.name].region and ops[user.name].region is not None:
            return False
        if class_of(op_name(user)) == "attention" or op_name(user) in ("split", "chunk"):
            return False
        return kind in INLINE_KINDS and len(text) <= INLINE_LENGTH

    def _is_product_for_bias(self, node: torch.fx.Node) -> bool:
        """A contraction whose only use is the add of a bias, with nothing between."""
        if class_of(op_name(node)) != "contraction" or len(node.users) != 1:
            return False
        user = next(iter(node.users))
        if user.op != "call_function" or op_name(user) != "add":
            return False
        other = arguments(user)["other"]
        return (
            arguments(user)["self"] is node
            and isinstance(other, torch.fx.Node)
            and other.name in self.block.params
            and len(shape_of(other)) == 1
            and self.flow.need(user, node.name) == self.made(node.name)
            and self.flow.need(user, other.name) == self.made(other.name)
            and not self._leaves_function(node, user)
        )

    def _leaves_function(self, node: torch.fx.Node, user: torch.fx.Node) -> bool:
        """Whether a value crosses the boundary of a region that is a function of its own."""
        here, there = self.block.ops[node.name].region, self.block.ops[user.name].region
        choices = self.flow.choices
        return here != there and any(
            r is not None and r in choices and runs_alone(choices[r]) for r in (here, there)
        )

    def _with_bias(self, node: torch.fx.Node) -> str | None:
        """A linear and its bias as one call."""
        if op_name(node) != "add":
            return None
        args = arguments(node)
        product = args["self"]
        if not isinstance(product, torch.fx.Node) or product.name not in self.products:
            return None
        text, bias = self.products[product.name], self.operand(node, args["other"])
        if op_name(product) == "linear":
            return f"{text[:-1]}, {bias})"
        return f"{text} + {atom(bias)}"

    def _comment(self, node: torch.fx.Node) -> str:
        if class_of(op_name(node)) not in ("contraction", "attention", "embedding"):
            return ""
        layout = self.made(node.name)
        partial = [p.axis for p in sorted(layout.partial)]
        note = f", partial over {' · '.join(partial)}" if partial else ""
        return f"  # [{', '.join(self.out_shape(node))}]{note}"


def _is_name(text: str) -> bool:
    """Whether a text is a variable, or a path from self."""
    return re.fullmatch(r"\w+|self(\.\w+|\[\w+\])*", text) is not None and not text[0].isdigit()


def _changes(node: torch.fx.Node) -> bool:
    """Whether a tensor is written to: what is read from it must be read where it stands."""
    kinds = (class_of(op_name(u)) for u in node.users if u.op == "call_function")
    return "buffer_update" in kinds


def step_text(step: Step, text: str) -> str:
    """The call of one step of a conversion."""
    where = "" if step.dim is None else f"dim={step.dim}, "
    if step.to is not None:
        where = f"split_dim={step.to}, gather_dim={step.dim}, "
    axes = ", ".join(f'"{part.axis}"' for part in step.parts)
    balanced = ""
    if step.balanced is not None:
        balanced = ", balanced=True" if step.to is None else f", balanced_dim={step.balanced}"
    return f"{step.function}({text}, {where}axis=self.mesh[{axes}]{balanced})"


def _suffix(flow: Flow, name: str, need: Layout) -> str:
    """What happened to a value, in a word."""
    functions = [step.function for step in flow.conversions[name, need]]
    if any(f in ("all_gather", "unshard") for f in functions):
        return "full"
    if any(f in EXCHANGES for f in functions):
        return "sent" if functions[-1] == "dispatch" else "back"
    if "all_to_all" in functions:
        return "swapped"
    if any("reduce" in f for f in functions):
        return "sum" if "reduce_scatter" not in functions else "local"
    return "local" if any(f in ("shard", "local_part") for f in functions) else "shared"

"""The root's forward: like any body, with calls of layers, in loops where layers follow alike."""

from collections.abc import Mapping

import torch.fx

from autopar.emit.again import checkpoint_text
from autopar.emit.body import Body
from autopar.emit.names import Lengths, Names, wish
from autopar.emit.parts import Part
from autopar.graph.chains import carried_argument, index_of
from autopar.graph.ops import class_of, op_name
from autopar.layouts.flow import Flow


class RootBody(Body):
    """A body that can call layers, of the whole model or a part. `class_of_path`: each layer's
    emitted class."""

    def __init__(
        self,
        flow: Flow,
        names: Names,
        lengths: Lengths,
        class_of_path: Mapping[str, str],
        part: Part,
        again: Mapping[str, int],
    ) -> None:
        """`again`: layers that run again in the backward, with how many of them do so together."""
        nodes = flow.block.graph.nodes
        elsewhere = frozenset(n.name for n in nodes if n.op != "output" and not part.has(n.name))
        super().__init__(flow, names, lengths, flow.block.prologue | elsewhere)
        self.keep = frozenset(part.gives)
        self.received: set[str] = set()
        self.class_of_path = class_of_path
        self.again = again
        calls = [n for n in nodes if _is_call(n) and part.has(n.name)]
        self.runs = {run[0].name: run for run in _runs(calls, self)}
        self.inside = {n.name for run in self.runs.values() for n in run[1:]}

    def op(self, node: torch.fx.Node) -> None:
        """Print one op; a run of layers is printed at its first call."""
        if not _is_call(node):
            source = node.args[0] if node.args else None
            if (
                op_name(node) == "getitem"
                and isinstance(source, torch.fx.Node)
                and (_is_call(source))
            ):
                if source.name in self.outputs:
                    self.put(node.name, self.outputs[source.name][node.args[1]])  # type: ignore[index]
                return
            super().op(node)
        elif node.name in self.runs:
            self._run(self.runs[node.name])

    def receive(self, name: str) -> str:
        """Gives a value that comes from the part before a variable: an argument."""
        node = self.block.node(name)
        source = node.args[0] if node.args else None
        of_layer = isinstance(source, torch.fx.Node) and _is_call(source)
        variable = self.names.fresh("hidden_states" if of_layer else wish(node))
        self.put(name, variable)
        self.received.add(variable)
        return variable

    def _users_here(self, node: torch.fx.Node) -> list[str]:
        here = [user.name for user in node.users if user.name not in self.skip]
        return [*here, *(["the next part"] if node.name in self.keep else [])]

    def _run(self, run: list[torch.fx.Node]) -> None:
        first, last = run[0], run[-1]
        self.region = None
        path = str(first.args[1])
        together = min(self.again.get(path, 0), len(run))
        kept = " of each" if together == 1 else f" of {together} at a time"
        note = f", recomputed in the backward: the input{kept} is kept" if together else ""
        self.lines.append(f"# ---- layers{note}")
        tensors: tuple[torch.fx.Node, ...] = tuple(first.args[0])  # type: ignore[arg-type]
        texts = [self.operand(first, t) for t in tensors]
        container = path_text(path.rpartition(".")[0])
        if len(run) == 1:
            names = [self.names.fresh("hidden_states") for _ in first.meta["val"]]
            call = f"{path_text(path)}({', '.join(texts)})"
            if path in self.again:
                call = checkpoint_text(path_text(path), texts)
            self.lines.append(f"{', '.join(names)} = {call}")
            self.outputs[last.name] = names
            return
        carried = carried_argument(run[0], run[1])
        assert carried is not None
        name = texts[carried]
        if name not in self.received or len(self._users_here(tensors[carried])) > 1:
            name = self.names.fresh("hidden_states")
            self.lines.append(f"{name} = {texts[carried]}")
            texts[carried] = name
        start = index_of(first)
        stop = start + len(run)
        if together > 1:
            self.lines.append(f"for i in range({start}, {stop}, {together}):")
            end = f"min(i + {together}, {stop})" if len(run) % together else f"i + {together}"
            self.lines.append(f"    layers = {container}[i : {end}]")
            call = checkpoint_text("run_layers", ["layers", str(carried), *texts])
        else:
            self.lines.append(f"for i in range({start}, {stop}):")
            call = f"{container}[i]({', '.join(texts)})"
            if together:
                call = checkpoint_text(f"{container}[i]", texts)
        self.lines.append(f"    {name} = {call}")
        self.outputs[last.name] = [name]


def _is_call(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and class_of(op_name(node)) == "layer"


def path_text(path: str) -> str:
    """A module path as Python: "transformer.h" → self.transformer.h."""
    return "self" + "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in path.split(".") if p)


def _runs(calls: list[torch.fx.Node], body: RootBody) -> list[list[torch.fx.Node]]:
    runs: list[list[torch.fx.Node]] = []
    for call in calls:
        if runs and _follows(runs[-1], call, body):
            runs[-1].append(call)
        else:
            runs.append([call])
    return runs


def _follows(run: list[torch.fx.Node], call: torch.fx.Node, body: RootBody) -> bool:
    before, path = run[-1], str(call.args[1])
    if body.class_of_path[path] != body.class_of_path[str(before.args[1])]:
        return False
    if body.again.get(path) != body.again.get(str(before.args[1])):
        return False
    if path.rpartition(".")[0] != str(before.args[1]).rpartition(".")[0]:
        return False
    if not path.rpartition(".")[2].isdigit():
        return False
    carried = carried_argument(before, call)
    if carried is None or index_of(call) != index_of(before) + 1:
        return False
    if len(run) > 1 and carried != carried_argument(run[0], run[1]):
        return False
    value = next(iter(before.users))
    return body.flow.need(call, value.name) == body.made(value.name)

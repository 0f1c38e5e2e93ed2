"""Program → Python source: one class per unique block and choice, a root class, and the facts that
the runtime needs."""

import re
from collections.abc import Iterable, Mapping

import torch.fx

from autopar.emit.again import CHECKPOINT
from autopar.emit.body import Body
from autopar.emit.declarations import unused_lines, weight_lines
from autopar.emit.forms import form_functions, form_imports
from autopar.emit.gradient_sync import own_syncs, state_lines, sync_imports, sync_method
from autopar.emit.legend import inside
from autopar.emit.names import Lengths, Names, reserved_names
from autopar.emit.opaque import opaque_node, places_lines
from autopar.emit.parts import Part, parts_of, schedule_facts, schedule_imports
from autopar.emit.root import RootBody
from autopar.emit.sharding import shard_method
from autopar.emit.text import strings, wrapped
from autopar.errors import AutoparError
from autopar.graph.model_graph import Block
from autopar.graph.ops import shape_of
from autopar.layouts.effects import closed_parts
from autopar.layouts.flow import Flow
from autopar.layouts.layout import names
from autopar.layouts.program import Program, run_together, splits_of

RUNTIME = (
    "Container",
    "OpaqueLayer",
    "all_gather",
    "all_reduce",
    "all_reduce_partial",
    "all_to_all",
    "cat",
    "combine",
    "declare",
    "declare_layers",
    "dispatch",
    "enter",
    "grouped_mm",
    "keep_state",
    "local_part",
    "masks_apart",
    "once",
    "reduce_scatter",
    "route",
    "run_layers",
    "shard",
    "shard_fully",
    "shard_state",
    "split",
    "split_padded",
    "sync_batch_norm",
    "unshard",
    "vocab_cross_entropy",
    "vocab_embedding",
)
RESERVED = (*RUNTIME, "checkpoint")


def emit_module(program: Program, summary: Iterable[str] = ()) -> str:
    """The source of a training module. `summary`: lines for its docstring."""
    lengths = Lengths(program.setting)
    classes = variants(program)
    bodies = [_block_class(program, name, paths, lengths) for name, paths in classes.items()]
    parts = parts_of(program)
    roots = [_root_class(program, part, classes, lengths) for part in parts]
    code = "\n\n\n".join("\n".join(lines) for lines in [*bodies, *roots])
    facts = "\n".join([*_facts(program, parts), *schedule_facts(program, parts)])
    used = [
        name
        for name in RUNTIME  # not methods, like Tensor.split or the module's own shard
        if re.search(rf"(?<!\.)(?<!def )\b{name}\(", code)
        or name == "Container"
        or f"({name}):" in code
        or re.search(rf"^ *{name}, |\({name}, ", code, re.MULTILINE)
    ]
    title = f"{program.model.capture.model_class}, written by autopar."
    head = [
        '"""' + "\n".join([title, *summary, *inside(used)]) + '\n"""',
        "",
        "import torch",
        "import torch.nn.functional as F",
        "",
        *([CHECKPOINT, ""] if "checkpoint(" in code else ()),
        *wrapped(f"from autopar.runtime import ({', '.join(used)})", 0),
        *schedule_imports(program),
        *sync_imports([own_syncs(program, part) for part in parts]),
        *form_imports(program),
        "",
        *_constants(program, lengths),
    ]
    if "torch." not in code.replace("torch.nn", ""):
        head.remove("import torch")
    if "F." not in code:
        head.remove("import torch.nn.functional as F")
    return "\n".join(head) + "\n\n\n" + code + "\n\n\n" + facts + "\n"


def variants(program: Program) -> Mapping[str, tuple[str, ...]]:
    """Class name → the layers that are of it."""
    found: dict[tuple[int, object], tuple[Block, list[str]]] = {}
    for path, block in program.model.instances():
        if path:
            key = (id(block), splits_of(program.choices[path]))
            found.setdefault(key, (block, []))[1].append(path)
    schedule = program.setting.schedule
    function = [] if schedule is None else [schedule.function.split(":", 1)[1]]
    function += [name for _, name in form_functions(program)]
    names = Names([*(part.name for part in parts_of(program)), *RESERVED, *function])
    return {names.fresh(block.name): tuple(paths) for block, paths in found.values()}


def _block_class(
    program: Program, name: str, paths: tuple[str, ...], lengths: Lengths
) -> list[str]:
    flow = program.flows[paths[0]]
    block, prefix = flow.block, f"{paths[0]}."
    transient = frozenset(
        name.removeprefix(prefix) for name in program.model.capture.transient_buffers
    )
    names = Names(reserved_names(block, flow.setting, RESERVED))
    body = Body(flow, names, lengths)
    arguments = _place_inputs(body, block.inputs(), block.inputs())
    _place_weights(body)
    body.run(n for n in block.graph.nodes if n.op == "call_function")
    result = next(n for n in reversed(block.graph.nodes) if n.op == "output")
    returned = [body.operand(result, out) for out in block.outputs()]
    tied = {n: p.names for p in program.model.capture.params for n in p.names}
    weights: dict[str, tuple[str, ...]] = {
        node: (own, *(n.removeprefix(prefix) for n in tied[prefix + own] if n != prefix + own))
        for node, own in block.params.items()
    }
    weights |= {node: (own,) for node, own in block.captured.buffers.items()}
    base = "OpaqueLayer" if opaque_node(block) else "Container"
    lines = [f"class {name}({base}):", f'    """{_span(paths)}"""', ""]
    lines += places_lines(flow)
    lines += _init(weight_lines(flow, lengths, weights, transient), [])
    lines += ["", f"    def forward(self, {', '.join(arguments)}):"]
    for line in body.lines:
        lines += wrapped(line, 8)
    return [*lines, f"        return {', '.join(returned)}"]


def _root_class(
    program: Program, part: Part, classes: Mapping[str, tuple[str, ...]], lengths: Lengths
) -> list[str]:
    flow, capture = program.flows[""], program.model.capture
    block = flow.block
    class_of_path = {path: name for name, paths in classes.items() for path in paths}
    names = Names({*reserved_names(block, flow.setting, RESERVED), "layer", "i", "counts"})
    again = {path: n for path in class_of_path if (n := run_together(program, path))}
    body = RootBody(flow, names, lengths, class_of_path, part, again)
    received = [body.receive(name) for name in part.receives]
    arguments = _place_inputs(body, block.inputs(), capture.batch_leaves)
    _place_weights(body)
    for index, count in enumerate(block.counts):
        body.put(count, f"counts[{index}]")
    body.run(n for n in block.graph.nodes if n.op == "call_function" and n.name not in body.skip)
    result = next(n for n in reversed(block.graph.nodes) if n.op == "output")
    if part.is_last:
        (loss,) = block.outputs()
        returned = body.operand(result, loss)
    else:
        returned = f"({', '.join(body.texts[name, body.made(name)] for name in part.gives)},)"
    lines = [f"class {part.name}(Container):", f'    """{part.doc}"""', ""]
    tied = {p.names[0]: p.names for p in capture.params}
    weights = {n: tied[own] for n, own in block.params.items()}
    weights |= {n: (own,) for n, own in block.captured.buffers.items()}
    weights = {node: own for node, own in weights.items() if part.has(node)}
    declared = weight_lines(flow, lengths, weights, capture.transient_buffers)
    syncs = own_syncs(program, part)
    after = [*_layer_lines(part, class_of_path)]
    after += [*(unused_lines(program.model) if part.is_first else ()), *state_lines(syncs)]
    lines += _init(declared, after)
    lines += shard_method(program, part)
    lines += sync_method(syncs)
    lines += _counts_method(flow, lengths, arguments)
    taken = [a for a, node in zip(arguments, block.inputs(), strict=True) if part.has(node)]
    taken = [*received, *taken, *(["counts"] if part.is_last else [])]
    lines += ["", f"    def forward(self, {', '.join(taken)}):"]
    for line in body.lines:
        lines += wrapped(line, 8)
    return [*lines, f"        return {returned}"]


def _place_inputs(body: Body, nodes: Iterable[str], wishes: Iterable[str]) -> list[str]:
    out = []
    for node, wish in zip(nodes, wishes, strict=True):
        variable = body.names.fresh(re.sub(r"\W+", "_", wish).strip("_"))
        body.put(node, variable)
        out.append(variable)
    return out


def _place_weights(body: Body) -> None:
    captured = body.block.captured
    for node in body.block.graph.nodes:
        if node.op != "placeholder":
            continue
        name = captured.params.get(node.name) or captured.buffers.get(node.name)
        if name is not None:
            body.put(node.name, re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f"self.{name}"))
        elif node.name in captured.constants:
            body.put(node.name, _literal(captured.constants[node.name], node))


def _literal(tensor: torch.Tensor, node: torch.fx.Node) -> str:
    if tensor.numel() > 64:
        raise AutoparError(
            f"the model makes a constant tensor of {tensor.numel()} elements ({node.name}) in its "
            "forward; register it as a buffer"
        )
    return f"torch.tensor({tensor.tolist()}, dtype={tensor.dtype}, device=self.mesh.device)"


def _init(declarations: list[str], layers: list[str]) -> list[str]:
    lines = ["    def __init__(self, mesh):", "        super().__init__()"]
    lines.append("        self.mesh = mesh")
    for line in [*declarations, *layers]:
        lines += wrapped(line, 8)
    return lines


def _layer_lines(part: Part, class_of_path: Mapping[str, str]) -> list[str]:
    containers: dict[str, list[str]] = {}
    for path in part.layers:
        containers.setdefault(path.rpartition(".")[0], []).append(path)
    out = []
    for container, paths in containers.items():
        made = [class_of_path[path] for path in paths]
        keys = [path.rpartition(".")[2] for path in paths]
        first = int(keys[0]) if keys[0].isdecimal() else 0
        follow = keys == [str(i) for i in range(first, first + len(keys))]
        if follow and len(set(made)) == 1 and first and len(made) > 1:
            layers = f"{{str(i): {made[0]}(mesh) for i in range({first}, {first + len(keys)})}}"
        elif not follow or first:
            pairs = (f'"{key}": {name}(mesh)' for key, name in zip(keys, made, strict=True))
            layers = "{" + ", ".join(pairs) + "}"
        elif len(set(made)) == 1:
            layers = f"[{made[0]}(mesh) for _ in range({len(made)})]"
        else:
            layers = "[" + ", ".join(f"{name}(mesh)" for name in made) + "]"
        out.append(f'declare_layers(self, "{container}", {layers})')
    return out


def _counts_method(flow: Flow, lengths: Lengths, arguments: list[str]) -> list[str]:
    block = flow.block
    if not block.counts:
        return []
    needed: set[torch.fx.Node] = set()
    todo = [n for n in block.graph.nodes if n.name in block.counts]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    bare = Flow(block, {}, flow.setting, {}, {}, {}, {})
    skip = frozenset(n.name for n in block.graph.nodes if n not in needed)
    body = Body(bare, Names(reserved_names(block, flow.setting, RESERVED)), lengths, skip)
    for node, argument in zip(block.inputs(), arguments, strict=True):
        body.put(node, argument)
        body.names.taken.add(argument)
    _place_weights(body)
    body.run(n for n in block.graph.nodes if n in needed and n.op == "call_function")
    lines = ["", f"    def counts(self, {', '.join(arguments)}):"]
    lines.append('        """What the losses divide by; summed over the data axes and')
    lines.append('        microbatches before the first backward."""')
    for line in body.lines:
        lines += wrapped(line, 8)
    texts = [body.texts[name, body.made(name)] for name in block.counts]
    return [*lines, f"        return ({', '.join(texts)},)"]


def _constants(program: Program, lengths: Lengths) -> list[str]:
    setting = program.setting
    axes = [(name, size) for name, size in setting.mesh.axes]
    lines = [f"{', '.join(n for n, _ in axes)} = {', '.join(str(s) for _, s in axes)}"]
    leaves = sorted(lengths.used.values(), key=lambda leaf: leaf.name)
    if leaves:
        left = ", ".join(leaf.name for leaf in leaves)
        right = ", ".join(str(setting.length(leaf)) for leaf in leaves)
        lines += wrapped(f"{left} = {right}", 0)
    if any(leaf.name == "batch" for leaf in leaves):
        lines.append("# batch: samples of one microbatch over all data ranks")
    return lines


def _facts(program: Program, parts: tuple[Part, ...]) -> list[str]:
    setting, capture, block = program.setting, program.model.capture, program.model.skeleton
    flow = program.flows[""]
    (loss,) = block.outputs()
    partial = flow.made[loss.name].partial
    summed = {p.axis for p in partial}
    if setting.schedule is not None:  # it is 0 on the other stages
        summed.add(setting.schedule.axis)
    sums = [axis for axis, _ in setting.mesh.axes if axis in summed]
    data = [part.axis for part in setting.data]
    nodes = {n.name: n for n in block.graph.nodes}
    lines = [
        *_model(parts),
        f"MESH = {setting.mesh.axes!r}".replace("'", '"'),
        f"MICROBATCHES = {setting.microbatches}",
        f"DATA_AXES = {strings(data)}",
        f"LOSS_SUMS = {strings(sums)}",
        *_groups(program),
        "INPUTS = (",
    ]
    for placeholder, leaf in zip(block.inputs(), capture.batch_leaves, strict=True):
        node = nodes[placeholder]
        dtype = str(node.meta["val"].dtype).removeprefix("torch.")
        split = "batch" in _leaf_names(flow, placeholder)
        lines.append(f'    ("{leaf}", {shape_of(node)!r}, "{dtype}", {split}),')
    lines.append(")")
    if capture.batch_values:
        lines.append(f"VALUES = {dict(sorted(capture.batch_values.items()))!r}")
    return lines


def _model(parts: tuple[Part, ...]) -> list[str]:
    if parts[0].here is None:
        return [f"MODEL = {parts[0].name}"]
    return wrapped(f"MODEL = ({', '.join(part.name for part in parts)})", 0)


def _groups(program: Program) -> list[str]:
    """Sets of several axes that the forward communicates over, if there are any."""
    found = {
        tuple(part.axis for part in step.parts)
        for flow in program.flows.values()
        for steps in flow.conversions.values()
        for step in steps
        if len(step.parts) > 1
    }
    for flow in program.flows.values():
        for name, typing in flow.typings.items():
            parts = closed_parts(flow.block, flow.block.ops[name], typing)
            found |= {tuple(part.axis for part in parts)} if len(parts) > 1 else set()
    if program.cut is not None:  # stages may shard over different axes: all ranks open all groups
        for path, _ in program.model.instances():
            for candidate in program.choices[path].values():
                states = {tuple(part.axis for part in plan.state) for _, plan in candidate.params}
                found |= {axes for axes in states if len(axes) > 1}
    if not found:
        return []
    return [f"GROUPS = ({', '.join(strings(axes) for axes in sorted(found))},)"]


def _leaf_names(flow: Flow, name: str) -> set[str]:
    return set(names(flow.block.values[name].dims))


def _span(paths: tuple[str, ...]) -> str:
    if len(paths) == 1:
        return paths[0]
    return f"{paths[0]} … {paths[-1]} ({len(paths)} layers)"

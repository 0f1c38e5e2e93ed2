"""The root classes of a module: one for the whole model, or one for each part that lies in a stage.

What the runtime needs to run parts: the schedule, the axis of the stages, which inputs of the batch
each part takes, and what each hands to the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.emit.text import strings
from autopar.layouts.program import Program
from autopar.layouts.stages import Here


@dataclass(frozen=True)
class Part:
    """One root class. `here` None: it is the whole model. `receives` and `gives`: the values of the
    skeleton that come from the part before and go to the next."""

    name: str
    doc: str
    here: Here | None
    layers: tuple[str, ...]
    receives: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether it begins the model."""
        return self.here is None or self.here.part == 0

    @property
    def is_last(self) -> bool:
        """Whether it returns the loss."""
        return self.here is None or self.here.part + 1 == self.here.cut.count

    def has(self, node: str) -> bool:
        """Whether a node of the skeleton is in it."""
        return self.here is None or self.here.has(node)


def parts_of(program: Program) -> tuple[Part, ...]:
    """The root classes of a program, in the model's order."""
    model_class, mesh = program.model.capture.model_class, program.setting.mesh
    cut, schedule = program.cut, program.setting.schedule
    if cut is None or schedule is None:
        layers = tuple(layer.path for layer in program.model.layers)
        return (Part(model_class, f"{model_class} on {mesh}", None, layers),)
    table = schedule.table
    found = []
    for here in program.heres:
        stage, chunk = here.part % table.stages, here.part // table.stages
        name = f"{model_class}Stage{stage}"
        name += f"Chunk{chunk}" if table.chunks > 1 else ""
        doc = f"{model_class} on {mesh}: stage {stage} of {table.stages}"
        doc += f", chunk {chunk} of {table.chunks}" if table.chunks > 1 else ""
        before = cut.boundaries[here.part - 1] if here.part else ()
        after = cut.boundaries[here.part] if here.part + 1 < cut.count else ()
        found.append(Part(name, doc, here, cut.layers[here.part], before, after))
    return tuple(found)


def schedule_imports(program: Program) -> list[str]:
    """The import line of the schedule's function."""
    if program.setting.schedule is None:
        return []
    module, name = program.setting.schedule.function.split(":", 1)
    return [f"from {module} import {name}"]


def schedule_facts(program: Program, parts: tuple[Part, ...]) -> Iterator[str]:
    """Lines for the end of the module; none without stages."""
    schedule, block = program.setting.schedule, program.model.skeleton
    if schedule is None:
        return
    function = schedule.function.split(":", 1)[1]
    options = ", ".join(f"{key}={value}" for key, value in schedule.options)
    yield f'STAGES = "{schedule.axis}"'
    yield f"SCHEDULE = {function}({options})"
    leaves = list(zip(block.inputs(), program.model.capture.batch_leaves, strict=True))
    yield "# the inputs that each part takes, beside what it receives"
    yield "TAKES = ("
    for part in parts:
        yield f"    {strings(leaf for node, leaf in leaves if part.has(node))},"
    yield ")"
    yield "# what each part hands to the next, the last one as the loss: local shape of one"
    yield "# microbatch, dtype, whether a gradient comes back"
    yield "BOUNDARIES = ("
    for part in parts:
        yield f"    ({''.join(f'{wire}, ' for wire in _wires(program, part)).rstrip(' ')}),"
    yield ")"


def _wires(program: Program, part: Part) -> Iterator[str]:
    flow = program.flows[""]
    for name in part.gives or (flow.block.outputs()[0].name,):
        value = flow.block.values[name]
        shape = program.setting.local_shape(value.dims, flow.made[name])
        dtype = str(flow.block.node(name).meta["val"].dtype).removeprefix("torch.")
        yield f'({shape!r}, "{dtype}", {value.needs_grad})'

"""The root's `sync_gradients`: calls of the strategies that sum gradients in their own way."""

from collections.abc import Iterable

from autopar.emit.parts import Part
from autopar.emit.text import strings, wrapped
from autopar.layouts.program import Program
from autopar.plugin import GradientSync

Syncs = dict[GradientSync, list[str]]


def own_syncs(program: Program, part: Part) -> Syncs:
    """Every distinct sync with the full names of the part's parameters that have it."""
    out: Syncs = {}
    placeholders = {name: node for node, name in program.model.skeleton.params.items()}
    for path in ("", *part.layers):
        for candidate in program.choices[path].values():
            for name, plan in candidate.params:
                if plan.sync is not None and (path or part.has(placeholders[name])):
                    full = f"{path}.{name}" if path else name
                    out.setdefault(plan.sync, []).append(full)
    return out


def sync_imports(every: Iterable[Syncs]) -> list[str]:
    """Import lines of the strategies' runtime functions."""
    found = sorted({tuple(sync.function.split(":", 1)) for syncs in every for sync in syncs})
    return [f"from {module} import {name}" for module, name in found]


def state_lines(syncs: Syncs) -> list[str]:
    """keep_state lines, for the end of the root's __init__."""
    return [
        f'keep_state(self, "{spec.name}", kind="{spec.kind}", '
        f"axes={strings(part.axis for part in sync.axes)}, of={strings(names)})"
        for sync, names in syncs.items()
        for spec in sync.state
    ]


def sync_method(syncs: Syncs) -> list[str]:
    """The method, or nothing where every gradient is summed by the runtime."""
    if not syncs:
        return []
    lines = ["", "    def sync_gradients(self):"]
    lines.append('        """Sums over axes that a strategy does in its own way, once a step, on')
    lines.append('        accumulated gradients; the runtime has done the other sums before."""')
    for sync, names in syncs.items():
        axes = ", ".join(f'"{part.axis}"' for part in sync.axes)
        options = "".join(f", {key}={value!r}" for key, value in sync.options)
        function = sync.function.split(":", 1)[1]
        call = f"{function}(self, names={strings(names)}, axis=self.mesh[{axes}]{options})"
        lines += wrapped(call, 8)
    return lines

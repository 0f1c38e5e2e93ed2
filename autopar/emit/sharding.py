"""The root's `shard`: how ZeRO shards parameters, one call for those of a module that are alike."""

import re
from collections.abc import Iterable

from autopar.emit.parts import Part
from autopar.emit.text import strings, wrapped
from autopar.layouts.program import Program
from autopar.mesh import Split
from autopar.plugin import Candidate, ParamPlan

Call = tuple[int, Split, tuple[str, ...]]
"""ZeRO's stage, the axes, and the parameters' names."""

DOC = (
    '"""What lies in shards of dim 0: optimizer state, gradients, values. Axes in `sums`',
    'beside these are summed over once a step, by an all-reduce of the shards."""',
)
COMMENTS = {
    1: "ZeRO 1: all-gather before a step's first forward, reduce-scatter in its last backward",
    2: "ZeRO 2: all-gather before a step's first forward, reduce-scatter in each backward",
    3: "ZeRO 3 (FSDP2): all-gather in each forward and backward, reduce-scatter in backward",
}


def shard_method(program: Program, part: Part) -> list[str]:
    """The method, or nothing where every parameter is whole."""
    skeleton = program.model.skeleton
    here = {name for node, name in skeleton.params.items() if part.has(node)}
    alike: dict[tuple[str, tuple[Call, ...]], list[str]] = {}
    for path in ("", *part.layers):
        calls = _calls(program.choices[path].values(), None if path else here)
        if calls:
            alike.setdefault((path.rpartition(".")[0] if path else path, calls), []).append(path)
    if not alike:
        return []
    lines = ["", "    def shard(self):"]
    lines += [f"        {line}" for line in DOC]
    # FSDP2 wants layers before what holds them.
    for (_, calls), paths in sorted(alike.items(), key=lambda item: item[1] == [""]):
        lines += _module_lines(paths, calls)
    return lines


def zero_stage(plan: ParamPlan) -> int:
    """ZeRO's stage: how much of the parameter is sharded."""
    return 3 if plan.param else 2 if plan.grad else 1 if plan.state else 0


def _calls(candidates: Iterable[Candidate], here: set[str] | None) -> tuple[Call, ...]:
    """`here`: the only parameters that count, where that isn't all."""
    names: dict[tuple[int, Split], list[str]] = {}
    for candidate in candidates:
        for name, plan in candidate.params:
            if plan.state and (here is None or name in here):
                names.setdefault((zero_stage(plan), plan.state), []).append(name)
    return tuple(sorted((*key, tuple(sorted(found))) for key, found in names.items()))


def _module_lines(paths: list[str], calls: tuple[Call, ...]) -> list[str]:
    if len(paths) == 1:
        module, indent, lines = _member(paths[0]), 8, []
    else:
        module, indent = "layer", 12
        lines = wrapped(f"layers = ({', '.join(_member(path) for path in paths)})", 8)
        lines.append("        for layer in layers:")
    for stage, axes, names in calls:
        lines += [" " * indent + f"# {COMMENTS[stage]}"]
        how = "shard_fully(" if stage == 3 else "shard_state("
        inner = f"{module}, " + (f"stage={stage}, " if stage < 3 else "")
        inner += f"axes={strings(part.axis for part in axes)}, names={strings(names)})"
        lines += wrapped(how + inner, indent)
    return lines


def _member(path: str) -> str:
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f"self.{path}") if path else "self"

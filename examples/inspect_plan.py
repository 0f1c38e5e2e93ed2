"""Ask a plan's JSON alone: what does layer N do, where does memory go, what is communicated?

    python examples/inspect_plan.py build/plan.json --layer 3

No model, no GPU and no process group is needed. Reading a plan runs no code.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import autopar
from autopar.plan import RegionChoice


def main(arguments: list[str] | None = None) -> int:
    """Print the answers; without a question, all but the layers'."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("plan", type=Path, help="plan.json")
    parser.add_argument("--layer", help="a number, counted from 0, or a path like model.layers.3")
    parser.add_argument("--memory", action="store_true", help="where does memory go?")
    parser.add_argument("--communication", action="store_true", help="what is communicated?")
    options = parser.parse_args(arguments)
    try:
        plan = autopar.Plan.load(options.plan)
        everything = not (options.layer or options.memory or options.communication)
        if options.layer:
            print("\n".join(layer_answer(plan, options.layer)))
        if options.memory or everything:
            print("\n".join(memory_answer(plan)))
        if options.communication or everything:
            print("\n".join(communication_answer(plan)))
    except autopar.AutoparError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


# ---------------------------------------------------------------- what does layer N do?


def layer_paths(plan: autopar.Plan) -> list[str]:
    """The repeated layers in the order of their numbers (h.2 before h.10)."""
    paths = {layer for choice in plan.regions for layer in choice.layers if layer}
    return sorted(paths, key=lambda path: [int(n) for n in re.findall(r"\d+", path)])


def layer_answer(plan: autopar.Plan, wanted: str) -> list[str]:
    """What each region of a layer does. Errors: AutoparError for a layer that isn't there."""
    paths = layer_paths(plan)
    if wanted.isdecimal() and int(wanted) < len(paths):
        wanted = paths[int(wanted)]
    if wanted not in paths:
        known = f"0 to {len(paths) - 1}, or {paths[0]} to {paths[-1]}" if paths else "none"
        raise autopar.AutoparError(f"the plan has no layer {wanted!r}: there are {known}")
    lines = [f"Layer {wanted} of {plan.model.class_name}:"]
    for choice in plan.regions:
        if wanted in choice.layers:
            lines += region_lines(plan, choice)
    return lines


def region_lines(plan: autopar.Plan, choice: RegionChoice) -> list[str]:
    """One region: who made it what it is, what is split, what is sharded."""
    names = [
        " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        for name, options in choice.strategies.items()
    ]
    lines = [f"  {choice.region}: {', '.join(names) or 'no strategy, whole on every device'}"]
    for dim, axes in choice.splits.items():
        lines.append(f"    {dim} is split {over(plan, axes)}")
    sharded = Counter(lives.param or lives.grad or lives.state for lives in choice.params.values())
    for axes, count in sharded.items():
        if axes:
            lines.append(f"    {count} parameters are sharded {over(plan, axes)}")
    return lines


def over(plan: autopar.Plan, axes: Iterable[str]) -> str:
    """Axes with their sizes: "over dp (2) and tp (4)"."""
    return "over " + " and ".join(f"{axis} ({plan.mesh[axis]})" for axis in axes)


# ---------------------------------------------------------------- where does memory go?


def memory_answer(plan: autopar.Plan) -> list[str]:
    """Bytes of one device by kind, largest first."""
    total, limit = plan.predicted.memory_bytes, plan.memory_limit_bytes
    lines = [f"Memory of a device: {total:,} of {limit:,} bytes ({total / limit:.1%}):"]
    for kind, count in sorted(plan.predicted.memory.items(), key=lambda item: -item[1]):
        lines.append(f"  {kind:<10} {count:>20,} bytes {count / total:>6.1%}")
    return lines


# ---------------------------------------------------------------- what is communicated?


def communication_answer(plan: autopar.Plan) -> list[str]:
    """Collectives of one step on one device, most bytes first."""
    share = plan.predicted.communication_s / plan.predicted.step_s
    total = sum(one.bytes for one in plan.collectives)
    lines = [f"Communication: {total:,} bytes a step on a device, {share:.0%} of its time:"]
    for one in sorted(plan.collectives, key=lambda one: -one.bytes):
        lines.append(
            f"  {one.op:<14} {over(plan, one.axes)}, {one.phase}: {one.bytes:,} bytes "
            f"in {one.count} calls by {one.algorithm}, {one.seconds * 1e3:.2f} ms"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())

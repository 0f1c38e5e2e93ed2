"""Cases of planning that others decided differently: asked with any optimizer state, each in a
process of its own, its results kept as lines of JSON so that a run can be taken up again."""

import json
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autopar.batch_spec import OtherSpec
from autopar.cluster import ClusterSpec
from autopar.errors import AutoparError, InfeasibleError
from autopar.graph.model_graph import ModelGraph
from autopar.layouts.state_ratio import StateRatio
from autopar.plan import Plan
from autopar.planning.limited import plan_in_time
from autopar.planning.pins import read_pins
from autopar.planning.request import Request, make_plan
from autopar.planning.tried import SearchOptions
from autopar.registry import select_cost_models, select_strategies
from autopar.summary import cost_of, other_meshes
from autopar.text import seconds, short_mesh, size, strategy_text

Found = dict[str, Any]
ROOMY_BYTES = 2**50
"""Memory that holds anything."""

PARTS = ("compute_s", "communication_s", "optimizer_s", "waiting_s")
"""Of a predicted step."""


@dataclass(frozen=True)
class Asked:
    """What every plan of a case has in common. `state`: of the optimizer, as who trained the model
    kept it, which may be more than this project's programs do."""

    graph: ModelGraph
    cluster: ClusterSpec
    state: StateRatio

    def request(self, pin: Mapping[str, Any], roomy: bool, limit_s: float | None) -> Request:
        """With pins; with any memory if `roomy`."""
        strategies = select_strategies()
        pins = read_pins(pin, (), strategies)
        limit = ROOMY_BYTES if roomy else self.cluster.device.memory_bytes
        options = SearchOptions(limit, 1e-3, limit_s, self.state)
        told = OtherSpec("other", "a batch on meta"), (), self.cluster
        models = select_cost_models()
        return Request(self.graph, self.cluster, strategies, models, pins, options, *told)


def planned(asked: Asked, pin: Mapping[str, Any], limit_s: float | None = None) -> Found:
    """The figures of the plan under these pins, or why there is none ("fault"). Where there is none
    for want of memory, it says how much is missing ("short_bytes") and, of what is pinned, what the
    plan would be if there were enough ("roomy")."""
    return tried(asked, pin, limit_s)[0]


def tried(
    asked: Asked, pin: Mapping[str, Any], limit_s: float | None = None
) -> tuple[Found, Plan | None]:
    """As `planned`, with the plan, where there is one: what `compile` makes of the request."""
    start, plan = time.perf_counter(), None
    try:
        plan = plan_in_time(asked.request(pin, False, limit_s))
        found = figures(plan)
    except InfeasibleError as error:
        found = {"fault": str(error), "short_bytes": error.short_bytes}
        if pin:
            found["roomy"] = figures(make_plan(asked.request(pin, True, limit_s)))
    except AutoparError as error:
        found = {"fault": str(error)}
    return {**found, "took_s": time.perf_counter() - start}, plan


def rival(asked: Asked, plan: Plan, place: int, limit_s: float | None) -> Found:
    """The best on another mesh, the `place`-th next to a plan, where the search solved it; else
    what it takes at least."""
    able = [other for other in other_meshes(plan) if math.isfinite(cost_of(other))]
    if place >= len(able):
        return {"fault": "there is no other mesh on which it may fit"}
    other = able[place]
    if other.step_s is None:
        return {"fault": f"{short_mesh(other.mesh)}: at least {seconds(cost_of(other))}"}
    return planned(asked, other.mesh, limit_s)


def kept(asked: Asked, plan: Plan, limit_s: float | None = None) -> Found:
    """What a plan would be without recompute, had it the memory."""
    where: dict[str, Any] = {**plan.axes, "microbatches": plan.microbatches, "recompute": False}
    if plan.schedule is not None:
        where["schedule"] = plan.schedule.name
    return figures(make_plan(asked.request(where, True, limit_s)))


def figures(plan: Plan) -> Found:
    """What was decided, and what it comes to."""
    used: Counter[str] = Counter()
    for choice in plan.regions:
        for name, options in choice.strategies.items():
            used[strategy_text(name, options)] += len(choice.layers)
    schedule = plan.schedule
    named = [f"{key} {value}" for key, value in schedule.options.items()] if schedule else []
    predicted = plan.predicted
    return {
        "axes": {axis: length for axis, length in plan.axes.items() if length > 1},
        "microbatches": plan.microbatches,
        "samples": plan.batch_size,
        "schedule": " ".join([schedule.name, *named]) if schedule else "",
        "used": dict(sorted(used.items())),
        "step_s": predicted.step_s,
        **{part: getattr(predicted, part) for part in PARTS},
        "memory_bytes": predicted.memory_bytes,
        "memory": dict(predicted.memory),
        "mfu": predicted.mfu,
        "gap": plan.certificate.gap,
        "candidates": plan.certificate.candidates,
        "solved": plan.certificate.solved,
    }


# ---------------------------------------------------------------- as text


def decided(one: Mapping[str, Any]) -> str:
    """A plan's mesh, schedule, microbatches and strategies."""
    by = f" by {one['schedule']}" if one["schedule"] else ""
    times = f", {one['microbatches']} microbatches" if one["microbatches"] > 1 else ""
    plain = {"data", "expert", "pipeline"}  # which the mesh says
    used = [f"{name} ×{count}" for name, count in one["used"].items() if name not in plain]
    return "; ".join([f"{short_mesh(one['axes'])}{by}{times}", *used])


def spent(one: Mapping[str, Any]) -> str:
    """Where a plan's seconds and bytes go."""
    words = [f"{part[:-2]} {seconds(one[part])}" for part in PARTS if one[part] > 0]
    return ", ".join([*words, size(one["memory_bytes"])])


def apart(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """What another plan has more and less of, the most seconds first."""
    more = {part[:-2]: theirs[part] - own[part] for part in PARTS}
    least = 1e-3 * own["step_s"]
    words = [
        f"{name} {'+' if value > 0 else '−'}{seconds(abs(value))}"
        for name, value in sorted(more.items(), key=lambda item: -abs(item[1]))
        if abs(value) > least
    ]
    return ", ".join(words) or "nothing"


# ---------------------------------------------------------------- runs


def known(path: Path) -> dict[str, Found]:
    """The lines of a file by their "id"; of equal ones the last counts."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {one["id"]: one for one in map(json.loads, lines)}


def keep(lines: Iterable[Found], path: Path) -> None:
    """Each at a file's end as soon as it is there."""
    for line in lines:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def run_alone(
    solve: Callable[[Any, Sequence[str]], Iterator[Found]],
    case: Any,
    wanted: Sequence[str],
    limit_s: float,
) -> Iterator[Found]:
    """The lines that `solve` yields for a case, in a process of its own, as they come; what was
    wanted ("id") and didn't come in `limit_s` says why ("ended")."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(solve, case, wanted, theirs), daemon=True)
    process.start()
    theirs.close()
    end_s, missing, why = time.monotonic() + limit_s, list(wanted), f"ended after {limit_s:.0f} s"
    try:
        while missing and ours.poll(max(0.0, end_s - time.monotonic())):
            found = ours.recv()
            if "raised" in found:
                why = found["raised"]
                break
            missing.remove(found["id"])
            yield found
    except EOFError:
        why = "the process died"
    process.join(5.0 if not missing else 0.0)
    process.kill()
    process.join()
    for name in missing:
        yield {"id": name, "ended": why}


PRELOADED = ["torch.export", "torch._inductor", "transformers", "pulp", "autopar", "plan_cases"]
"""What processes share that are forked from a server."""


def _send(
    solve: Callable[[Any, Sequence[str]], Iterator[Found]],
    case: Any,
    wanted: Sequence[str],
    pipe: Connection,
) -> None:
    try:
        for line in solve(case, wanted):
            pipe.send(line)
    except Exception as error:  # noqa: BLE001  # ends the case, not the run
        pipe.send({"raised": repr(error)})

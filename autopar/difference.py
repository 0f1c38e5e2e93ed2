"""What differs between two plans: decisions first, then what they are predicted to cost."""

from collections.abc import Iterator, Mapping

from autopar.batch_spec import batch_text
from autopar.plan import Plan, RegionChoice
from autopar.summary import strategies_text
from autopar.text import layer_span, seconds, size

Change = tuple[str, str, str]
"""What it is, before, after."""


def difference(before: Plan, after: Plan) -> str:
    """The differences as text, a line each; "" where the plans are equal."""
    if before == after:
        return ""
    decisions = [*_decisions(before, after), *_regions(before, after), *_notes(before, after)]
    figures = [*_figures(before, after), *_collectives(before, after), *_proof(before, after)]
    lines = []
    for title, changes in (("decisions", decisions), ("figures", figures)):
        lines.append(title if changes else f"{title}: equal")
        lines += [f"  {what}: {old} → {new}" for what, old, new in changes]
    return "\n".join(lines) + "\n"


def _changed(pairs: Iterator[Change]) -> list[Change]:
    return [change for change in pairs if change[1] != change[2]]


def _decisions(before: Plan, after: Plan) -> list[Change]:
    def facts(plan: Plan) -> Mapping[str, str]:
        return {
            "model": f"{plan.model.class_name} {plan.model.fingerprint[:12]}",
            "cluster": _cluster(plan),
            "cluster's numbers": _digest(plan),
            "memory limit": f"{plan.memory_limit_bytes:,} bytes",
            "axes": _sizes(plan.axes),
            "mesh": _sizes(plan.mesh),
            "batch": batch_text(plan.batch),
            "microbatches": str(plan.microbatches),
            "schedule": _schedule(plan),
        }

    old, new = facts(before), facts(after)
    changes = _changed((name, old[name], new[name]) for name in old)
    if [name for name, _, _ in changes if name in ("axes", "mesh")] == ["axes", "mesh"]:
        plain = before.axes == before.mesh and after.axes == after.mesh
        changes = [c for c in changes if not (plain and c[0] == "mesh")]
    return changes


def _notes(before: Plan, after: Plan) -> Iterator[Change]:
    """Assumptions that came or went."""
    for note in dict.fromkeys((*before.assumptions, *after.assumptions)):
        if (note in before.assumptions) != (note in after.assumptions):
            there = note in before.assumptions
            yield f"assumption {note!r}", *(("there", "gone") if there else ("absent", "there"))


def _cluster(plan: Plan) -> str:
    device = plan.cluster.get("device")
    name = device.get("name") if isinstance(device, dict) else None
    return f"{plan.cluster.get('devices')} × {name}"


def _digest(plan: Plan) -> str:
    device = plan.cluster.get("device")
    facts = {**(device if isinstance(device, dict) else {}), "links": plan.cluster.get("links")}
    return ", ".join(f"{key} {value}" for key, value in facts.items() if key != "name")


def _schedule(plan: Plan) -> str:
    """The schedule with the layers of its parts."""
    if plan.schedule is None:
        return "none"
    parts = ", ".join(str(len(part)) for part in plan.schedule.parts)
    return f"{plan.schedule.name} over {plan.schedule.axis}, layers {parts}"


def _sizes(axes: Mapping[str, int]) -> str:
    return " · ".join(f"{axis} {count}" for axis, count in axes.items()) or "none"


# ---------------------------------------------------------------- regions


def _regions(before: Plan, after: Plan) -> Iterator[Change]:
    """Equal changes of one region joined over layers."""
    old, new = _by_place(before), _by_place(after)
    joined: dict[tuple[str, str, str], list[str]] = {}
    for layer, region in dict.fromkeys((*old, *new)):
        pair = old.get((layer, region)), new.get((layer, region))
        brief, full = [tuple(_choice(one, long) for one in pair) for long in (False, True)]
        if full[0] != full[1]:
            first, second = brief if brief[0] != brief[1] else full
            joined.setdefault((region, first, second), []).append(layer)
    for (region, first, second), layers in joined.items():
        yield f"{layer_span(tuple(layers))} {region}", first, second


def _by_place(plan: Plan) -> dict[tuple[str, str], RegionChoice]:
    return {(layer, choice.region): choice for choice in plan.regions for layer in choice.layers}


def _choice(choice: RegionChoice | None, long: bool) -> str:
    """A region's choice as text; `long` with the names of its sharded parameters."""
    if choice is None:
        return "absent"
    splits = [f"{dim} over {' · '.join(axes)}" for dim, axes in choice.splits.items()]
    if choice.recompute:
        splits.append(f"{choice.recompute.layers} {choice.recompute.scope} recomputed")
    splits += [f"{form.op} as {form.function or 'moved'}" for form in choice.forms]
    alike: dict[str, list[str]] = {}
    for name, p in choice.params.items():
        lives = {"value": p.param, "gradient": p.grad, "state": p.state}
        texts = [f"{what} over {' · '.join(axes)}" for what, axes in lives.items() if axes]
        text = ", ".join([*texts, *([f"summed by {p.sync.function}"] if p.sync else [])])
        alike.setdefault(text, []).append(name)
    sharded = [
        f"{', '.join(names) if long else f'{len(names)} parameters'}: {text}"
        for text, names in alike.items()
    ]
    return f"{strategies_text(choice)} ({'; '.join([*splits, *sharded]) or 'whole'})"


# ---------------------------------------------------------------- figures


def _figures(before: Plan, after: Plan) -> list[Change]:
    def facts(plan: Plan) -> Mapping[str, tuple[str, float]]:
        p = plan.predicted
        times = {
            "step time": p.step_s,
            "compute": p.compute_s,
            "communication": p.communication_s,
            "optimizer": p.optimizer_s,
            "waiting": p.waiting_s,
        }
        sizes = {"memory": p.memory_bytes, **{f"memory, {k}": v for k, v in p.memory.items()}}
        return {
            **{name: (seconds(value), value) for name, value in times.items()},
            **{name: (size(value), float(value)) for name, value in sizes.items()},
            "tokens/s": (f"{p.tokens_per_s:,.0f}", p.tokens_per_s),
            "MFU": (f"{p.mfu:.2%}", p.mfu),
        }

    old, new = facts(before), facts(after)
    none = ("none", 0.0)
    return [
        (name, one[0], other[0] + _percent(one[1], other[1]))
        for name in dict.fromkeys((*old, *new))
        for one, other in [(old.get(name, none), new.get(name, none))]
        if one[1] != other[1]
    ]


def _percent(old: float, new: float) -> str:
    return f" ({new / old - 1:+.1%})" if old else ""


def _collectives(before: Plan, after: Plan) -> list[Change]:
    def facts(plan: Plan) -> Mapping[str, str]:
        rows: dict[str, list[str]] = {}
        for c in plan.collectives:
            by = f" by {c.algorithm}" if c.algorithm else ""
            text = f"{c.bytes:,} bytes in {c.count} calls{by}"
            stage = f"stage {c.stage}, " if plan.schedule is not None else ""
            name = f"{stage}{c.op} over {' · '.join(c.axes)}, {c.phase}"
            rows.setdefault(name, []).append(text)
        return {name: ", ".join(texts) for name, texts in rows.items()}

    old, new = facts(before), facts(after)
    names = dict.fromkeys((*old, *new))
    return _changed((name, old.get(name, "none"), new.get(name, "none")) for name in names)


def _proof(before: Plan, after: Plan) -> list[Change]:
    old, new = before.certificate, after.certificate
    pairs = [
        ("proven gap", f"{old.gap:.2%}", f"{new.gap:.2%}"),
        ("solver", old.solver, new.solver),
    ]
    return _changed(iter(pairs))

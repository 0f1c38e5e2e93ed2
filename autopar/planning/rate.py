"""How often a step of a setting pays for what its stages do together, at least."""

from autopar.layouts.layout import Setting

LeastWork = tuple[float, float]
"""Seconds of a microbatch, and seconds once a step, of all layers together."""


def stages_in(setting: Setting) -> int:
    """How many stages a setting has."""
    return 1 if setting.schedule is None else setting.mesh.size(setting.schedule.axis)


def rate(setting: Setting) -> tuple[float, float]:
    """How much of the seconds of a microbatch, and of those once a step, of all stages together, a
    step takes at least: the stages have at least all the work, the slowest at least its share."""
    if setting.schedule is None:
        return setting.microbatches, 1.0
    stages, per_stage = stages_in(setting), setting.schedule.least_pace
    return (setting.microbatches - per_stage) / stages + per_stage, 1.0 / stages


def step_bound(setting: Setting, work: LeastWork) -> float:
    """Seconds that no program beats whose stages together do so much at least."""
    each, once = rate(setting)
    return each * work[0] + once * work[1]

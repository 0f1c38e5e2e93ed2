"""Nothing fits: the plan that comes closest, and where and by how much it doesn't."""

from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.plan import Plan, Predicted, ScheduleChoice
from autopar.planning.advice import Advice, advice
from autopar.planning.no_plan import too_small
from autopar.planning.request import Request, make_plan
from autopar.planning.unproven import without_proof
from autopar.planning.watch import Watch, unwatched
from autopar.progress import shown
from autopar.text import layer_span, size


def plan_or_explain(request: Request, watch: Watch = unwatched) -> Plan:
    """The plan of a request. The search may count more bytes than a plan has (when a layer runs
    again, what comes after it is freed): where it finds nothing that fits, but its smallest plan
    does, that plan, with nothing proven.

    Errors: those of `search`; InfeasibleError with the smallest plan, its fullest stage and advice.
    """
    try:
        return make_plan(request, watch)
    except InfeasibleError as error:
        smallest = _smallest(request, error)
        if smallest.predicted.memory_bytes <= request.options.limit_bytes:
            fits = replace(smallest, memory_limit_bytes=request.options.limit_bytes)
            return without_proof(fits, BARELY)
        raise explained(request, error, smallest) from error


BARELY = (
    "made as the smallest plan that the search knows: by its own count, which is on the safe side "
    "for layers that run again, nothing fits"
)


def _smallest(request: Request, error: InfeasibleError) -> Plan:
    """The plan that needs least, which is planned under the limit that it needs."""
    setting = error.setting
    assert setting is not None, "a search says where its smallest plan lies"
    need_bytes = request.options.limit_bytes + error.short_bytes
    pins = replace(
        request.pins,
        axes=dict(setting.mesh.axes),
        microbatches=setting.microbatches,
        schedule=setting.schedule.name if setting.schedule else None,
    )
    options = replace(request.options, limit_bytes=need_bytes)
    return make_plan(replace(request, pins=pins, options=options))


def explained(request: Request, error: InfeasibleError, smallest: Plan) -> InfeasibleError:
    """The error of a search with the plan that needs least."""
    setting = error.setting
    assert setting is not None

    def advise(progress: bool) -> Advice:
        with shown(progress) as watch:
            return advice(request, smallest, watch)

    limit_bytes = request.options.limit_bytes
    short_bytes = smallest.predicted.memory_bytes - limit_bytes
    where = fullest(smallest.predicted, smallest.schedule, limit_bytes)
    return InfeasibleError(
        f"{too_small(limit_bytes, short_bytes, setting)}. {where}. `advice()` of this error looks "
        "for the smallest changes that would fit",
        short_bytes,
        setting,
        smallest,
        advise,
    )


def fullest(predicted: Predicted, schedule: ScheduleChoice | None, limit_bytes: int) -> str:
    """Where memory goes on the fullest device, and how far from the limit other stages are."""
    kinds = ", ".join(f"{kind} {size(count)}" for kind, count in predicted.memory.items())
    if schedule is None:
        return f"Every device needs the same: {kinds}"
    needs = [stage.memory_bytes for stage in predicted.stages]
    worst = needs.index(max(needs))
    layers = "; ".join(layer_span(part) for part in schedule.parts[worst :: len(needs)])
    others = [
        f"{stage} is {_over(need, limit_bytes)}"
        for stage, need in enumerate(needs)
        if stage != worst
    ]
    return (
        f"Stage {worst} of 0 to {len(needs) - 1} ({layers}) is the fullest: {kinds}; stage "
        f"{', '.join(others)}"
    )


def _over(need_bytes: int, limit_bytes: int) -> str:
    apart = need_bytes - limit_bytes
    return f"{size(apart)} over" if apart > 0 else f"{size(-apart)} under"

"""The matrix run: its models, and a task for the pool."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import experts
import families
import torch
from context import STRATEGIES
from equality import Comparison, planned_as, run
from families import FAMILIES
from matrix import pins_of, traits_of, world_of
from models import Job, float32_raised, gpt2, llama
from moe import grouped

import autopar

MOE = {
    "mixtral": lambda: grouped("mixtral"),
    "mixtral_4": lambda: _mixtral_4(),
    "deepseek_v3": lambda: grouped("deepseek_v3"),
}
MODELS: Mapping[str, Callable[[], Job]] = {
    "gpt2": lambda: gpt2(layers=4),  # its embedding is tied to its head
    "gpt2_8": lambda: gpt2(layers=8),
    "llama": lambda: llama(layers=4),  # 4 heads over 2 of keys
    "llama_one": lambda: _one_sample(llama(layers=4)),
    **MOE,
    **{name: FAMILIES[name].tiny for name in ("bert", "t5", "vit", "resnet", "transformer")},
}


def _mixtral_4() -> Job:
    job = families._tiny(families._mixtral(32, 4, 4, 2, 48, 4, 64, 16))()
    job.model.to(torch.float32)
    return job


def _one_sample(job: Job) -> Job:
    return replace(job, batch={name: x[1:2] for name, x in job.batch.items()})


def traits_in(plan: autopar.Plan) -> frozenset[str]:
    """The strategies that a finished plan has."""
    found = {"dp"} if plan.axes.get("dp", 1) > 1 else set()
    found |= {"microbatches"} if plan.microbatches > 1 else set()
    found |= {plan.schedule.name} if plan.schedule is not None else set()
    for choice in plan.regions:
        used = choice.strategies
        found |= {"tp"} & {"tp" for _ in used if "tensor" in used}
        found |= {"sequence"} & set(used)
        if "zero" in used:
            found.add(f"zero{used['zero']['stage']}")
        if "context" in used and "form" in used["context"]:
            found.add(str(used["context"]["form"]))
        if any(
            axis.startswith("ep")
            for dim, axes in choice.splits.items()
            for axis in axes
            if dim.startswith("expert")
        ):
            found.add("expert")
        if choice.recompute is not None:
            again = choice.recompute
            whole = "layers" if again.layers == 1 else "groups"
            found.add("regions" if again.scope == "region" else whole)
    return frozenset(found)


def compiled(job: Job, words: str) -> autopar.Compiled:
    """A job under a plan in words."""
    return planned_as(job, f"cpu:{world_of(words)}", STRATEGIES, pins_of(words))


@dataclass(frozen=True)
class Found:
    """What a rank found: the comparison, the plan's strategies, and of a mixture of experts the
    bytes of tokens sent, and those that follow from how they were routed."""

    comparison: Comparison
    traits: frozenset[str]
    token_bytes: tuple[int, int] | None = None


def compare(model: str, words: str) -> Found:
    """A task for the pool: one of the matrix in float64, on every rank."""
    if model not in MOE:
        with float32_raised():
            job = MODELS[model]()
            program = compiled(job, words)
            return Found(run(job, program), traits_in(program.plan))
    with experts.wide():
        job = MODELS[model]()
        job.model.double()
        program = compiled(job, words)
        if "expert" not in traits_of(words):
            return Found(run(job, program), traits_in(program.plan))
        sent = experts.sent_of(job, program, recomputed=bool(recomputed(words)))
        counted, planned, tokens, _ = experts.split_bytes(sent.comparison)
        parts = sent.comparison
        plain = Comparison(parts.loss, parts.gradients, parts.norm, parts.weights, counted, planned)
        return Found(plain, traits_in(program.plan), (tokens, sent.bytes))


def recomputed(words: str) -> frozenset[str]:
    """What runs again."""
    return traits_of(words) & {"regions", "layers", "groups"}

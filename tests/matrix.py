"""Models under plans that together have every strategy, and every two that can meet: the list, and
a task for the pool.

A plan is written in words: axes with their sizes (`pp2`), `m4` for four microbatches, a schedule,
and whatever else is on. `a|b`: the first two of four layers have a, the others b.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import experts
import families
import torch
from context import STRATEGIES
from equality import OFF, Comparison, planned_as, run
from families import FAMILIES
from models import Job, float32_raised, gpt2, llama
from moe import grouped

import autopar

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
WORDS: Mapping[str, dict[str, Any]] = {
    "sequence": {"sequence": True},
    **{f"zero{stage}": {"zero": stage} for stage in (1, 2, 3)},
    **{f"hybrid{stage}": {"zero": {"stage": stage, "within": 2}} for stage in (1, 2, 3)},
    **{name: {"schedule": name} for name in SCHEDULES},
    "regions": {"recompute": "selective"},
    "layers": {"recompute": "full"},
    "groups": {"recompute": {"scope": "full", "together": 2}},
    "ring": {"context": "ring"},
    "all_to_all": {"context": "all_to_all"},
}
TRAITS = (
    *("dp", "tp", "sequence", "zero1", "zero2", "zero3"),
    *SCHEDULES,
    *("regions", "layers", "groups", "expert", "ring", "all_to_all", "microbatches"),
)
"""What has to meet."""
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

MATRIX: tuple[tuple[str, str], ...] = (
    # ---- two axes or three, on four processes
    ("gpt2", "dp4 m2"),
    ("gpt2", "dp2 tp2 zero1 groups"),
    ("gpt2", "dp2 tp2 sequence zero2 groups m2"),
    ("gpt2", "tp4 sequence regions"),
    ("gpt2", "dp4 zero1|zero3 layers|regions"),
    ("gpt2", "dp4 zero2|zero3 m2"),
    ("gpt2", "dp4 groups|regions"),
    ("gpt2", "dp2 tp2 sequence groups|layers"),
    ("gpt2", "dp4 zero1|zero2 groups"),
    ("gpt2", "cp4 ring zero1 groups"),
    ("gpt2", "cp4 all_to_all zero3 regions"),
    ("gpt2", "cp4 ring|all_to_all m2"),
    ("gpt2", "pp4 gpipe m4 layers"),
    ("gpt2", "pp4 1f1b m8 regions"),
    ("gpt2", "pp4 zero_bubble m4"),
    ("gpt2", "pp2 dp2 interleaved m4 zero2"),
    ("gpt2_8", "pp4 interleaved m4"),
    ("gpt2", "pp2 cp2 zero_bubble ring m4 zero1"),
    ("llama", "dp4 zero3 regions m2"),
    ("llama", "dp2 tp2 sequence hybrid3 m2"),
    ("llama", "tp4 sequence groups"),
    ("llama", "cp4 ring zero2 layers"),
    ("llama", "cp4 ring zero3 m2"),
    ("llama", "cp2 tp2 all_to_all sequence zero2 regions"),
    ("llama", "cp2 dp2 all_to_all zero1 groups m2"),
    ("llama", "pp2 tp2 1f1b sequence m2 layers"),
    ("llama", "pp2 dp2 gpipe zero3 m4 regions"),
    ("llama", "pp2 tp2 interleaved sequence m2 regions"),
    ("llama", "pp2 cp2 interleaved all_to_all m2 layers"),
    ("llama", "pp2 cp2 gpipe ring m2"),
    ("llama_one", "cp2 tp2 ring sequence layers"),
    ("llama_one", "cp4 ring zero3"),
    ("mixtral", "ep4 m2"),
    ("mixtral", "ep2 tp2 sequence layers"),
    ("mixtral", "ep2 dp2 zero2 groups m2"),
    ("mixtral", "ep2 cp2 ring zero3 regions"),
    ("mixtral", "ep2 cp2 all_to_all zero1 layers"),
    ("mixtral", "pp2 ep2 zero_bubble m4 zero2"),
    ("mixtral", "pp2 ep2 gpipe m2 zero3 layers"),
    ("mixtral", "pp2 ep2 1f1b m2 zero1 regions"),
    ("mixtral_4", "pp2 ep2 interleaved m2 zero3"),
    ("deepseek_v3", "ep4 zero3"),
    ("deepseek_v3", "ep2 cp2 all_to_all"),
    ("deepseek_v3", "ep2 tp2 m2 regions"),
    ("deepseek_v3", "tp2 dp2 zero1 sequence layers"),
    ("bert", "dp2 tp2 sequence zero3"),
    ("bert", "cp4 ring regions"),
    ("bert", "cp2 tp2 all_to_all layers zero2"),
    ("bert", "pp2 dp2 1f1b m4 zero2"),
    ("t5", "dp4 zero2 m2"),
    ("t5", "dp2 tp2 sequence zero1"),
    ("t5", "pp4 1f1b m4"),
    ("t5", "pp2 dp2 zero_bubble m2 zero1"),
    ("t5", "pp2 tp2 gpipe m2 layers"),
    ("vit", "dp2 tp2 zero3 regions"),
    ("vit", "dp4 zero1 groups m2"),
    ("vit", "pp2 tp2 1f1b m4"),
    ("resnet", "dp4 zero2"),
    ("resnet", "dp2 tp2 zero3"),
    ("resnet", "tp4"),
    ("transformer", "dp2 tp2 sequence zero2 layers"),
    ("transformer", "dp4 zero3 regions m2"),
    ("transformer", "pp2 dp2 1f1b m4 zero1"),
    ("transformer", "pp2 tp2 zero_bubble m2"),
    # ---- three axes or four, on eight
    ("gpt2", "pp2 dp2 tp2 gpipe sequence m4 regions zero2"),
    ("gpt2", "pp2 tp2 cp2 zero_bubble sequence all_to_all m4 zero2"),
    ("gpt2", "pp2 dp2 cp2 1f1b ring m2 zero3 regions"),
    ("gpt2", "dp2 cp2 tp2 sequence ring zero3 layers m2"),
    ("gpt2", "pp4 dp2 gpipe m4 zero1 layers"),
    ("gpt2", "cp4 tp2 ring sequence zero2 groups"),
    ("gpt2", "dp4 tp2 hybrid2 sequence m2 groups"),
    ("llama", "pp2 tp2 cp2 1f1b sequence ring m2 layers zero1"),
    ("llama", "pp2 dp2 cp2 interleaved all_to_all m2 layers zero3"),
    ("llama", "pp2 dp2 tp2 interleaved sequence m2 zero1 regions"),
    ("llama", "pp2 cp2 tp2 gpipe sequence ring m2 zero2"),
    ("llama", "pp2 dp2 tp2 zero_bubble sequence m4 zero1"),
    ("llama", "pp2 dp2 cp2 interleaved ring m2 zero2"),
    ("llama", "pp2 cp2 tp2 1f1b all_to_all m2 zero2"),
    ("llama", "pp2 dp2 cp2 gpipe all_to_all m2 zero1"),
    ("mixtral", "pp2 ep2 tp2 1f1b sequence m2 zero3 regions"),
    ("mixtral", "ep2 cp2 tp2 sequence ring zero2 groups m2"),
    ("mixtral", "pp2 ep2 cp2 zero_bubble ring m2 zero1"),
    ("mixtral", "pp2 dp2 ep2 gpipe m2 zero2 layers"),
    ("mixtral_4", "pp2 dp2 ep2 interleaved m2 zero1 layers"),
    ("deepseek_v3", "dp2 ep2 cp2 all_to_all zero3 layers"),
    ("deepseek_v3", "ep4 tp2 zero1 sequence"),
    ("deepseek_v3", "pp2 ep2 dp2 1f1b m2 zero2"),
    ("bert", "pp2 dp2 cp2 1f1b ring m2 zero1"),
    ("t5", "pp2 dp2 tp2 1f1b sequence m4 zero2"),
    ("vit", "pp2 dp2 tp2 gpipe m2 zero3"),
    ("transformer", "pp2 dp2 tp2 1f1b sequence m2 zero3"),
)


def _mixtral_4() -> Job:
    job = families._tiny(families._mixtral(32, 4, 4, 2, 48, 4, 64, 16))()
    job.model.to(torch.float32)
    return job


def _one_sample(job: Job) -> Job:
    return replace(job, batch={name: x[1:2] for name, x in job.batch.items()})


def sizes_of(words: str) -> dict[str, int]:
    """The sizes of a plan's axes."""
    found = re.findall(r"\b(dp|tp|pp|cp|ep)(\d+)\b", words)
    return {axis: int(size) for axis, size in found}


def world_of(words: str) -> int:
    """How many processes a plan is for."""
    return math.prod(sizes_of(words).values())


def pins_of(words: str) -> dict[str, Any]:
    """The plan with nothing left to choose."""
    off = {name: value for name, value in OFF.items() if not name.startswith("wide")}
    axes = dict.fromkeys(("dp", "tp", "pp", "cp", "ep"), 1) | sizes_of(words)
    pins: dict[str, Any] = {**off, **axes, "tensor": axes["tp"] > 1}
    layers: dict[str, dict[str, Any]] = {}
    for word in words.split():
        if "|" in word:
            for index, one in enumerate(word.split("|")):
                layers.setdefault(("*.[01].*", "*.[23].*")[index], {}).update(WORDS[one])
        elif microbatches := re.fullmatch(r"m(\d+)", word):
            pins["microbatches"] = int(microbatches[1])
        elif word in WORDS:
            pins.update(WORDS[word])
        else:
            assert re.fullmatch(r"(dp|tp|pp|cp|ep)\d+", word), word
    return {**pins, **({"layers": layers} if layers else {})}


def traits_of(words: str) -> frozenset[str]:
    """The strategies of a plan as it is written."""
    found = {axis for axis, size in sizes_of(words).items() if size > 1}
    named = {"ep": "expert"}
    found = {named.get(axis, axis) for axis in found} - {"pp", "cp"}
    for word in re.split(r"[ |]", words):
        if re.fullmatch(r"m\d+", word):
            found.add("microbatches")
        elif word in WORDS:
            found.add(word.replace("hybrid", "zero"))
    return frozenset(found)


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


def pairs(traits: Iterable[str]) -> set[frozenset[str]]:
    """Each two of them."""
    return {frozenset(two) for two in itertools.combinations(traits, 2)}


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

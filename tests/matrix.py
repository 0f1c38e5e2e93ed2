"""Models under plans that together have every strategy, and every two that can meet.

A plan is written in words: axes with their sizes (`pp2`), `m4` for four microbatches, a schedule,
and whatever else is on. `a|b`: the first two of four layers have a, the others b.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from equality import OFF

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
    ("gpt2", "pp2 dp2 1f1b m4 zero2 groups"),
    ("gpt2", "pp2 dp2 gpipe m4 zero1 groups|regions"),
    ("gpt2_8", "pp2 cp2 interleaved ring m4 groups"),
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
    ("llama", "pp2 tp2 gpipe sequence m2 groups"),
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
    ("mixtral_4", "pp2 dp2 ep2 1f1b m2 zero1 groups"),
    ("deepseek_v3", "dp2 ep2 cp2 all_to_all zero3 layers"),
    ("deepseek_v3", "ep4 tp2 zero1 sequence"),
    ("deepseek_v3", "pp2 ep2 dp2 1f1b m2 zero2"),
    ("bert", "pp2 dp2 cp2 1f1b ring m2 zero1"),
    ("t5", "pp2 dp2 tp2 1f1b sequence m4 zero2"),
    ("vit", "pp2 dp2 tp2 gpipe m2 zero3"),
    ("transformer", "pp2 dp2 tp2 1f1b sequence m2 zero3"),
)


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


def pairs(traits: Iterable[str]) -> set[frozenset[str]]:
    """Each two of them."""
    return {frozenset(two) for two in itertools.combinations(traits, 2)}

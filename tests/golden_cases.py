"""The plans whose emitted modules and JSON are kept as files."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import context
import equality
import experts
from clusters import cluster
from families import FAMILIES
from models import MODELS, Job, float32_raised
from moe import grouped

import autopar

Compile = Callable[[Job, str, dict[str, Any]], autopar.Compiled]


def mixtral() -> Job:
    """With grouped matmuls, whose tokens can be sent to their experts."""
    job = grouped("mixtral")
    job.model.double()
    return job


@dataclass(frozen=True)
class Golden:
    """`job` under the `case` of a table of cases, for so many processes; `lines` at most."""

    job: Callable[[], Job]
    case: str
    compiled: Compile = equality.compiled
    world: int = 4
    lines: int = 400
    raised: Callable[[], contextlib.AbstractContextManager[None]] = float32_raised

    def made(self) -> tuple[Job, autopar.Compiled]:
        """The case as the compiler makes it now."""
        job = self.job()
        return job, self.compiled(job, self.case, cluster(self.world))


GOLDEN: Mapping[str, Golden] = {
    "gpt2_tp4_sequence": Golden(MODELS["gpt2"], "tp4_sequence"),
    "gpt2_full_zero3": Golden(MODELS["gpt2"], "full_zero3"),
    "llama_tp4_sequence": Golden(MODELS["llama"], "tp4_sequence"),
    "llama_pp2_tp2": Golden(MODELS["llama"], "pp2_tp2"),
    "llama_cp4_ring": Golden(MODELS["llama"], "cp4_ring", context.compiled),
    "mixtral_ep2_tp2": Golden(mixtral, "ep2_tp2", experts.compiled, raised=experts.wide),
    "resnet_dp2": Golden(FAMILIES["resnet"].tiny, "dp2", world=2),
    "t5_pp2": Golden(FAMILIES["t5"].tiny, "pp2", world=2, lines=600),
}

"""Mixtures of experts against the plain model: tasks for a pool."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import equality
import families
import torch
from equality import Comparison, run
from families import FAMILIES
from models import Job, float32_raised
from torch.nn import functional as F

MOE = ("mixtral", "qwen3_moe", "deepseek_v3")


@contextlib.contextmanager
def all_raised() -> Iterator[None]:
    """float32 raised to float64 also where routers ask for it by a dtype."""
    softmax, cast = F.softmax, torch.Tensor.type

    def wide_softmax(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") == torch.float32:
            options["dtype"] = torch.float64
        return softmax(x, *args, **options)

    def wide_type(x: torch.Tensor, dtype: Any = None, **options: Any) -> Any:
        return cast(x, torch.float64 if dtype == torch.float32 else dtype, **options)

    F.softmax, torch.Tensor.type = wide_softmax, wide_type  # type: ignore[assignment]
    try:
        with float32_raised():
            yield
    finally:
        F.softmax, torch.Tensor.type = softmax, cast  # type: ignore[method-assign]


def grouped(family: str) -> Job:
    """A family with grouped matmuls, tiny, in float32 (they take no float64)."""
    build: Callable[[int, bool], Job] = {
        "mixtral": families._mixtral(32, 2, 4, 2, 48, 4, 64, 16),
        "qwen3_moe": families._qwen3_moe(32, 2, 4, 2, 16, 8, 2, 64, 16),
        "deepseek_v3": families._deepseek_v3(16, None, **families._DEEPSEEK_TINY),
    }[family]
    job = families._tiny(build)()
    job.model.to(torch.float32)
    return job


def compare_family(family: str, case: str, cluster: str) -> Comparison:
    """One family with batched matmuls in float64, on every rank."""
    with all_raised():
        job = FAMILIES[family].tiny()
        program = equality.compiled(job, case, cluster)
        return run(job, program)


def compare_grouped(family: str, case: str, cluster: str) -> Comparison:
    """One family with grouped matmuls in float32, on every rank."""
    job = grouped(family)
    return run(job, equality.compiled(job, case, cluster))


def with_router_loss() -> Job:
    """Mixtral, tiny, that adds the router's loss (a product of two means over all tokens)."""
    job = FAMILIES["mixtral"].tiny()
    config: Any = job.model.config
    config.output_router_logits = True
    return job


def compare_router_loss(case: str, cluster: str) -> Comparison:
    """Mixtral with the router's loss, on every rank."""
    with all_raised():
        job = with_router_loss()
        return run(job, equality.compiled(job, case, cluster))

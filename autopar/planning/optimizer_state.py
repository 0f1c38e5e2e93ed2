"""How much state an optimizer keeps, found by running it on a tiny parameter of each kind."""

from collections.abc import Iterable

import torch

from autopar.capture.captured import ParamMeta
from autopar.errors import AutoparError
from autopar.layouts.state_ratio import StateRatio
from autopar.runtime.training import OptimizerFactory, build_optimizer

SIDE = 4


def state_ratio(optimizer: OptimizerFactory | None, params: Iterable[ParamMeta]) -> StateRatio:
    """State elements per parameter element, the largest over the trainable parameters.

    `optimizer` as in `compile`: a class or partial of torch.optim, or a callable of named
    parameters; None is AdamW. Errors: AutoparError where it can't be built or run.
    """
    tiny = {
        p.names[0]: torch.nn.Parameter(torch.zeros((SIDE,) * len(p.shape)))
        for p in params
        if p.trainable
    }
    if not tiny:
        return StateRatio(0.0)
    try:
        built = build_optimizer(optimizer, list(tiny.items()))
        for value in tiny.values():
            value.grad = torch.ones_like(value)
        built.step()
    except Exception as error:
        raise AutoparError(f"the optimizer {optimizer!r} can't be used: {error!r}") from error
    ratios = []
    for value in tiny.values():
        state = built.state.get(value, {})
        kept = sum(t.numel() for t in state.values() if torch.is_tensor(t) and t.dim() > 0)
        ratios.append(kept / value.numel())
    return StateRatio(max(ratios))

"""Batch norm whose statistics are those of the whole batch, where ranks hold parts of it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.process_mesh import Group

_ops = torch.ops._c10d_functional


def sync_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    axis: Group,
) -> Tensor:
    """`F.batch_norm` of x [batch / n, channels, …] as if over the whole batch.

    In training the ranks of the axis gather each other's mean and variance (they hold equally many
    samples), update the running statistics alike, and in the backward sum Σ dy and Σ dy · x̂ of each
    channel (Ioffe and Szegedy 2015, section 3). `weight` and `bias` get this rank's partial
    gradients.
    """
    if not training or axis.size == 1:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    mean, variance, count = _statistics(x.detach(), axis)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = variance * (count / (count - 1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    scale = torch.rsqrt(variance + eps)
    result: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, mean, scale, count, axis
    )
    return result


def _statistics(x: Tensor, axis: Group) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance of each channel over all ranks, and how many elements that is."""
    dims = [d for d in range(x.ndim) if d != 1]
    wide = x.to(_statistics_dtype(x))
    variance, mean = torch.var_mean(wide, dims, correction=0)
    own = torch.stack([mean, variance])
    rows = _wait(_ops.all_gather_into_tensor(own.contiguous(), axis.size, axis.name))
    means, variances = rows.view(axis.size, 2, -1).unbind(1)
    whole = means.mean(0)
    # Equal counts: the variance is that within ranks and that between them (Chan et al. 1979).
    within, between = variances.mean(0), (means - whole).square().mean(0)
    return whole, within + between, x.numel() // x.shape[1] * axis.size


class _Normalise(torch.autograd.Function):
    """x̂ · weight + bias for given statistics; the backward knows that they depend on x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        scale: Tensor,
        count: int,
        axis: Group,
    ) -> Tensor:
        ctx.count, ctx.axis, ctx.has_bias = count, axis, bias is not None
        ctx.save_for_backward(x, weight, mean, scale)
        result = _normalised(x, mean, scale)
        if weight is not None:
            result = result * _column(weight, x)
        if bias is not None:
            result = result + _column(bias, x)
        return result.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        dims = [d for d in range(x.ndim) if d != 1]
        normal, wide = _normalised(x, mean, scale), grad.to(scale.dtype)
        own = torch.stack([wide.sum(dims), (wide * normal).sum(dims)])
        sums = _wait(_ops.all_reduce(own, "sum", ctx.axis.name)) / ctx.count
        inner = wide - _column(sums[0], x) - normal * _column(sums[1], x)
        factor = scale if weight is None else scale * weight
        result = (inner * _column(factor, x)).to(x.dtype)
        to_weight = None if weight is None else own[1].to(weight.dtype)
        to_bias = own[0].to(grad.dtype) if ctx.has_bias else None
        return result, to_weight, to_bias, None, None, None, None


def _normalised(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return (x.to(scale.dtype) - _column(mean, x)) * _column(scale, x)


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _column(values: Tensor, x: Tensor) -> Tensor:
    """Values of channels, shaped to go with x."""
    return values.view(-1, *[1] * (x.ndim - 2))


def _wait(x: Tensor) -> Tensor:
    waited: Tensor = _ops.wait_tensor(x)
    return waited

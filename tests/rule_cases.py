"""Calls of every op that has a factor rule: (op, arguments, how many dims its rule frees).
A dict at the end of the arguments is those by name.

Whoever gives an op a rule adds a row. The count of dims keeps a rule that blocks all from passing.
"""

from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401 (its operator)
from torch import Tensor

aten = torch.ops.aten
Case = tuple[torch._ops.OpOverload, tuple[Any, ...], int]


def real(*shape: int) -> Tensor:
    """Numbers away from 0, where many functions have kinks or poles."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1


def whole(*shape: int, below: int = 4) -> Tensor:
    """Integers in [0, below)."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, below, shape, generator=generator)


def _pointwise() -> list[Case]:
    x, y = real(4, 6), real(4, 6)
    one = "tanh silu relu neg rsqrt sqrt exp log sigmoid abs cos sin tan acos asin atan cosh sinh "
    one += "erf erfc celu selu relu6 hardswish hardsigmoid mish log_sigmoid "
    one += "detach square reciprocal log1p log2 log10 expm1 exp2 sign sgn floor ceil trunc "
    one += "frac isnan isinf isfinite nan_to_num clone contiguous hardshrink softshrink "
    one += "hardtanh gelu elu leaky_relu softplus zeros_like ones_like alias round"
    cases: list[Case] = [(_overload(name), (x,), 2) for name in one.split()]
    pairs = "add sub mul div lt gt le ge eq ne remainder fmod rsub"
    cases += [(getattr(aten, name).Tensor, (x, y), 2) for name in pairs.split()]
    plain = "floor_divide logical_and logical_or logical_xor maximum minimum atan2 hypot"
    cases += [(_overload(name), (x, y), 2) for name in plain.split()]
    cases += [(getattr(aten, f"bitwise_{n}").Tensor, (whole(4, 6), whole(4, 6)), 2) for n in
              ("and", "or", "xor")]  # fmt: skip
    return [
        *cases,
        (aten.bitwise_not.default, (whole(4, 6),), 2),
        (aten.logical_not.default, (x,), 2),
        (aten.add.Tensor, (x, real(6)), 2),
        (aten.mul.Tensor, (real(4, 1, 6), real(2, 1)), 3),
        (aten.div.Tensor_mode, (x, y, {"rounding_mode": "floor"}), 2),
        (aten.pow.Tensor_Scalar, (x, 3), 2),
        (aten.to.dtype, (x, torch.float32), 2),
        (aten.dropout.default, (x, 0.0, True), 2),
        (aten.alpha_dropout.default, (x, 0.0, True), 2),
        (aten.feature_dropout.default, (real(4, 6, 2), 0.0, True), 2),
        (aten.feature_alpha_dropout.default, (real(4, 6, 2), 0.0, True), 2),
        (aten.where.self, (x > 0.5, x, y), 2),
        (aten.masked_fill.Scalar, (x, x > 0.5, 2.0), 2),
        (aten.full_like.default, (x, 2.0), 2),
        (aten.clamp.default, (x, 0.2, 0.5), 2),
        (aten.clamp_min.default, (x, 0.2), 2),
        (aten.clamp_max.default, (x, 0.2), 2),
        (aten.threshold.default, (x, 0.4, 0.1), 2),
        (aten.leaky_relu.default, (x - 0.5, 0.3), 2),
        (aten.elu.default, (x - 0.5, 0.3), 2),
        (aten.softplus.default, (x, 2.0), 2),
        (aten.lerp.Scalar, (x, y, 0.3), 2),
        (aten.addcmul.default, (x, y, y), 2),
        (aten.addcdiv.default, (x, y, y), 2),
        (aten.xlogy.Tensor, (x, y), 2),
        (aten.prelu.default, (x - 0.5, real(6)), 2),
        (aten.prelu.default, (x - 0.5, real(1)), 2),
    ]


def _overload(name: str) -> torch._ops.OpOverload:
    found: torch._ops.OpOverload = getattr(aten, name).default
    return found


def _scans() -> list[Case]:
    x = real(4, 6, 8)
    return [
        (aten.cumsum.default, (x, 1), 2),
        (aten.diff.default, (x, 1, 1), 2),
        (aten.diff.default, (x, 1, 1, x[:, :1]), 2),
        (aten.diff.default, (x, 2, -1, x, x), 2),
        (aten.cumprod.default, (x, 1), 2),
        (aten.logcumsumexp.default, (x, 1), 2),
        (aten.flip.default, (x, [1, 2]), 1),
        (aten.roll.default, (x, [1], [1]), 2),
        (aten.roll.default, (x, [1]), 0),
        (aten.tril.default, (x, -1), 1),
        (aten.triu.default, (x, 1), 1),
        (aten.sort.default, (x, 1), 2),
        (aten.argsort.default, (x, 1), 2),
    ]


def _products() -> list[Case]:
    q, k = real(2, 4, 6, 8), real(2, 2, 6, 8)
    grouped = {"is_causal": True, "enable_gqa": True}
    return [
        (aten.linear.default, (real(2, 4, 6), real(8, 6)), 4),
        (aten.matmul.default, (real(2, 4, 6), real(6, 8)), 4),
        (aten.matmul.default, (real(2, 4, 6), real(2, 6, 8)), 4),
        (aten.matmul.default, (real(2, 4, 6), real(6)), 3),
        (aten.matmul.default, (real(6), real(6)), 1),
        (aten.mm.default, (real(4, 6), real(6, 8)), 3),
        (aten.bmm.default, (real(2, 4, 6), real(2, 6, 8)), 4),
        (aten.mv.default, (real(4, 6), real(6)), 2),
        (aten.dot.default, (real(6), real(6)), 1),
        (aten.einsum.default, ("bsh,oh->bso", [real(2, 4, 6), real(8, 6)]), 4),
        (aten.einsum.default, ("ij,jk", [real(4, 6), real(6, 8)]), 3),
        (aten.einsum.default, ("bi,bi->b", [real(4, 6), real(4, 6)]), 2),
        (aten.scaled_dot_product_attention.default, (q, q, q), 2),
        (aten.scaled_dot_product_attention.default, (q, k, k, grouped), 3),
        (aten.scaled_dot_product_attention.default, (q, q, q, real(2, 1, 6, 6)), 2),
        (aten.embedding.default, (real(8, 6), whole(2, 4, below=8)), 4),
        (aten.embedding.default, (real(8, 6), whole(2, 4, below=8), 5), 4),
    ]


def _norms() -> list[Case]:
    x, channels = real(2, 8, 4, 6), real(8)
    statistics = [channels] * 4
    return [
        (aten.layer_norm.default, (real(2, 4, 6), [6], real(6), real(6)), 2),
        (aten.layer_norm.default, (real(2, 4, 6), [4, 6]), 1),
        (aten.rms_norm.default, (real(2, 4, 6), [6], real(6)), 2),
        (aten.softmax.int, (real(2, 4, 6), -1), 2),
        (aten.log_softmax.int, (real(2, 4, 6), 1), 2),
        (aten.batch_norm.default, (x, *statistics, True, 0.1, 1e-5, False), 1),
        (aten.batch_norm.default, (x, *statistics, False, 0.1, 1e-5, False), 4),
        (aten.batch_norm.default, (real(4, 8), None, None, None, None, True, 0.1, 1e-5, False), 1),
        (aten.group_norm.default, (x, 4, channels, channels), 2),
        (aten.group_norm.default, (x, 2), 2),
        (aten.instance_norm.default, (x, channels, None, None, None, True, 0.1, 1e-5, False), 2),
    ]  # fmt: skip


def _windows() -> list[Case]:
    x, image = real(2, 4, 6, 8), [3, 3]
    pools: list[Case] = [
        (aten.max_pool2d.default, (x, [2, 2]), 2),
        (aten.max_pool2d.default, (x, [3, 3], [2, 2], [1, 1]), 2),
        (aten.max_pool2d_with_indices.default, (x, [2, 2]), 2),
        (aten.avg_pool2d.default, (x, [2, 2]), 2),
        (aten.adaptive_avg_pool2d.default, (x, image), 2),
        (aten.adaptive_max_pool2d.default, (x, image), 2),
        (aten.upsample_nearest2d.vec, (x, None, [2.0, 2.0]), 2),
        (aten.upsample_nearest2d.vec, (x, [12, 12], None), 2),
        (aten.upsample_bilinear2d.vec, (x, [12, 12], False, None), 2),
        (aten.upsample_bicubic2d.vec, (x, [12, 12], True, None), 2),
        (aten.upsample_nearest1d.vec, (real(2, 4, 6), [12], None), 2),
        (aten.upsample_linear1d.vec, (real(2, 4, 6), [12], False, None), 2),
        (aten.upsample_nearest3d.vec, (real(2, 4, 2, 4, 2), None, [2.0, 2.0, 2.0]), 2),
        (aten.upsample_trilinear3d.vec, (real(2, 4, 2, 4, 2), [4, 4, 4], False, None), 2),
    ]
    for space, shape in ((1, (6,)), (3, (4, 4, 4))):
        pools += [
            (_overload(f"max_pool{space}d"), (real(2, 4, *shape), [2] * space), 2),
            (_overload(f"avg_pool{space}d"), (real(2, 4, *shape), [2] * space), 2),
            (_overload(f"adaptive_avg_pool{space}d"), (real(2, 4, *shape), [2] * space), 2),
            (_overload(f"adaptive_max_pool{space}d"), (real(2, 4, *shape), [2] * space), 2),
        ]
    for space in (1, 2, 3):
        size, one, two = [6] * space, [1] * space, [2] * space
        back = getattr(aten, f"conv_transpose{space}d")
        back = back.default if space == 1 else back.input
        conv = _overload(f"conv{space}d")
        pools += [
            (conv, (real(2, 4, *size), real(6, 4, *two)), 3),
            (conv, (real(2, 4, *size), real(8, 2, *two), None, two, one, one, 2), 4),
            (conv, (real(2, 4, *size), real(8, 1, *two), None, one, one, two, 4), 3),
            (back, (real(2, 4, *size), real(4, 6, *two), None, two), 3),
            (back, (real(2, 8, *size), real(8, 4, *two), None, two, one, one, 2), 4),
        ]
    padded = aten.conv2d.padding
    return [*pools, (padded, (x, real(6, 4, 3, 3), None, [1, 1], "same"), 3)]


def _reductions() -> list[Case]:
    x = real(2, 4, 6)
    logits = real(4, 6)
    return [
        (aten.sum.default, (x,), 3),
        (aten.sum.dim_IntList, (x, [1], True), 3),
        (aten.mean.dim, (x, [1, 2]), 1),
        (aten.amax.default, (x, [1], True), 2),
        (aten.amin.default, (x, [1]), 2),
        (aten.max.dim, (x, 1), 2),
        (aten.min.dim, (x, 1, True), 2),
        (aten.argmax.default, (x, -1), 2),
        (aten.argmin.default, (x, 1, True), 2),
        (aten.prod.dim_int, (x, 1), 2),
        (aten.any.dim, (x > 0.5, 1), 2),
        (aten.all.dim, (x > 0.5, 1, True), 2),
        (aten.std.dim, (x, [1]), 2),
        (aten.std.correction, (x, [1]), 2),
        (aten.var.correction, (x, [1, 2]), 1),
        (aten.norm.ScalarOpt_dim, (x, 2, [1]), 2),
        (aten.linalg_vector_norm.default, (x, 2, [-1], True), 2),
        (aten.logsumexp.default, (x, [1]), 2),
        (aten.cosine_similarity.default, (x, x * x, -1), 2),
        (aten.cross_entropy_loss.default, (logits, whole(4, below=6), None, 2), 1),
        (aten.nll_loss.default, (logits, whole(4, below=6), None, 2), 1),
        (aten.mse_loss.default, (x, x * x, 2), 3),
        (aten.l1_loss.default, (x, x * x, 2), 3),
        (aten.smooth_l1_loss.default, (x, x * x, 2), 3),
        (aten.huber_loss.default, (x, x * x, 2, 0.5), 3),
        (aten.binary_cross_entropy_with_logits.default, (x, x * x, None, None, 2), 3),
    ]


def _indexing() -> list[Case]:
    x, rows = real(4, 6, 8), whole(2, below=4)
    return [
        (aten.index.Tensor, (x, [rows]), 3),
        (aten.index.Tensor, (x, [None, rows]), 3),
        (aten.index.Tensor, (x, [whole(2, 1, below=4), whole(6, below=4)]), 3),
        (aten.index.Tensor, (x, [rows, None, rows]), 2),
        (aten.index_select.default, (x, 1, rows), 3),
        (aten.gather.default, (x, 1, whole(4, 2, 8, below=6)), 3),
        (aten.gather.default, (x, 1, whole(2, 2, 8, below=6)), 2),
        (aten.take_along_dim.default, (x, whole(4, 2, 1, below=6), 1), 3),
        (aten.one_hot.default, (whole(4, 2), 6), 2),
    ]


def _shapes() -> list[Case]:
    x = real(4, 6, 8)
    return [
        (aten.view.default, (x, [4, 2, 3, 8]), 3),
        (aten.reshape.default, (x, [24, 8]), 3),
        (aten.unflatten.int, (x, 2, [2, 4]), 4),
        (aten.flatten.using_ints, (x, 1), 3),
        (aten.transpose.int, (x, 0, 1), 3),
        (aten.swapaxes.default, (x, 0, 1), 3),
        (aten.swapdims.default, (x, 0, 1), 3),
        (aten.movedim.int, (x, 0, 2), 3),
        (aten.moveaxis.int, (x, 2, 0), 3),
        (aten.permute.default, (x, [2, 0, 1]), 3),
        (aten.t.default, (real(4, 6),), 2),
        (aten.unsqueeze.default, (x, -1), 3),
        (aten.squeeze.dim, (real(4, 1, 6), 1), 2),
        (aten.squeeze.dims, (real(4, 1, 6), [1]), 2),
        (aten.expand.default, (real(4, 1, 6), [2, 4, 8, 6]), 4),
        (aten.split.Tensor, (x, 4, 2), 4),
        (aten.split_with_sizes.default, (x, [2, 4], 1), 4),
        (aten.chunk.default, (x, 2, -1), 4),
        (aten.cat.default, ([x, real(4, 2, 8)], 1), 4),
        (aten.cat.default, ([x, real(4, 1, 8)], 1), 3),
        (aten.slice.Tensor, (x, 1, 2), 4),
        (aten.slice.Tensor, (x, 1, 1), 2),
        (aten.slice.Tensor, (x, 1, 0, 6, 2), 2),
        (aten.slice.Tensor, (x, 2, -4), 4),
        (aten.select.int, (x, 1, 0), 2),
        (aten.unbind.int, (x, 1), 2),
        (aten.stack.default, ([x, x], 1), 3),
        (aten.repeat.default, (real(4, 6), [2, 1, 2]), 4),
        (aten.tile.default, (real(4, 6), [2]), 3),
        (aten.pad.default, (x, [1, 1]), 2),
    ]


def _tokens() -> list[Case]:
    x, rows = real(4, 6), whole(4, 6)
    ends = torch.tensor([2, 3, 3, 6], dtype=torch.int32)
    single, matrices = real(6, 8).float(), real(4, 8, 16).float()
    return [
        (aten.topk.default, (x, 2, 1), 1),
        (aten.topk.default, (x, 2, 0, False, False), 1),
        (aten.searchsorted.Tensor, (real(6).sort()[0], x), 2),
        (aten.scatter.value, (x, 1, rows[:, :2], 1.0), 1),
        (aten.scatter.src, (x, 1, torch.arange(6).expand(4, 6), real(4, 6)), 1),
        (aten.scatter_add.default, (x, 0, rows, real(4, 6)), 1),
        (aten.index_add.default, (x, 0, whole(8), real(8, 6)), 1),
        (aten.index_add.default, (x, 1, whole(8), real(4, 8), {"alpha": 2}), 1),
        (aten.index_put.default, (x, [whole(2)], real(2, 6)), 1),
        (aten.index_put.default, (x, [None, whole(8)], real(4, 8), True), 1),
        (aten.repeat_interleave.self_int, (x, 2, 0), 2),
        (aten.histc.default, (x, 6, 0, 1), 2),
        (torch.ops.transformers.grouped_mm_fallback.default, (single, matrices, ends), 2),
        (aten._grouped_mm.default, (single, matrices, ends), 2),
    ]


def cases() -> list[Case]:
    """All rows."""
    return [
        *_pointwise(),
        *_scans(),
        *_products(),
        *_norms(),
        *_windows(),
        *_reductions(),
        *_indexing(),
        *_tokens(),
        *_shapes(),
    ]

"""The time of matrix products by shape: tiles, waves, split-K, alignment."""

import functools
import math

from autopar.plugin import Kernels

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128))
"""Rows and columns of the output that one unit makes at a time: cuBLAS's usual ones."""

SPLITS = (1, 2, 4, 8)
"""Into how many parts K may be cut, whose sums are then added."""

SHORTEST_PART = 512
"""No part of K is shorter."""

SIXTEEN_BITS = frozenset({"float16", "bfloat16"})


@functools.lru_cache(maxsize=65536)
def product_seconds(
    products: int,
    m: int,
    n: int,
    k: int,
    dtype: str,
    flops_per_s: float,
    memory_bytes_per_s: float,
    kernels: Kernels,
) -> float:
    """Seconds of `products` products [m, k] by [k, n]: of the best tile and split,

        ⌈tiles · splits / units⌉ · 2 · tile · (K / splits + prologue) / (rate of a unit),

    and for a split the float32 partial sums, written and read. The last wave takes as long as a
    full one (NVIDIA, "Matrix Multiplication Background User's Guide": tile and wave quantisation).
    """
    aligned = alignment(n, k, kernels) if dtype in SIXTEEN_BITS else 1.0
    unit_flops_per_s = flops_per_s * kernels.sustained * aligned / kernels.units
    best_s = math.inf
    for rows, columns in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * products
        rate = unit_flops_per_s * _tile_share(rows * columns, kernels)
        for splits in SPLITS:
            if splits > 1 and (tiles * splits > 2 * kernels.units or k / splits < SHORTEST_PART):
                break
            waves = math.ceil(tiles * splits / kernels.units)
            seconds = waves * 2 * rows * columns * (k / splits + kernels.prologue) / rate
            if splits > 1:
                seconds += 8 * splits * products * m * n / memory_bytes_per_s
            best_s = min(best_s, seconds)
    return best_s


def alignment(n: int, k: int, kernels: Kernels) -> float:
    """The share of the rate that rows of n and k 16-bit elements allow, the worse of the two."""
    return min(_aligned(length, kernels) for length in (n, k))


def _aligned(length: int, kernels: Kernels) -> float:
    if length % 64 == 0:
        return 1.0
    return kernels.aligned_16 if length % 8 == 0 else kernels.unaligned


def _tile_share(area: int, kernels: Kernels) -> float:
    if area >= 256 * 128:
        return 1.0
    return kernels.tile_128 if area >= 128 * 128 else kernels.tile_64


def attention_seconds(
    flops: float, queries: int, head: int, backward: bool, flops_per_s: float, kernels: Kernels
) -> float:
    """Seconds of fused attention (Dao 2023, FlashAttention-2) that does `flops`.

    Short sequences reach s / (s + half) of its rate; heads below 128 and below 64 reach 0.85 and
    0.6 (fitted with the rest). The backward recomputes the scores: five products where the forward
    has two, so that its own flops, twice the forward's, are 4/5 of what it does.
    """
    width = 1.0 if head >= 128 else 0.85 if head >= 64 else 0.6
    rate = flops_per_s * kernels.attention * width * queries / (queries + kernels.attention_half)
    return 1.25 * flops / (rate * kernels.attention_backward) if backward else flops / rate

"""Random shapes of models: for each family a builder, and what it was drawn as."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import families

HEADS = (2, 3, 4, 6, 8)


def _common(draw: random.Random) -> dict[str, int]:
    heads = draw.choice(HEADS)
    return {
        "hidden": heads * draw.choice((4, 8)),
        "layers": draw.choice((1, 2, 3, 4, 4, 5, 6)),
        "heads": heads,
        "vocab": draw.randint(24, 70) if draw.random() < 0.5 else 8 * draw.randint(3, 8),
        "length": draw.choice((8, 16, 16, 24, 32, draw.randint(5, 20))),
    }


def _kv(draw: random.Random, heads: int) -> int:
    return draw.choice([n for n in range(1, heads + 1) if heads % n == 0])


def _ffn(draw: random.Random) -> int:
    return draw.choice((16, 24, 32, 40, 48, draw.randint(5, 50)))


def _gpt2(draw: random.Random) -> Any:
    shape = _common(draw)
    return families._gpt2(**shape, dropout=0.0), shape


def _grouped_query(build: Callable[..., Any]) -> Callable[[random.Random], Any]:
    def make(draw: random.Random) -> Any:
        shape = _common(draw)
        shape |= {"kv": _kv(draw, shape["heads"]), "ffn": _ffn(draw)}
        return build(**shape), shape

    return make


def _mixtral(draw: random.Random) -> Any:
    shape: dict[str, Any] = _common(draw)
    shape |= {"kv": _kv(draw, shape["heads"]), "ffn": _ffn(draw)}
    shape["experts"] = draw.choice((2, 4, 6, 8))
    return families._mixtral(**shape), shape


def _qwen3_moe(draw: random.Random) -> Any:
    shape: dict[str, Any] = _common(draw)
    shape |= {"kv": _kv(draw, shape["heads"]), "ffn": _ffn(draw)}
    shape |= {"experts": draw.choice((4, 6, 8)), "chosen": draw.randint(1, 3)}
    return families._qwen3_moe(**shape), shape


def _deepseek_v3(draw: random.Random) -> Any:
    groups = draw.choice((1, 2, 4))
    shape = {
        "num_hidden_layers": draw.randint(2, 4),
        "n_group": groups,
        "topk_group": draw.randint(1, groups),
        "n_routed_experts": groups * draw.choice((2, 4)),
        "moe_intermediate_size": draw.choice((8, 16, 20)),
        "first_k_dense_replace": draw.randint(0, 1),
    }
    length = draw.choice((8, 16, 16))
    build = families._deepseek_v3(length, None, **{**families._DEEPSEEK_TINY, **shape})
    return build, shape | {"length": length}


def _bert(draw: random.Random) -> Any:
    shape = _common(draw) | {"ffn": _ffn(draw)}
    return families._bert(**shape), shape


def _t5(draw: random.Random) -> Any:
    shape = _common(draw) | {"ffn": _ffn(draw), "head_dim": draw.choice((4, 8))}
    shape["n"] = shape.pop("length")
    return families._t5(**shape), shape


def _vit(draw: random.Random) -> Any:
    shape = _common(draw) | {"ffn": _ffn(draw), "image": draw.choice((8, 16)), "patch": 4}
    del shape["vocab"], shape["length"]
    return families._vit(**shape), shape


def _torch_layers(two: bool) -> Callable[[random.Random], Any]:
    def make(draw: random.Random) -> Any:
        shape = _common(draw) | {"ffn": _ffn(draw)}
        shape["width"] = shape.pop("hidden")
        del shape["vocab"]
        return families._torch_layers(**shape, two=two), shape

    return make


def _resnet(draw: random.Random) -> Any:
    shape = {"width": draw.choice((4, 8)), "base": draw.choice((4, 6, 8)), "classes": 4}
    return families._resnet((draw.randint(1, 2), 1), image=16, **shape), shape


def _mlp(draw: random.Random) -> Any:
    shape = {"width": draw.choice((8, 16, 24, draw.randint(5, 24))), "layers": draw.randint(1, 5)}
    return families._mlp(**shape), shape


FAMILIES: Mapping[str, Callable[[random.Random], Any]] = {
    "gpt2": _gpt2,
    "llama": _grouped_query(families._llama),
    "qwen3": _grouped_query(families._qwen3),
    "phi3": _grouped_query(families._phi3),
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "transformer": _torch_layers(True),
    "encoder": _torch_layers(False),
    "resnet": _resnet,
    "mlp": _mlp,
}
MOE = ("mixtral", "qwen3_moe", "deepseek_v3")

"""Models whose training is known: on what they were trained, how, and how to see it in a plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.devices import Kernels
from autopar.layouts.state_ratio import StateRatio

Figures = Mapping[str, Any]
Pins = Mapping[str, Any]

MEGATRON = StateRatio(2.0, 4, 4, 4)
"""bf16 values, float32 gradients, moments and master copies: 18 bytes an element."""
FSDP = StateRatio(2.0, 4, 4, 4, gathers_master=True)
"""The same where float32 shards are what is gathered from (FSDP's mixed precision)."""

OVERLAPPING = Kernels(
    units=1,
    sustained=1.0,
    tile_128=1.0,
    tile_64=1.0,
    prologue=0.0,
    aligned_16=1.0,
    unaligned=1.0,
    attention=1.0,
    attention_backward=1.0,
    attention_half=0.0,
    host_exponent=4.0,
    backward_ops=1.0,
    optimizer_ops=1.0,
    joins_pointwise=True,
    joins_sums=True,
    overlap_slowdown=0.0,
)
"""A device that does everything at its peak and hides all that can be hidden: the roofline by which
jax-ml's scaling book counts."""

RIVALS = ("second", "third")
"""The best on the next best meshes."""

KEPT = "without_recompute"
"""The plan on its own mesh, had it the memory."""


@dataclass(frozen=True)
class Case:
    """`samples`: of the global batch. `answer`: in words; `holds`: whether a plan is so. `pins`:
    what is planned beside "free"; "known" is the answer. `source`: of the answer, and what isn't
    published but assumed here."""

    name: str
    model: str
    cluster: str
    samples: int
    answer: str
    holds: Callable[[Figures], bool]
    pins: Mapping[str, Pins]
    source: str
    state: StateRatio = MEGATRON
    kernels: Kernels | None = None
    """Of the devices, instead of their preset's."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Of its plans."""
        return tuple(f"{self.name}/{what}" for what in (*self.pins, *RIVALS, KEPT))


def mesh(**axes: int) -> dict[str, Any]:
    """Pins of all axes; those left out are 1."""
    return {"pp": 1, "dp": 1, "cp": 1, "ep": 1, "tp": 1, **axes}


def _pins(known: Pins, **others: Pins) -> Mapping[str, Pins]:
    return {"known": known, **others, "free": {}}


def _axes(plan: Figures, *names: str) -> bool:
    """Whether it has these axes and no others (dp aside)."""
    return set(plan["axes"]) - {"dp"} == set(names)


def _has(plan: Figures, *names: str) -> bool:
    return set(names) <= set(plan["axes"])


def _uses(plan: Figures, beginning: str) -> bool:
    return any(name.startswith(beginning) for name in plan["used"])


def _only_data(plan: Figures) -> bool:
    return _axes(plan)


def _fsdp_alone(plan: Figures) -> bool:
    return _axes(plan) and _uses(plan, "zero 3")


def _three_ways(plan: Figures) -> bool:
    return _has(plan, "tp", "pp") and _uses(plan, "zero 1")


def _torus(plan: Figures) -> bool:
    fsdp = _uses(plan, "zero 3") and _uses(plan, "sequence")
    return fsdp and _has(plan, "tp") and not _has(plan, "pp")


def _experts(plan: Figures) -> bool:
    axes = plan["axes"]
    return bool(axes.get("ep", 1) > axes.get("tp", 1))


CASES: tuple[Case, ...] = (
    Case(
        "gpt2",
        "gpt2-124M",
        "h100:8",
        512,
        "data or ZeRO",
        _only_data,
        _pins(mesh(dp=8)),
        "common practice for small models",
    ),
    Case(
        "bert",
        "bert-large",
        "v100:8",
        256,
        "data or ZeRO",
        _only_data,
        _pins(mesh(dp=8)),
        "common practice; Devlin et al. 2018: data alone, 256 samples",
    ),
    Case(
        "vit",
        "vit-large",
        "a100:16",
        4096,
        "data or ZeRO",
        _only_data,
        _pins(mesh(dp=16)),
        "common practice; Dosovitskiy et al. 2021: 4,096 samples",
    ),
    Case(
        "resnet",
        "resnet-50",
        "v100:8",
        512,
        "data or ZeRO",
        _only_data,
        _pins(mesh(dp=8)),
        "common practice; Goyal et al. 2017: data alone",
    ),
    Case(
        "llama3-8B",
        "llama3-8B",
        "h100:8",
        64,
        "data or ZeRO",
        _only_data,
        _pins(mesh(dp=8, zero=3)),
        "torchtitan's Llama-3-8B: FSDP alone on 8 H100s",
        FSDP,
    ),
    Case(
        "olmo",
        "olmo-7B",
        "a100_40gb:216",
        2160,
        "FSDP alone",
        _fsdp_alone,
        _pins(mesh(dp=216, zero=3)),
        "Groeneveld et al. 2024: FSDP on 27 nodes of 8 A100-40GB, about 4M tokens a batch",
        FSDP,
    ),
    Case(
        "yi",
        "yi-34B",
        "a100:256",
        1024,
        "ZeRO 1 with tp and pp",
        _three_ways,
        _pins(
            {**mesh(tp=8, pp=4, dp=8), "zero": 1, "sequence": True},
            without_stages={"pp": 1},
        ),
        "01.AI 2024: ZeRO 1, tensor and pipeline parallelism; devices and batch aren't published",
    ),
    Case(
        "gemma",
        "gemma-27B-like",
        "tpu_v5p:6144",
        1536,
        "FSDP with tensor and sequence, no pipeline",
        _torus,
        _pins({**mesh(dp=768, tp=8), "zero": 3, "sequence": True}),
        "Gemma Team 2024 (Gemma 2, 27B): 6,144 TPU v5p, 768-way data, 8-way model, ZeRO 3; "
        "the batch isn't published",
    ),
    Case(
        "gemma-overlapping",
        "gemma-27B-like",
        "tpu_v5p:6144",
        1536,
        "FSDP with tensor and sequence, no pipeline",
        _torus,
        _pins({**mesh(dp=768, tp=8), "zero": 3, "sequence": True}),
        "Gemma Team 2024 (Gemma 2, 27B): 6,144 TPU v5p, 768-way data, 8-way model, ZeRO 3; "
        "the batch isn't published. On devices that hide what can be hidden",
        kernels=OVERLAPPING,
    ),
    Case(
        "mixtral",
        "mixtral-8x22B",
        "h100:256",
        1024,
        "experts over tensor",
        _experts,
        _pins({"ep": 8, "tp": 1}, tensor={"ep": 1, "tp": 8}),
        "NVIDIA's recipes of Mixtral have ep 8; the batch is assumed",
    ),
    Case(
        "qwen3",
        "qwen3-235B-A22B",
        "h100:256",
        1024,
        "experts over tensor",
        _experts,
        _pins({"ep": 32, "tp": 1}, tensor={"ep": 1, "tp": 8}),
        "NVIDIA's recipes of Qwen3-235B have ep 32 on 256 H100s; the batch is assumed",
    ),
    Case(
        "llama3-405B",
        "llama3-405B",
        "h100:16384",
        2048,
        "tp inside the node, pp across",
        lambda plan: _has(plan, "tp", "pp") and plan["axes"]["tp"] <= 8,
        _pins({**mesh(tp=8, pp=16, dp=128), "sequence": True}),
        "Llama Team 2024, table 4: tp 8, pp 16, dp 128 on 16,384 H100s, 16M tokens",
    ),
    Case(
        "llama3-405B-long",
        "llama3-405B-131072",
        "h100:16384",
        128,
        "tp inside the node, pp across, cp",
        lambda plan: _has(plan, "tp", "pp", "cp"),
        _pins({**mesh(tp=8, cp=16, pp=16, dp=8), "sequence": True}),
        "Llama Team 2024, table 4: tp 8, cp 16, pp 16, dp 8 on 16,384 H100s, 16M tokens",
    ),
    Case(
        "deepseek",
        "deepseek-v3-671B",
        "h800:2048",
        15360,
        "pp and ep, no tp",
        lambda plan: _axes(plan, "pp", "ep"),
        _pins({**mesh(pp=16, ep=64, dp=2), "zero": 1}),
        "DeepSeek-AI 2024: pp 16, ep 64 over 8 nodes, ZeRO 1 on 2,048 H800s, 15,360 samples",
    ),
)
"""From the smallest search to the largest."""

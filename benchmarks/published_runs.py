"""Published runs as what autopar is asked: a model, a cluster, a pinned plan; and what was
measured. Sources and licence: benchmarks/data/README.md."""

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from published_models import Shape

DATA = Path(__file__).parent / "data"
PRESETS = {
    "A100-80GB": "a100",
    "A100-40GB": "a100_40gb",
    "H100-80GB": "h100",
    "H200": "h200",
    "B200": "b200",
    "GB200": "gb200_nvl72",
}
DEVICES = {
    "a100": "ampere",
    "a100_40gb": "ampere",
    "h100": "hopper",
    "h200": "hopper",
    "b200": "blackwell",
    "gb200_nvl72": "blackwell",
}
"""Whose constants a preset's devices have."""
FP8 = ("fp8", "fp8-cs", "fp8-tensorwise", "amp_fp8", "fp8 (25.09 default)", "fp8-cs (fp8-mx)")
"""Products with weights in fp8 with one scale a tensor."""
AXES = ("pp", "dp", "cp", "ep", "tp")
SITES: Mapping[str, Mapping[str, Any]] = {
    "vtrain": {"nic": 0.5},  # 800 Gb/s a node
    "bloom": {"nic": 0.25, "network": "omni_path"},  # Jean Zay: 4 cards of 100 Gb/s a node
}
"""Where a run's network isn't the preset's: the share of its network cards that it has."""


@dataclass(frozen=True)
class Run:
    """`source`: the family that it is scored with; `group`: runs that differ in the plan alone.
    `step_s`, `memory_bytes`: measured, or None. `unsupported`: why it can't be predicted.
    `assumed`: what its source doesn't say, and what is taken."""

    name: str
    source: str
    group: str
    shape: Shape
    batch: int
    preset: str
    devices: int
    site: str
    software: str
    pins: Mapping[str, Any]
    step_s: float | None
    memory_bytes: float | None
    assumed: tuple[str, ...] = ()
    unsupported: str = ""
    counts: str = ""
    """What its figure of memory counts, where it isn't what the software's usually does."""
    weight_products: str = ""
    """The dtype that its products with weights ran in, where it isn't the model's."""
    power_w: int = 0
    """The devices' limit, where it isn't the usual one; they had slower memory as well."""

    @property
    def fitted(self) -> bool:
        """Whether it is in the half that constants are fitted on: by hash of the configuration."""
        key = repr(
            (self.shape, self.batch, self.preset, self.devices, sorted(map(str, self.pins.items())))
        )
        return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 2 == 0


def read_runs() -> tuple[Run, ...]:
    """All of them."""
    software = json.loads((DATA / "software.json").read_text(encoding="utf-8"))
    runs = [*_vtrain("multi", software), *_vtrain("single", software)]
    for row in json.loads((DATA / "published_runs.json").read_text(encoding="utf-8")):
        runs.append(_published(row, software))
    return tuple(runs)


# ---------------------------------------------------------------- vTrain's tables


def _vtrain(which: str, software: Mapping[str, Any]) -> Iterator[Run]:
    path = DATA / f"vtrain_{which}.csv"
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            whole = {key: int(float(value)) for key, value in row.items() if "time" not in key}
            hidden, heads = whole["hidden size"], whole["attention heads"]
            parallel = {
                "tp": whole["tensor parallelism"],
                "dp": whole["data parallelism"],
                "pp": whole["pipeline parallelism"],
                "recompute": "full",
            }
            batch, devices = whole["global batch"], whole["# GPUs"]
            shape = Shape(
                layers=whole["# layers"],
                hidden=hidden,
                heads=heads,
                kv_heads=heads,
                head=hidden // heads,
                ffn=4 * hidden,
                vocab=51200,
                sequence=whole["sequence length"],
                gated=False,
                tied=True,
                fused_attention=False,
                dropout=0.1,
                dtype=torch.float16,
            )
            layers = whole["# layers"]
            yield Run(
                name=f"vtrain-{which}-{number}",
                source=f"vtrain_{which}",
                group=f"h{hidden} L{layers} on {devices}, batch {batch}",
                shape=shape,
                batch=batch,
                preset="a100",
                devices=devices,
                site="vtrain",
                software="megatron",
                pins=_pins(parallel, batch, whole["micro batch"], whole["# layers"]),
                step_s=float(row["iteration time (ms)"]) / 1e3,
                memory_bytes=None,
            )


# ---------------------------------------------------------------- the other sources


def source_of(row: Mapping[str, Any]) -> str:
    """The family of a row of published_runs.json."""
    text, gpu = row["source"], row["cluster"]["gpu"]
    for part, name in (
        ("Narayanan", "narayanan_table1"),
        ("Table 5", "korthikanti_table5"),
        ("Table 4 (ONE", "korthikanti_layer"),
        ("Fig.1", "korthikanti_fig1"),
        ("bigscience", "bloom"),
        ("torchtitan", "torchtitan"),
        ("llm-foundry", "foundry_" + gpu.split("-")[0].lower()),
        ("tpu-recipes", "tpu"),
    ):
        if part in text:
            return name
    kind = "dense" if row["model"]["kind"] == "dense" else "moe"
    return f"{kind}_nvidia_" + ("hopper" if gpu.startswith("H") else "blackwell")


def _software(row: Mapping[str, Any], source: str) -> str:
    if source == "bloom":
        return "megatron" if row["precision"] == "fp16" else "megatron_bf16"
    if source.split("_")[0] in ("narayanan", "korthikanti"):
        return "megatron"
    if source == "torchtitan":
        return "fsdp2_eager" if "a100" in row["id"] else "fsdp2"
    return "fsdp1" if source.startswith("foundry") else "nemo"


def _published(row: Mapping[str, Any], known: Mapping[str, Any]) -> Run:
    source = source_of(row)
    software = _software(row, source)
    model, parallel = row["model"], dict(row["parallel"])
    assumed = [f"{field} isn't stated" for field in row["unknown_fields"]]
    if "asynctp" in row["id"]:
        assumed.append("that tensor parallelism's collectives overlap products isn't modelled")
    if parallel.get("recompute") == "selective_op":
        assumed.append("recompute of every second product is taken as of every second layer")
    why = _unsupported(row, parallel)
    shape, batch = _NO_SHAPE, row.get("global_batch") or 0
    pins: Mapping[str, Any] = {}
    if not why:
        micro = row.get("micro_batch")
        if not micro:
            micro = max(1, batch // parallel["dp"] // parallel["pp"])
            assumed.append(f"micro batch {micro}: as many microbatches as stages")
        why = _indivisible(batch, parallel, micro)
        pins = {} if why else _pins(parallel, batch, int(micro), model["layers"])
        dtype = torch.float16 if row["precision"] == "fp16" else torch.bfloat16
        shape = _shape(model, known[software], dtype)
    measured = row["measured"]
    memory = measured.get("memory_bytes")
    if measured.get("memory_gib"):
        memory = measured["memory_gib"] * 2**30
    if measured.get("memory_gb"):
        memory = measured["memory_gb"] * 2**30
    return Run(
        name=row["id"],
        source=source,
        group=f"{model['name']} on {row['cluster']['gpus']}, batch {batch}",
        shape=shape,
        batch=batch,
        preset=PRESETS.get(row["cluster"]["gpu"].replace("96GB-500W", "80GB"), ""),
        devices=row["cluster"]["gpus"],
        site="bloom" if source == "bloom" else "",
        software=software,
        pins=pins,
        step_s=_step_s(row),
        memory_bytes=memory,
        assumed=tuple(assumed),
        unsupported=why,
        weight_products="float8_e4m3fn" if row["precision"] in FP8 else "",
        counts="layers of the first stage" if source == "korthikanti_fig1" else "",
        power_w=500 if "500W" in row["cluster"]["gpu"] else 0,
    )


_NO_SHAPE = Shape(1, 1, 1, 1, 1, 1, 1, 1, False, False, False, 0.0, torch.float32)


def _unsupported(row: Mapping[str, Any], parallel: Mapping[str, Any]) -> str:
    model, gpu = row["model"], row["cluster"]["gpu"]
    if model["kind"] != "dense":
        return f"a model of kind {model['kind']} isn't built yet"
    if not all(model.get(key) for key in ("layers", "hidden", "heads", "ffn", "vocab", "seq")):
        return "the model's shape isn't published"
    if gpu not in PRESETS and "500W" not in gpu:
        return f"there is no preset for {gpu}"
    if row["precision"] not in ("bf16", "amp_bf16", "fp16", *FP8):
        return f"products in {row['precision']} aren't captured"
    if not row.get("global_batch") or not parallel.get("pp"):
        return "the batch or the mesh isn't published"
    if "offload" in str(parallel.get("recompute")):
        return "saved tensors are offloaded to the host"
    return ""


def _indivisible(batch: int, parallel: Mapping[str, Any], micro: float) -> str:
    pieces = parallel["dp"] * micro
    return f"the batch of {batch} isn't divisible by {pieces}" if batch % pieces else ""


def _shape(model: Mapping[str, Any], software: Mapping[str, Any], dtype: torch.dtype) -> Shape:
    heads = model["heads"]
    return Shape(
        layers=model["layers"],
        hidden=model["hidden"],
        heads=heads,
        kv_heads=model.get("kv_heads") or heads,
        head=model.get("head_dim") or model["hidden"] // heads,
        ffn=model["ffn"],
        vocab=model["vocab"],
        sequence=model["seq"],
        gated=bool(model.get("gated")),
        tied=bool(model.get("tied_embeddings")),
        fused_attention=software["attention"] == "fused",
        dropout=software["dropout"],
        dtype=dtype,
    )


def _step_s(row: Mapping[str, Any]) -> float | None:
    measured = row["measured"]
    for key in ("iter_time_s", "iter_time_s_derived"):
        if measured.get(key):
            return float(measured[key])
    if "layer_total_ms" in measured:
        return None
    rate, batch = measured.get("tokens_per_s_per_gpu"), row.get("global_batch")
    if rate and batch and row["model"].get("seq"):
        return float(batch * row["model"]["seq"] / rate / row["cluster"]["gpus"])
    return None


# ---------------------------------------------------------------- pins


def _pins(parallel: Mapping[str, Any], batch: int, micro: int, layers: int) -> Mapping[str, Any]:
    """`compile`'s `pin` for a row's mesh and choices."""
    pins: dict[str, Any] = {axis: parallel.get(axis) or 1 for axis in AXES}
    pins["microbatches"] = batch // pins["dp"] // micro
    zero = parallel.get("zero") or 0
    pins["zero"] = zero if zero and pins["dp"] > 1 else False
    pins["sequence"] = bool(parallel.get("sp")) and pins["tp"] > 1
    recompute = parallel.get("recompute")
    pins["recompute"] = "full" if recompute == "full" else False
    if recompute in ("selective_layer", "selective_op"):
        again = {f"blocks.{i}.*": {"recompute": "full"} for i in range(0, layers, 2)}
        pins["layers"] = again
        pins["recompute"] = False
    chunks = parallel.get("vp") or 1
    if pins["pp"] > 1 and chunks > 1:
        pins["pipeline"] = {"schedule": "interleaved", "chunks": chunks}
    elif pins["pp"] > 1:
        pins["schedule"] = "1f1b"
    return pins

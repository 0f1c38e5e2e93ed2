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
from published_moe import Mla, Moe

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
PEAK_BYTES_PER_S = {
    "a100": 2.039e12,
    "a100_40gb": 1.555e12,
    "h100": 3.35e12,
    "h200": 4.8e12,
    "h800": 3.35e12,
    "b200": 8.0e12,
    "gb200_nvl72": 8.0e12,
}
"""Data sheets' rates of memory, of which constants are shares."""

LINE_BYTES_PER_S = {
    "a100": 25e9,
    "a100_40gb": 25e9,
    "h100": 50e9,
    "h200": 50e9,
    "h800": 50e9,
    "b200": 50e9,
    "gb200_nvl72": 50e9,
}
"""A device's share of its node's network cards."""

FP8 = (
    *("fp8", "fp8-cs", "fp8-tensorwise", "fp8-rowwise", "amp_fp8"),
    *("fp8 (25.09 default)", "fp8-cs (fp8-mx)", "fp8-mx", "mxfp8"),
)
"""Products with weights in fp8."""
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
    scaled_rows: bool = False
    """Whether fp8 operands have a scale for each row."""
    keeps_ops: bool = False
    """Whether layers that run again keep the results of attention and of every second product."""
    folds_experts: bool = False
    """Whether experts are whole, on ranks of ep and tp alike."""
    power_w: int = 0
    """The devices' limit, where it isn't the usual one; they had slower memory as well."""

    @property
    def fitted(self) -> bool:
        """Whether it is in the half that constants are fitted on: by hash of the configuration."""
        of = self.shape
        size = (of.layers, of.hidden, of.heads, of.kv_heads, of.ffn, of.vocab, of.sequence)
        mesh = sorted([*map(str, self.pins.items()), *["keeps_ops"] * self.keeps_ops])
        key = repr((size, str(of.dtype), self.batch, self.preset, self.devices, mesh))
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
            tp = int(whole["tensor parallelism"])
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
                fused_softmax=fuses_softmax(heads, whole["micro batch"], tp),
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
    if "maxtext" in row["id"]:
        return "dense_maxtext_hopper"
    kind = "dense" if row["model"]["kind"] == "dense" else "moe"
    return f"{kind}_nvidia_" + ("hopper" if gpu.startswith("H") else "blackwell")


def _software(row: Mapping[str, Any], source: str) -> str:
    if source == "bloom":
        return "megatron" if row["precision"] == "fp16" else "megatron_bf16"
    if source.startswith("korthikanti"):
        return "megatron_2022"
    if source.startswith("narayanan"):
        return "megatron"
    if source == "torchtitan":
        if "a100" in row["id"]:
            return "fsdp2_eager"
        year = "_2025" if "2506" in row["id"] or "202506" in row["source"] else ""
        pieces = "sync" in row["notes"] or "asynctp" in row["id"]
        return ("fsdp2_async_tp" if pieces else "fsdp2") + year
    if "maxtext" in row["id"]:
        return "maxtext"
    return "fsdp1" if source.startswith("foundry") else "nemo"


def _published(row: Mapping[str, Any], known: Mapping[str, Any]) -> Run:
    source = source_of(row)
    software = _software(row, source)
    model, parallel = row["model"], dict(row["parallel"])
    assumed = [f"{field} isn't stated" for field in row["unknown_fields"]]
    folds = (parallel.get("ep") or 1) > 1 and (parallel.get("etp") or 1) != parallel["tp"]
    if folds:
        assumed.append("products of whole experts are taken as split over tp")
    why = _unsupported(row, parallel)
    shape, batch = _NO_SHAPE, row.get("global_batch") or 0
    pins: Mapping[str, Any] = {}
    if not why:
        micro = row.get("micro_batch")
        if not micro:
            usual = known[software]["micro_batch"]
            micro = usual or max(1, batch // parallel["dp"] // parallel["pp"])
            how = "as its software's recipes have it" if usual else "as many microbatches as stages"
            assumed.append(f"micro batch {micro}: {how}")
        why = _indivisible(batch, parallel, micro)
        pins = {} if why else _pins(parallel, batch, int(micro), model["layers"])
        dtype = torch.float16 if row["precision"] == "fp16" else torch.bfloat16
        shape = _shape(model, known[software], dtype, int(micro), parallel["tp"])
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
        scaled_rows=row["precision"] == "fp8-rowwise",
        folds_experts=folds,
        keeps_ops=parallel.get("recompute") == "selective_op",
        power_w=500 if "500W" in row["cluster"]["gpu"] else 0,
    )


_NO_SHAPE = Shape(1, 1, 1, 1, 1, 1, 1, 1, False, False, False, False, 0.0, torch.float32)


def _unsupported(row: Mapping[str, Any], parallel: Mapping[str, Any]) -> str:
    model, gpu = row["model"], row["cluster"]["gpu"]
    if model["kind"] not in ("dense", "moe"):
        return f"models of kind {model['kind']} aren't built"
    if not all(model.get(key) for key in ("layers", "hidden", "heads", "ffn", "vocab", "seq")):
        return "the model's shape isn't published"
    if gpu not in PRESETS and "500W" not in gpu:
        return f"there is no preset for {gpu}"
    if row["precision"] not in ("bf16", "amp_bf16", "fp16", *FP8):
        return f"products in {row['precision']} aren't captured"
    if not row.get("global_batch") or not parallel.get("pp"):
        return "the batch or the mesh isn't published"
    ep, tp = parallel.get("ep") or 1, parallel.get("tp") or 1
    if model["kind"] == "moe" and (parallel.get("ep") is None or parallel["dp"] % ep):
        return f"experts over {ep} of {parallel['dp']} data ranks and ranks of tp"
    if model["kind"] == "moe" and model["moe"]["ffn"] % tp:
        return f"experts of width {model['moe']['ffn']} over tp {tp}"
    if "offload" in str(parallel.get("recompute")):
        return "saved tensors are offloaded to the host"
    return ""


def _indivisible(batch: int, parallel: Mapping[str, Any], micro: float) -> str:
    pieces = parallel["dp"] * micro
    return f"the batch of {batch} isn't divisible by {pieces}" if batch % pieces else ""


def fuses_softmax(heads: int, micro: int, tp: int) -> bool:
    """Whether Megatron's fused softmax takes the scores: its blocks hold four rows."""
    return heads * micro // tp % 4 == 0


def _shape(
    model: Mapping[str, Any], software: Mapping[str, Any], dtype: torch.dtype, micro: int, tp: int
) -> Shape:
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
        fused_softmax=software["attention"] == "fused" or fuses_softmax(heads, micro, tp),
        dropout=software["dropout"],
        dtype=dtype,
        repeats_heads=bool(software.get("repeats_heads")),
        compiled_loss=bool(software.get("compiled_loss")) and tp == 1,
        moe=_moe(model["moe"]) if model["kind"] == "moe" else None,
        mla=_mla(model) if model.get("attention") == "mla" else None,
    )


def _moe(given: Mapping[str, Any]) -> Moe:
    dense = given.get("dense_layers") or 0
    counts = given["experts"], given["top_k"], given["ffn"], given.get("shared_ffn") or 0
    return Moe(*counts, dense, given.get("dense_ffn") or 0)


def _mla(model: Mapping[str, Any]) -> Mla:
    given = model["mla"]
    widths = given["q_lora"], given["kv_lora"], given["qk_nope"], given["qk_rope"]
    return Mla(*widths, given["v"])


def _step_s(row: Mapping[str, Any]) -> float | None:
    measured, model, batch = row["measured"], row["model"], row.get("global_batch")
    for key in ("iter_time_s", "iter_time_s_derived"):
        if measured.get(key):
            return float(measured[key])
    if "layer_total_ms" in measured or not (batch and model.get("seq")):
        return None
    gpus, tokens = row["cluster"]["gpus"], batch * model["seq"]
    if rate := measured.get("tokens_per_s_per_gpu"):
        return float(tokens / rate / gpus)
    if not (measured.get("mfu") and model.get("heads")):
        return None
    width = model["heads"] * (model.get("head_dim") or model["hidden"] / model["heads"])
    weights = model.get("active_params") or model["params"]
    flops = tokens * (6 * weights + 6 * model["layers"] * width * model["seq"])
    return float(flops / (measured["mfu"] * row["cluster"]["peak_bf16_tflops"] * 1e12 * gpus))


# ---------------------------------------------------------------- pins


def _pins(parallel: Mapping[str, Any], batch: int, micro: int, layers: int) -> Mapping[str, Any]:
    """`compile`'s `pin` for a row's mesh and choices."""
    pins: dict[str, Any] = {axis: parallel.get(axis) or 1 for axis in AXES}
    pins["microbatches"] = batch // pins["dp"] // micro
    pins["dp"] //= pins["ep"]  # tables count ours of both axes
    zero = parallel.get("zero") or 0
    pins["zero"] = zero if zero and pins["dp"] > 1 else False
    pins["sequence"] = bool(parallel.get("sp")) and pins["tp"] > 1
    if pins["cp"] > 1:
        pins["context"] = {"form": "ring"}
    recompute = parallel.get("recompute")
    pins["recompute"] = "full" if recompute in ("full", "selective_op") else False
    if recompute == "selective_layer":
        again = {f"blocks.{i}.*": {"recompute": "full"} for i in range(0, layers, 2)}
        pins["layers"] = again
        pins["recompute"] = False
    chunks = parallel.get("vp") or 1
    if pins["pp"] > 1 and chunks > 1:
        pins["pipeline"] = {"schedule": "interleaved", "chunks": chunks}
    elif pins["pp"] > 1:
        pins["pipeline"] = {"schedule": "1f1b"}  # others' tables aren't made
    return pins

"""How the plan changes as memory falls: Llama-3-8B in bf16 on eight H100s with ever less memory.

From 240 GB in steps of 10 % down to the error. Checked on the way: predicted memory never above the
limit, and the step never faster with less memory (beyond the gap that planning may leave).

    python benchmarks/memory_limit.py
"""

import argparse
import time
from collections import Counter

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

GAP = 1e-4
BATCH, SEQUENCE = 32, 4096


def llama_3_8b() -> LlamaForCausalLM:
    """The model on meta, in bf16."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def strategies_of(plan: autopar.Plan) -> str:
    """How many regions run which strategies."""
    count: Counter[str] = Counter()
    for region in plan.regions:
        words = [
            name + "".join(f" {value}" for value in options.values())
            for name, options in region.strategies.items()
        ]
        count[" + ".join(words) or "none"] += len(region.layers)
    return ", ".join(f"{n} × {words}" for words, n in count.most_common())


def main() -> None:
    """Print the table; exit 1 where a check fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", type=float, default=240e9, help="bytes a device to start from")
    parser.add_argument("--factor", type=float, default=0.9)
    options = parser.parse_args()
    names = ("input_ids", "labels")
    batch = {name: torch.empty(BATCH, SEQUENCE, dtype=torch.int64, device="meta") for name in names}
    model = llama_3_8b()
    table = Table(title=f"Llama-3-8B, bf16, 8 × H100, batch {BATCH} × {SEQUENCE}")
    for heading in ("limit", "memory", "step", "mesh", "regions", "planned in"):
        table.add_column(heading)
    limit, before_s, faults = options.start, 0.0, []
    while True:
        cluster = {"preset": "h100:8", "memory_bytes": int(limit)}
        start = time.perf_counter()
        try:
            plan = autopar.compile(model, cluster, batch, gap=GAP).plan
        except autopar.InfeasibleError as error:
            message = str(error)
            break
        took_s = time.perf_counter() - start
        predicted = plan.predicted
        if predicted.memory_bytes > int(limit):
            faults.append(f"{limit:.3g}: {predicted.memory_bytes} bytes are over the limit")
        if predicted.step_s < before_s * (1 - 2 * GAP):
            faults.append(f"{limit:.3g}: {predicted.step_s} s is faster than {before_s} s")
        before_s = max(before_s, predicted.step_s)
        mesh = " · ".join(f"{axis} {size}" for axis, size in plan.axes.items())
        print(f"{limit / 1e9:.1f} GB: {predicted.step_s:.4f} s, {took_s:.1f} s", flush=True)
        table.add_row(
            f"{limit / 1e9:.1f} GB",
            f"{predicted.memory_bytes / 1e9:.1f} GB",
            f"{predicted.step_s * 1e3:.1f} ms",
            f"{mesh}, {plan.microbatches} mb",
            strategies_of(plan),
            f"{took_s:.1f} s",
        )
        limit *= options.factor
    console = Console(width=150)
    console.print(table)
    console.print(f"at {limit / 1e9:.1f} GB: {message}")
    for fault in faults:
        console.print(f"WRONG at {fault}")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()

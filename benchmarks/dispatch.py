"""CPU time of a step, as ratios: the emitted program, the captured graph unsplit, and DTensor.

A fake process group moves nothing, the model is tiny (4 layers, hidden 64, sequence 16), one
thread: what remains is the time that Python and the dispatcher take. A step is forward, backward
and the sums of gradients; the median of 30 runs, interleaved, in one process.

    python benchmarks/dispatch.py
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.capture import capture

RUNS = 30
WORLD = 4
BATCH, SEQUENCE = 2, 16
OFF = {"dp": 1, "tp": WORLD, "zero": False, "microbatches": 1}


def llama() -> LlamaForCausalLM:
    """The measured model, with weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch() -> dict[str, torch.Tensor]:
    """A global batch."""
    ids = torch.randint(0, 256, (BATCH, SEQUENCE))
    return {"input_ids": ids, "labels": ids.clone()}


def unsplit() -> Callable[[], None]:
    """A step over the captured graphs as they are: no axis, no collective."""
    model, data = llama(), batch()
    captured = capture(model, data)
    graphs = [torch.fx.GraphModule(nn.Module(), block.graph) for block in captured.blocks]
    index = {layer.path: layer.block for layer in captured.layers}
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def bound(block: Any, prefix: str) -> list[torch.Tensor]:
        names = {**block.params, **block.buffers}
        return [weights[prefix + names[n.name]] for n in block.graph.nodes if n.name in names]

    arguments = {
        layer.path: bound(captured.blocks[layer.block], f"{layer.path}.")
        for layer in captured.layers
    }

    def call(tensors: list[torch.Tensor], path: str) -> Any:
        return graphs[index[path]](*arguments[path], *tensors)

    skeleton = torch.fx.Graph()
    skeleton.output(skeleton.graph_copy(captured.skeleton.graph, {}))
    for node in skeleton.nodes:
        if node.op == "call_function" and str(node.target).startswith("autopar."):
            node.target = call
            node.args = node.args[:2]
    root = torch.fx.GraphModule(nn.Module(), skeleton)
    inputs = [*bound(captured.skeleton, ""), *data.values()]

    def step() -> None:
        model.zero_grad()
        (loss,) = root(*inputs)
        loss.backward()

    return step


def emitted(pin: dict[str, Any]) -> Callable[[], None]:
    """A step of autopar's program on rank 0 of a fake world."""
    model, data = llama(), batch()
    compiled = autopar.compile(model, f"cpu:{WORLD}", data, pin={**OFF, **pin})
    parallel = compiled.materialize()
    local = parallel.shard_batch(data)

    def step() -> None:
        parallel.forward_backward(local)

    return step


def dtensor(sequence: bool) -> Callable[[], None]:
    """A step of the Hugging Face model under torch's parallelize_module."""
    model, data = llama(), batch()
    positions = torch.arange(SEQUENCE).unsqueeze(0)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, _layer_plan(sequence))
    root: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1) if sequence else Replicate()
        ),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Replicate()
        ),
    }
    if sequence:
        root["model.norm"] = SequenceParallel()
    parallelize_module(model, mesh, root)

    def step() -> None:
        model.zero_grad()
        # Positions are given: from split activations the model would count too few.
        model(**data, position_ids=positions).loss.backward()

    return step


def _layer_plan(sequence: bool) -> dict[str, Any]:
    out = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    plan: dict[str, Any] = {
        f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")
    }
    plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
    plan |= {"self_attn.o_proj": out, "mlp.down_proj": out}
    if sequence:
        plan |= {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
        }
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan["mlp"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
    return plan


def medians(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median CPU seconds of each step, the steps interleaved."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for run in range(RUNS + 3):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if run >= 3:  # the first ones fill caches
                times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print the table of ratios."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    found = medians(
        {
            "captured graph, unsplit": unsplit(),
            "emitted, tp4": emitted({"sequence": False}),
            "emitted, tp4 + sequence": emitted({"sequence": True}),
            "DTensor, tp4": dtensor(False),
            "DTensor, tp4 + sequence": dtensor(True),
        }
    )
    base = found["captured graph, unsplit"]
    for name, seconds in found.items():
        print(f"{name:28s} {seconds * 1e3:8.2f} ms   {seconds / base:5.2f} x")
    for case in ("tp4", "tp4 + sequence"):
        ratio = found[f"DTensor, {case}"] / found[f"emitted, {case}"]
        print(f"DTensor over emitted, {case}: {ratio:.2f} x")


if __name__ == "__main__":
    main()

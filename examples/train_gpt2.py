"""Train a GPT-2, one token a byte, on the source text of Python's own standard library.

    torchrun --nproc-per-node 4 examples/train_gpt2.py

Plans twice, freely and with too little memory to replicate everything, prints both plans, trains
the second and tells what came of it. `--pin '{"dp": 2, "tp": 2, "sequence": true}'` trains that
plan instead; `--compare 20` holds the first losses against plain PyTorch.
"""

import argparse
import functools
import gc
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from stdlib_text import VOCAB, Corpus, evaluation_batches, load_corpus, random_batch
from training_log import TrainingLog
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

LENGTH, SAMPLES = 128, 16  # one step takes SAMPLES windows of LENGTH bytes, over all processes
EVALUATION_BATCHES = 16
CLIP_NORM = 1.0
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1)
TOLERANCE = 1e-3  # nats per byte; float32 sums in another order differ by 1e-5 or so


def main() -> int:
    """Plan, train, evaluate. Returns the exit status, the same on every rank."""
    options = parse_options()
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0)
    model, corpus = build_model(), load_corpus()
    compiled = choose_plan(options, model, corpus, console)
    done = compiled is not None and run(compiled, model, corpus, options, console)
    dist.barrier()  # a rank that leaves earlier would break a collective of its peers
    gc.collect()  # modules that still hold a process group would keep its threads past the end
    dist.destroy_process_group()
    return 0 if done else 1


def run(
    compiled: autopar.Compiled,
    model: GPT2LMHeadModel,
    corpus: Corpus,
    options: argparse.Namespace,
    console: Console,
) -> bool:
    """Train under a plan and report; False where the losses are not plain PyTorch's."""
    if dist.get_rank() == 0:
        compiled.save(options.out)
    console.print(f"The plan and its program are in {options.out}: plan.json, module.py")
    reference = plain_losses(model, corpus, options.compare)
    parallel = compiled.materialize()
    before = evaluate(parallel, corpus)
    console.print(f"evaluation loss before training: {before:.3f} nats per byte")
    with TrainingLog(options.steps, SAMPLES * LENGTH, console) as log:
        faithful = train(parallel, corpus, options, reference, log)
    after = evaluate(parallel, corpus)
    console.print(f"evaluation loss {before:.3f} → {after:.3f} nats per byte", soft_wrap=True)
    console.print(measured(compiled.plan, log))
    return faithful


def parse_options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1200, help="train for at most so many steps")
    parser.add_argument("--minutes", type=float, default=3.5, help="and for at most so long")
    parser.add_argument("--out", type=Path, default=Path("build/train_gpt2"), help="folder")
    parser.add_argument("--pin", type=json.loads, help="train this plan: JSON, as compile's pin")
    parser.add_argument("--compare", type=int, default=0, metavar="N", help="against plain PyTorch")
    return parser.parse_args()


def build_model() -> GPT2LMHeadModel:
    """An unmodified GPT-2 of 0.8 million parameters; the same weights on every rank."""
    transformers.logging.set_verbosity_error()  # it only says that it takes the usual loss
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def global_batch(corpus: Corpus, step: int) -> dict[str, torch.Tensor]:
    """What one step trains on, over all processes."""
    return random_batch(corpus.train, SAMPLES, LENGTH, seed=step)


# ---------------------------------------------------------------- planning


def choose_plan(
    options: argparse.Namespace, model: GPT2LMHeadModel, corpus: Corpus, console: Console
) -> autopar.Compiled | None:
    """The plan to train, printed; None (the reason printed) where it isn't what it should be."""
    world, batch = dist.get_world_size(), global_batch(corpus, 0)
    plan_for = functools.partial(
        autopar.compile, model, batch=batch, optimizer=OPTIMIZER, clip_norm=CLIP_NORM
    )
    cpus = f"cpu:{world}"
    if options.pin is not None:
        compiled = plan_for(cluster_spec=cpus, pin=options.pin)
        show(console, "Pinned", compiled.plan)
        return compiled
    show(console, "Planned freely", plan_for(cluster_spec=cpus).plan)
    needs = [memory_of(world, zero, plan_for) for zero in (False, 3)]
    tight = {"preset": cpus, "memory_bytes": sum(needs) // 2}
    # Microbatches, stages or recomputation would make room enough: only ZeRO is left to choose.
    compiled = plan_for(cluster_spec=tight, pin=alone(world))
    show(console, f"Planned for {sum(needs) / 2e6:.1f} MB a device", compiled.plan)
    console.print(
        f"Data parallelism alone needs {needs[0] / 1e6:.1f} MB a device, with ZeRO 3 everywhere "
        f"{needs[1] / 1e6:.1f} MB.",
        soft_wrap=True,
    )
    if not mixes(compiled.plan):
        console.print("[bold red]Failed:[/] this memory needs a mix, and all regions are alike.")
        return None
    return compiled


def memory_of(world: int, zero: int | bool, plan_for: functools.partial[autopar.Compiled]) -> int:
    """Bytes a device of data parallelism alone, in one microbatch, with or without ZeRO."""
    compiled = plan_for(cluster_spec=f"cpu:{world}", pin={**alone(world), "zero": zero})
    return compiled.plan.predicted.memory_bytes


def alone(world: int) -> dict[str, object]:
    """Pins data parallelism in one microbatch; ZeRO is free."""
    return {"dp": world, "microbatches": 1, "recompute": False}


def show(console: Console, title: str, plan: autopar.Plan) -> None:
    """A plan under its title, as `print` would show it."""
    console.rule(title)
    console.print(str(plan), markup=False, highlight=False, soft_wrap=True)


def mixes(plan: autopar.Plan) -> bool:
    """Whether regions with matrices (all but the stream of norms and sums between them), which all
    could be under ZeRO, are treated differently."""
    stages = {
        choice.strategies.get("zero", {}).get("stage")
        for choice in plan.regions
        if choice.region != "stream"
    }
    return len(stages) > 1


# ---------------------------------------------------------------- training


def plain_losses(model: GPT2LMHeadModel, corpus: Corpus, steps: int) -> list[float]:
    """Losses of the first steps in plain PyTorch, from rank 0 to all; `model` stays as it is."""
    losses: list[float] = []
    if dist.get_rank() == 0:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = OPTIMIZER(model.parameters())
        model.train()
        for step in range(steps):
            loss = model(**global_batch(corpus, step)).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            losses.append(loss.item())
        model.load_state_dict(weights)
    told = [losses]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def train(
    parallel: autopar.TrainingModule,
    corpus: Corpus,
    options: argparse.Namespace,
    reference: list[float],
    log: TrainingLog,
) -> bool:
    """Train for `steps` or `minutes`; stops with False where a loss is not the reference's."""
    worst = 0.0
    end = time.monotonic() + 60 * options.minutes
    for step in range(options.steps):
        batch = parallel.shard_batch(global_batch(corpus, step))
        start = time.perf_counter()
        loss = parallel.train_step(batch).loss.item()
        log.step(step, loss, time.perf_counter() - start)
        if step < len(reference):
            worst = max(worst, abs(loss - reference[step]))
        if step == len(reference) - 1:
            log.say(
                f"The first {step + 1} losses differ from plain PyTorch's by {worst:.1e} at most"
            )
            if not worst <= TOLERANCE:
                log.say(f"That is more than {TOLERANCE:.0e}: the plan computes something else.")
                return False
        if any_rank(time.monotonic() > end):
            break
    return True


def any_rank(flag: bool) -> bool:
    """Whether some rank says so: clocks differ, and all ranks must stop after the same step."""
    flags = torch.tensor(int(flag))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags)


def evaluate(parallel: autopar.TrainingModule, corpus: Corpus) -> float:
    """Mean loss over windows spread over the files that are never trained on, nats per byte."""
    batches = evaluation_batches(corpus.evaluate, SAMPLES, LENGTH, EVALUATION_BATCHES)
    losses = [parallel.evaluate(parallel.shard_batch(batch)) for batch in batches]
    return float(torch.stack(losses).mean())


def measured(plan: autopar.Plan, log: TrainingLog) -> Table:
    """The plan's figures beside those of the run."""
    predicted = plan.predicted
    table = Table(title="predicted and measured")
    for name in ("", "predicted", "measured"):
        table.add_column(name, justify="right" if name else "left")
    mfu = predicted.mfu * predicted.step_s / log.step_s
    for name, told, found in (
        ("step time, median", f"{predicted.step_s * 1e3:.0f} ms", f"{log.step_s * 1e3:.0f} ms"),
        ("MFU in such a step", f"{predicted.mfu:.1%}", f"{mfu:.1%}"),
        ("tokens/s, whole run", f"{predicted.tokens_per_s:,.0f}", f"{log.tokens_per_s:,.0f}"),
    ):
        table.add_row(name, told, found)
    return table


if __name__ == "__main__":
    sys.exit(main())
